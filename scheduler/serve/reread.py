"""Which files may be read again while the server runs."""

import stat
from pathlib import Path

ONLY_ONCE = "a pipe or a device is read at the start alone: nobody must wait for it now"


def may_wait(path: Path | None) -> bool:
    """Whether reading `path` may wait for somebody else, or never end: it is a pipe, a terminal or another device."""
    try:
        mode = 0 if path is None else path.stat().st_mode
    except OSError:  # which whoever reads it gets to know
        return False
    return mode != 0 and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
