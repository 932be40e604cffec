"""Which files may be read again while the server runs."""

import stat
from pathlib import Path

ONLY_ONCE = "a pipe or a device is read at the start only: reading it now could stop the server"


def may_wait(path: Path | None) -> bool:
    """Whether reading `path` may wait for somebody else, or never end: it is a pipe, a terminal or another device."""
    if path is None:
        return False
    try:
        mode = path.stat().st_mode
    except OSError:  # which whoever reads it gets to know
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
