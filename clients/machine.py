"""What the system says of this machine and this process. Linux; where there is no /proc the answers are None."""

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """The CPU's name as its maker writes it, else the architecture's."""
    return _field("/proc/cpuinfo", "model name") or platform.machine()


def resident_bytes() -> int | None:
    """Bytes of this process in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int | None:
    """Bytes that can be allocated without swapping."""
    field = _field("/proc/meminfo", "MemAvailable")
    return 1024 * int(field.removesuffix(" kB")) if field else None


def _field(path: str, name: str) -> str | None:
    """The value of the first line `name: value` of a file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(
        (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), None
    )
