"""What a client may have meant by a path there is nothing at."""

import difflib
from collections.abc import Iterable

LONGEST = 128
"""A longer path means none of ours, and comparing takes time."""


def nearest(path: str, paths: Iterable[str]) -> str | None:
    """Of `paths` the one most like `path`: but for a slash, for what stands before it, or for a few letters.

    None if there is no such.
    """
    asked = path.rstrip("/").lower()
    if not asked or len(asked) > LONGEST:
        return None
    known = list(paths)
    if around := [one for one in known if one.endswith(asked)]:
        return min(around, key=len)
    if alike := difflib.get_close_matches(asked, known, n=1, cutoff=0.8):
        return alike[0]
    return max((one for one in known if asked.endswith(one)), key=len, default=None)
