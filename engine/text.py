"""What is asked of texts wherever they are handled."""

import re
from collections.abc import Iterable

from engine.errors import ParamError


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """An expression that matches, and captures, any of `texts`, of several at one place the longest."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"((?!))")


def check_encodable(param: str, text: str) -> None:
    """Raise `ParamError` naming `param` if `text` holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(text[error.start]):04X}"
        raise ParamError(param, f"{param} holds the lone surrogate {surrogate}, which is no character") from error
