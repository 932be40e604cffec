"""Telling data from structure in a text that a template put together.

What a message spells must stay text, but the rendered text of a chat does not show which part of it was a message. So a
mark is put into the data before every place where a control token's name begins, and after rendering a name behind a
mark is no control token. Marks survive what templates do with data: trim, split, join, search, print as Python or JSON.
(Taking single characters out of the midst of a message, so that what is left spells a name, would go unnoticed; no
template is known to do it.)

A mark is a lone surrogate, because no text contains one. Printed as Python or JSON it may appear as an escape, which a
text can contain: a mark is chosen of which this one does not.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import ParamError
from engine.text import any_of, check_encodable


class ControlNames:
    """The names of a model's control tokens, and where they begin in a text."""

    def __init__(self, names: Collection[str]) -> None:
        self.any = any_of(names).pattern
        self._start = re.compile(f"(?={self.any})")
        self._beginnings = frozenset(name[:length] for name in names for length in range(1, len(name)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def starts_in(self, text: str) -> list[int]:
        """Where names begin, in order. The last may be cut off by the end: what comes behind could complete it."""
        starts = {match.start() for match in self._start.finditer(text)}
        possible = range(max(0, len(text) - self._longest_beginning), len(text))
        starts.update(start for start in possible if text[start:] in self._beginnings)
        return sorted(starts)


class Marks:
    """The marks for one rendering of `data`, and of nothing else.

    `end` is for the caller, to find a place again; it is never confused with data either.

    Raises `ParamError` if `data` contains the escapes of all marks, and `RecursionError` if it is nested too deeply.
    """

    def __init__(self, names: ControlNames, data: object) -> None:
        spelled = set(re.findall(r"\\ud[c-f][0-9a-f]{2}", repr(data)))
        free = [mark for mark in map(chr, range(0xDC00, 0xE000)) if _escape(mark) not in spelled]
        if len(free) < 2:
            raise ParamError("messages", "messages must not spell every surrogate's escape")
        self._names = names
        self._data, self.end = free[:2]

    def put_into(self, value: Any) -> Any:
        """A copy of `value`, parsed JSON, in which every string is marked, keys included.

        Raises `ParamError` for a string with a lone surrogate, and `RecursionError`.
        """
        match value:
            case str():
                check_encodable("messages", value)
                edges = [0, *self._names.starts_in(value), len(value)]
                return self._data.join(value[start:end] for start, end in itertools.pairwise(edges))
            case Mapping():
                return {self.put_into(key): self.put_into(element) for key, element in value.items()}
            case list() | tuple():
                return [self.put_into(element) for element in value]
            case _:
                return value

    def split(self, rendered: str) -> tuple[str, ...]:
        """Text and control token's name in turn, beginning and ending with a text, and without marks."""
        behind_no_mark = f"(?<!{self._data})(?<!{re.escape(_escape(self._data))})"
        return tuple(map(self.removed_from, re.split(behind_no_mark + self._names.any, rendered)))

    def removed_from(self, text: str) -> str:
        """`text` without marks."""
        for mark in (self._data, self.end):
            text = text.replace(mark, "").replace(_escape(mark), "")
        return text


def _escape(mark: str) -> str:
    r"""How Python and JSON print it: `\udc00`."""
    return f"\\u{ord(mark):04x}"
