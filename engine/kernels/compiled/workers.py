"""Threads that live in the compiled pool (see `pool`), and the block of memory through which they hear of work."""

import ctypes
import os
import platform
import sys
import threading
import weakref
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.kernels.compiled import pool
from engine.kernels.compiled.formats import allocate
from engine.kernels.compiled.jit import Library

Number = TypeVar("Number", np.int32, np.int64)

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FORWARD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Workers:
    """`n_threads` of the compiled pool, the caller being the first; the others stop when this object is gone."""

    def __init__(self, n_threads: int, library: Library, forward: int, worker: int) -> None:
        """`forward` and `worker` are the addresses of what `forward.build` made in `library`."""
        self.n_threads = n_threads
        self.lock = threading.Lock()
        self._forward = _FORWARD(forward)
        self._control = allocate(pool.CONTROL_BYTES)
        libc = ctypes.CDLL(None)
        futex = _FUTEX_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        for field, value in (
            (pool.SYSCALL, _address(libc.syscall) if futex else 0),
            (pool.FUTEX, futex or 0),
            (pool.YIELD, _address(libc.sched_yield)),
            (pool.THREADS, n_threads),
        ):
            _word(self._control, field, np.int64)[:] = value
        for i in range(1, n_threads):
            # Threads hold what they run in, code and control block: they may outlive this object a little.
            arguments = (_WORKER(worker), self._control, library)
            threading.Thread(target=_live, args=arguments, name=f"kernels-{i}", daemon=True).start()
        weakref.finalize(self, _stop, self._control)

    def forward(self, frame: NDArray[np.int64]) -> None:
        """Run the compiled forward, with the GIL released; the caller holds `lock`."""
        assert self.lock.locked()
        self._forward(self._control.ctypes.data, frame.ctypes.data)


def physical_cores() -> int:
    """Physical cores this process may use, at least 1: a second thread on a core shares its dot-product unit."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        shared = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(shared or str(cpu))
    return max(1, min(len(siblings), _quota()))


def _quota() -> int:
    """Whole cores of time that a container's control group grants; many if it sets no limit."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) // int(period) if quota.isdigit() else sys.maxsize


def _read(path: str) -> str:
    """The text of a file of the system, empty if there is none."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _live(worker: "ctypes._FuncPointer", control: NDArray[np.uint8], _code: Library) -> None:
    """A worker's life: machine code, the GIL released, until `_stop`."""
    worker(control.ctypes.data)


def _stop(control: NDArray[np.uint8]) -> None:
    _word(control, pool.STOP, np.int32)[:] = 1
    _word(control, pool.EPOCH, np.int32)[:] += 1
    futex = _word(control, pool.FUTEX, np.int64)[0]
    if futex:
        word, everybody = ctypes.c_void_p(control.ctypes.data + pool.EPOCH), 1 << 30
        ctypes.CDLL(None).syscall(ctypes.c_long(futex), word, pool.FUTEX_WAKE, everybody, None, None, 0)


def _word(control: NDArray[np.uint8], offset: int, kind: type[Number]) -> NDArray[Number]:
    return control[offset : offset + np.dtype(kind).itemsize].view(kind)


def _address(function: "ctypes._FuncPointer") -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
