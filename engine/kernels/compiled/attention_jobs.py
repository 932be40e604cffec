"""Attention over ragged rows: partitions first, each by itself, then their merge row by row."""

from collections.abc import Callable

from llvmlite import ir

from engine.kernels.compiled.attention import BLOCK_POSITIONS, PARTITION
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, F64, I64, LANES, PTR, VOID, F32x16, Function, Value
from engine.kernels.compiled.layouts import Job
from engine.kernels.compiled.quantize import PANEL_ROWS, quantize_row
from engine.kernels.compiled.vectors import exp


def attend(module: ir.Module) -> Function:
    """Items (part, key/value head): a partition's unmerged results for the rows of the part and the head's queries."""
    f = Job(module, "attend")
    n_kv_heads = f.frame("n_kv_heads")
    group_bytes = f.frame("n_heads") // n_kv_heads * f.frame("head_width") * 4
    with f.range(f["begin"], f["end"]) as item:
        part, head = item // n_kv_heads, item % n_kv_heads
        row, partition = f.of_row("part_rows", part), f.of_row("part_partitions", part)
        n_partitions = f.of_row("positions", row) // PARTITION + 1
        partial = (f.of_row("first_partials", row) + partition) * n_kv_heads + head
        kernel = f.of_row("part_is_shared", part).differs(0).select(f.frame("attend_some"), f.frame("attend_one"))
        f.call_address(
            kernel,
            VOID,
            f.frame("qkv", PTR) + row * f.frame("qkv_stride") + head * group_bytes,
            f.frame("qkv_stride"),
            _records(f, item),
            _records(f, (item + 1).minimum(f["end"] - 1)),
            f.frame("block_bytes"),
            (f.of_row("positions", row) + 1 - partition * PARTITION).minimum(f.constant(I64, PARTITION)),
            f.frame("score_scale", F64).to(F32),
            f.frame("partials", PTR) + partial * f.frame("partial_bytes"),
            n_partitions * n_kv_heads * f.frame("partial_bytes"),
        )
    return f.finish()


def _records(f: Job, item: Value) -> Value:
    """The first cache record of an attention item."""
    part, head = item // f.frame("n_kv_heads"), item % f.frame("n_kv_heads")
    block = f.of_row("part_partitions", part) * (PARTITION // BLOCK_POSITIONS)
    return f.cache_record(f.of_row("part_rows", part), block) + head * f.frame("record_bytes")


def merge(module: ir.Module, path: CPUPath) -> Function:
    """Rows: partitions merged in ascending order, divided by the sum of weights, quantized into the mixed panels."""
    f = Job(module, "merge")
    group = f.frame("n_heads") // f.frame("n_kv_heads")
    with f.range(f["begin"], f["end"]) as row:
        mixed = f.frame("mixed", PTR) + row * f.frame("mixed_stride")
        with f.range(0, f.frame("n_kv_heads")) as kv_head, f.range(0, group) as member:
            # Narrow heads are stored whole vectors at a time: what comes after a head's own elements is zero, is
            # overwritten by the next head, and after the last one fills the row up to its 32-block.
            head = kv_head * group + member
            _Merge(f, path, row, kv_head, member).store(mixed + head * f.frame("d_head") * 4)
        blocks = f.layer("o_blocks")
        quantize_row(f, mixed, f.panel("mixed_panels", row, blocks), row % PANEL_ROWS, blocks)
    return f.finish()


class _Merge:
    """One query head's partitions: outputs o, maxima m and sums s become sum(e^(m - max) o) / sum(e^(m - max) s)."""

    def __init__(self, f: Job, path: CPUPath, row: Value, kv_head: Value, member: Value) -> None:
        self._f = f
        self._path = path
        group, width = f.frame("n_heads") // f.frame("n_kv_heads"), f.frame("head_width") * 4
        begin, end = f.of_row("first_partials", row), f.of_row("first_partials", row + 1)
        self._count = end - begin
        self._step = f.frame("n_kv_heads") * f.frame("partial_bytes")
        self._first = f.frame("partials", PTR) + begin * self._step + kv_head * f.frame("partial_bytes")
        self._outputs = member * width
        self._maxima = group * width + member * 4
        self._sums = self._maxima + group * 4

    def store(self, out: Value) -> None:
        """Write the head's output at `out`."""
        f = self._f
        maximum = f.variable((self._first + self._maxima).load(F32))
        with f.range(1, self._count) as i:
            maximum.value = maximum.value.maximum((self._part(i) + self._maxima).load(F32))
        total = self._weighted(maximum.value, lambda part: (part + self._sums).load(F32).splat())
        with f.range(0, f.frame("head_width") * 4, step=4 * LANES) as column:
            mixed = self._weighted(maximum.value, lambda part: (part + self._outputs + column).load(F32x16))
            (out + column).store(mixed / total)

    def _part(self, i: Value) -> Value:
        return self._first + i * self._step

    def _weighted(self, maximum: Value, load: Callable[[Value], Value]) -> Value:
        """The sum over partitions of e^(their maximum - the row's) times what `load` finds there."""
        f = self._f
        total = f.variable(f.constant(F32x16, 0.0))
        with f.range(0, self._count) as i:
            part = self._part(i)
            share = exp(f, self._path, ((part + self._maxima).load(F32) - maximum).splat())
            total.value = self._path.fma(f, share, load(part), total.value)
        return total.value
