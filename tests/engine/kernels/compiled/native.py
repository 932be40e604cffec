"""Compiled kernels called from tests, one at a time."""

import ctypes
from functools import cache

import numpy as np

from engine.kernels.compiled import attention, isa, tile
from engine.kernels.compiled.formats import TILE, Matrix
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.lang import PTR, F32x16, Function
from engine.kernels.compiled.quantize import PANEL_ROWS, RECORD_BYTES, quantize_row

PATHS = [name for name in isa.NAMES if isa.can_run(name)]
"""What this CPU can run, each compiled for the oldest CPU that has it."""


@cache
def library(path: str) -> Library:
    return Library(isa.named(path))


def call(address: int, *args: object) -> None:
    """Arrays are passed by address, integers as int64, floats as float32."""
    kinds = {int: ctypes.c_int64, float: ctypes.c_float}
    values = [arg.ctypes.data if isinstance(arg, np.ndarray) else arg for arg in args]
    types = [ctypes.c_void_p if isinstance(arg, np.ndarray) else kinds[type(arg)] for arg in args]
    ctypes.CFUNCTYPE(None, *types)(address)(*values)


def lanes(path: str, name: str, compute) -> int:
    """Address of a function (x, out) that applies `compute(f, path, x)` to 16 floats."""

    def build(module):
        f = Function(module, f"{module.name}.run", [("x", PTR), ("out", PTR)], exported=True)
        f["out"].store(compute(f, library(path).path, f["x"].load(F32x16)))
        f.finish()

    return library(path).address(name, "run", build)


def panel_of(path: str, x: np.ndarray) -> np.ndarray:
    """`x` [R <= 8, 32 * blocks] quantized into one panel of uint8 records."""

    def build(module):
        params = [("x", PTR), ("panel", PTR), ("row", tile.I64), ("blocks", tile.I64)]
        f = Function(module, f"{module.name}.run", params, exported=True)
        quantize_row(f, f["x"], f["panel"], f["row"], f["blocks"])
        f.finish()

    address = library(path).address("test_quantize_row", "run", build)
    blocks = x.shape[1] // tile.BLOCK
    panel = np.zeros(blocks * RECORD_BYTES, np.uint8)
    for row, values in enumerate(np.ascontiguousarray(x, np.float32)):
        call(address, values, panel, row, blocks)
    return panel


def product(path: str, matrix: Matrix, panel: np.ndarray, n_rows: int) -> np.ndarray:
    """All tiles of `matrix` against `n_rows` rows of `panel`: float32 [n_rows, 16 * tiles]."""
    fmt = matrix.format
    address = library(path).address(fmt.name, "product", lambda m: tile.build(m, library(path).path, fmt))
    out = np.full((n_rows, matrix.n_tiles * TILE), np.nan, np.float32)
    for index in range(matrix.n_tiles):
        weights = matrix.data[index * matrix.tile_bytes :]
        target = out[:, index * TILE :]
        call(address, weights, matrix.blocks, panel, n_rows, target, out.strides[0], tile.STORE)
    return out


def row_weights(path: str, matrix: Matrix, n: int) -> np.ndarray:
    """Row `n` of `matrix` as float32."""
    fmt = matrix.format
    address = library(path).address(fmt.name, "row", lambda m: tile.build(m, library(path).path, fmt))
    out = np.empty(matrix.blocks * tile.BLOCK, np.float32)
    call(address, matrix.data[n // TILE * matrix.tile_bytes :], matrix.blocks, n % TILE, out)
    return out


def attention_kernel(path: str, shape: attention.HeadShape, name: str) -> int:
    return library(path).address(shape.name, name, lambda m: attention.build(m, library(path).path, shape))


__all__ = ["PANEL_ROWS", "PATHS", "attention_kernel", "call", "lanes", "library", "panel_of", "product", "row_weights"]
