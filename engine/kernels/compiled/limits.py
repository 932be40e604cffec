"""What this machine can do at most: integer dot products from registers, and reading memory.

A benchmark holds a whole step against these. The clock is the caller's; calls release the GIL, so that threads may be
put to work side by side.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from engine.kernels.compiled.dots import Operands, pmaddubsw, vpdpbusd_256
from engine.kernels.compiled.formats import CACHE_LINE
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.lang import I64, PTR, Function, I8x64, I32x16, Value

STEPS = 8
"""Vectors of codes that one chain multiplies in one pass of the loop: a 32-block's."""
_LINES = 8
READ_UNIT = _LINES * CACHE_LINE
"""Bytes read in one pass; what is read must be a multiple of it."""
PATTERN = 16
"""Passes after which the activations repeat."""


def chains(path: CPUPath) -> int:
    """Sums that grow side by side: enough to hide an instruction's latency, as many as are quickest."""
    if path.registers >= 32:
        return 12
    return 5 if path.dots is vpdpbusd_256 else 4


class Limits:
    """The two measuring loops, compiled for one CPU path."""

    def __init__(self, library: Library) -> None:
        self.chains = chains(library.path)
        rng = np.random.default_rng(0)
        self.codes = rng.integers(0, 16, (self.chains, 64), dtype=np.uint8)
        self.activations = rng.integers(-127, 128, (PATTERN, STEPS, 4), dtype=np.int8)
        dots, read = (
            library.address("limits", kernel, lambda m: build(m, library.path)) for kernel in ("dots", "read")
        )
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._dots = ctypes.CFUNCTYPE(None, pointer, pointer, count, pointer)(dots)
        self._read = ctypes.CFUNCTYPE(None, pointer, count, pointer)(read)
        self._library = library  # owns the machine code

    def multiply_adds(self, passes: int) -> int:
        """How many products `dot_products` sums up."""
        return passes * STEPS * self.codes.size

    def dot_products(self, passes: int) -> NDArray[np.int32]:
        """`passes` times through the activations of a pattern with each chain's codes; the sums, int32 [chains, 16].

        One thread's work from registers alone, as `CPUPath.dots` does it for codes of 4 bits.
        """
        sums = np.empty((self.chains, 16), np.int32)
        self._dots(self.codes.ctypes.data, self.activations.ctypes.data, passes, sums.ctypes.data)
        return sums

    def read(self, memory: NDArray[np.uint8]) -> int:
        """The sum modulo 2^32 of the 32-bit words in `memory`, each read once, in order, by one thread.

        `memory` is contiguous, its length a multiple of `READ_UNIT`.
        """
        assert memory.nbytes % READ_UNIT == 0
        sums = np.empty(16, np.uint32)
        self._read(memory.ctypes.data, memory.nbytes // READ_UNIT, sums.ctypes.data)
        return int(sums.sum(dtype=np.uint32))


def build(module: ir.Module, path: CPUPath) -> None:
    """Fill `module` with `dots(codes, activations, passes, sums)` and `read(memory, passes, sums)`."""
    _build_dots(module, path)
    _build_read(module)


def _build_dots(module: ir.Module, path: CPUPath) -> None:
    params = [("codes", PTR), ("activations", PTR), ("passes", I64), ("sums", PTR)]
    f = Function(module, f"{module.name}.dots", params, exported=True)
    codes = [(f["codes"] + 64 * chain).load(I8x64) for chain in range(chains(path))]
    totals = [f.variable(f.constant(I32x16, 0)) for _ in codes]
    with f.range(0, f["passes"]) as index:
        # They change from pass to pass, so that no product can be computed once for all.
        activations = f["activations"] + (index & (PATTERN - 1)) * (4 * STEPS)
        # Neighbouring instructions belong to different sums, so that a CPU need not look far for one that can start.
        # AVX2's sums are widened at the end of a block, so that they cannot be taken apart.
        together = STEPS if path.dots is pmaddubsw else 1
        for first in range(0, STEPS, together):
            vectors = range(first, first + together)
            for code, total in zip(codes, totals, strict=True):
                operands = Operands(vectors, [code] * together, f["codes"], 4, [activations], x_sums=[])
                [total.value] = path.dots(f, [total.value], operands, 1)
    _store(f, [total.value for total in totals])


def _build_read(module: ir.Module) -> None:
    params = [("memory", PTR), ("passes", I64), ("sums", PTR)]
    f = Function(module, f"{module.name}.read", params, exported=True)
    totals = [f.variable(f.constant(I32x16, 0)) for _ in range(_LINES)]
    with f.range(0, f["passes"]) as index:
        lines = f["memory"] + index * READ_UNIT
        for line, total in enumerate(totals):
            total.value = total.value + (lines + line * CACHE_LINE).load(I32x16)
    read = totals[0].value
    for total in totals[1:]:
        read = read + total.value
    _store(f, [read])


def _store(f: Function, sums: list[Value]) -> None:
    for index, values in enumerate(sums):
        (f["sums"] + 64 * index).store(values)
    f.finish()
