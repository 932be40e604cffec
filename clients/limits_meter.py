"""The machine's limits, measured with all its cores. The clock is handed in."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.kernels.compiled.formats import allocate
from engine.kernels.compiled.limits import READ_UNIT, Limits

READ_BYTES = 1 << 28
"""Far more than the caches near a core hold."""
_LONG_ENOUGH_S = 0.1


class LimitsMeter:
    """Measures the machine's limits with as many threads as its pool has."""

    def __init__(self, limits: Limits, *, threads: int, clock: Callable[[], float]) -> None:
        self.threads = threads
        self._limits = limits
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads)
        part = READ_BYTES // threads // READ_UNIT * READ_UNIT
        memory = allocate(threads * part)
        memory[:] = 1  # every page is there before it is read
        self._parts = np.split(memory[: threads * part], threads)
        self._passes = 1024
        while self._seconds(limits.dot_products, [self._passes] * threads) < _LONG_ENOUGH_S:
            self._passes *= 2

    def multiply_adds_per_s(self) -> float:
        """The rate at which products of small integers are summed in registers, all threads together."""
        seconds = self._seconds(self._limits.dot_products, [self._passes] * self.threads)
        return self.threads * self._limits.multiply_adds(self._passes) / seconds

    def bytes_per_s(self) -> float:
        """The rate at which memory is read, all threads together."""
        return sum(part.nbytes for part in self._parts) / self._seconds(self._limits.read, self._parts)

    def close(self) -> None:
        """Let the threads end and the memory go."""
        self._pool.shutdown()
        self._parts.clear()

    def _seconds(self, work: Callable[[Any], object], shares: Sequence[Any]) -> float:
        """How long the threads take, each doing its share of `work`."""
        t_start = self._clock()
        for _ in self._pool.map(work, shares):
            pass
        return self._clock() - t_start
