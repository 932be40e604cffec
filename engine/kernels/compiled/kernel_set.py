"""The compiled kernel set: compiles what a model needs, and runs forwards in bounded workspace."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from engine.batch import Chunk
from engine.config import ModelConfig
from engine.kernels.compiled import attention, forward, isa, tile
from engine.kernels.compiled.attention import PARTITION, HeadShape
from engine.kernels.compiled.cache import BlockedCache
from engine.kernels.compiled.formats import BLOCK, TILE, TileFormat, allocate, round_up, rounded
from engine.kernels.compiled.jit import Library
from engine.kernels.compiled.layouts import FRAME
from engine.kernels.compiled.parts import attention_parts
from engine.kernels.compiled.quantize import PANEL_ROWS, RECORD_BYTES
from engine.kernels.compiled.weights import PackedModel, address, head_width, matrix_fields
from engine.kernels.compiled.workers import Workers, physical_cores
from engine.kernels.protocol import FloatArray, Rows, TensorSource, begin
from engine.quants import Quantized, Tensor

MAX_ROWS = 512
"""Rows of one compiled call; a larger batch takes several, which by the contract changes nothing."""


class AttentionAddresses(NamedTuple):
    """Where `attention.build`'s kernels for one head shape are."""

    attend_one: int
    attend_some: int
    append: int


class CompiledKernels:
    """See `engine.kernels.protocol.KernelSet`. Forwards of one set run one after another: they share its threads.

    `threads` None means one per physical core; `path` None the fastest this CPU has. `pack` keeps float
    weights unless the set `rounds_floats`.
    """

    name = "compiled"

    def __init__(
        self, threads: int | None = None, path: isa.CPUPath | None = None, *, rounds_floats: bool = True
    ) -> None:
        self.rounds_floats = rounds_floats
        self.library = Library(path or isa.detect())
        self.cpu_path = self.library.path.name
        self._workers = self._new_workers(threads or physical_cores())

    def with_threads(self, threads: int) -> Self:
        """This set, the machine code shared, with threads of its own. Two of them must not run one model at once."""
        other = copy.copy(self)
        other._workers = self._new_workers(threads)  # noqa: SLF001 - one of our own kind
        return other

    def pack(self, config: ModelConfig, tensors: TensorSource, progress: Callable[[float], None]) -> "CompiledModel":
        """The model in tiles; `tensors` may go away afterwards. `progress` is called with the fraction done."""

        def prepared(name: str) -> Tensor:
            tensor = tensors(name)
            if isinstance(tensor, Quantized) or tensor.ndim == 1 or not self.rounds_floats:
                return tensor
            return rounded(tensor)

        model = CompiledModel(PackedModel.of(config, prepared, progress), self.tile_kernels)
        progress(1.0)
        return model

    def new_cache(self, config: ModelConfig, n_slots: int, max_len: int, dtype: str) -> BlockedCache:
        """An empty cache, its kernels compiled; raises `CacheError` for a size below 1 or an unknown dtype."""
        cache = BlockedCache(config, n_slots, max_len, dtype)
        self.attention_kernels(cache.head_shape)
        return cache

    def forward(self, weights: "CompiledModel", chunks: Sequence[Chunk], cache: BlockedCache) -> FloatArray:
        """As `KernelSet.forward`."""
        begin(chunks, cache)
        rows = Rows.of(chunks)
        with self._workers.lock:
            logits = weights.new_logits(int(np.count_nonzero(rows.wants_logits)))
            weights.use_cache(cache, self.attention_kernels(cache.head_shape))
            done = 0
            for start in range(0, len(rows.token_ids), MAX_ROWS):
                done += weights.use_rows(_part(rows, slice(start, start + MAX_ROWS)), logits[done:])
                self._workers.forward(weights.frame)
            cache.commit(chunks)
        return logits[:, : weights.config.vocab_size]

    def tile_kernels(self, fmt: TileFormat) -> tuple[int, int]:
        """Addresses of `tile.build`'s `product` and `row` for `fmt`."""
        product, row = (
            self.library.address(fmt.name, kernel, lambda module: tile.build(module, self.library.path, fmt))
            for kernel in ("product", "row")
        )
        return product, row

    def attention_kernels(self, shape: HeadShape) -> AttentionAddresses:
        """The kernels of `attention.build` for `shape`."""

        def build(module: ir.Module) -> None:
            attention.build(module, self.library.path, shape)

        return AttentionAddresses(*(self.library.address(shape.name, k, build) for k in AttentionAddresses._fields))

    def _new_workers(self, n_threads: int) -> Workers:
        return Workers(n_threads, self.library, self._generic("forward"), self._generic("worker"))

    def _generic(self, function: str) -> int:
        return self.library.address("decoder", function, lambda module: forward.build(module, self.library.path))


class CompiledModel:
    """A packed model with the workspace its forwards share, and the frame that tells the kernels where all of it is."""

    def __init__(self, model: PackedModel, kernels: Callable[[TileFormat], tuple[int, int]]) -> None:
        config = self.config = model.config
        self._model = model
        self._layers = model.layer_table(kernels)
        self.frame = np.zeros(len(FRAME.names), np.int64)
        self._kept: dict[str, NDArray[np.generic]] = {}
        width = head_width(config)
        x_width = model.embedding.blocks * BLOCK
        mixed_width = round_up(config.n_heads * config.d_head, BLOCK)
        ffn_width = model.layers[0].matrices["down"].blocks * BLOCK
        qkv = [(n * width) for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
        self.set(
            n_layers=config.n_layers,
            layers=address(self._layers),
            d_model=config.d_model,
            norm_eps=_float_bits(config.norm_eps),
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_width=width,
            d_head=config.d_head,
            score_scale=_float_bits(config.d_head**-0.5),
            output_norm=address(model.output_norm),
            x_stride=4 * x_width,
            qkv_stride=4 * sum(qkv),
            k_start=4 * qkv[0],
            v_start=4 * (qkv[0] + qkv[1]),
            mixed_stride=4 * (mixed_width + width),
            **{f"embedding_{k}": v for k, v in matrix_fields(model.embedding, kernels).items()},
            **{f"head_{k}": v for k, v in matrix_fields(model.head, kernels).items()},
        )
        self._provide("x", MAX_ROWS * 4 * x_width)
        self._provide("qkv", MAX_ROWS * 4 * sum(qkv))
        self._provide("mixed", MAX_ROWS * 4 * (mixed_width + width))
        for name, columns in (("x_panels", x_width), ("mixed_panels", mixed_width), ("ffn_panels", ffn_width)):
            self._provide(name, MAX_ROWS // PANEL_ROWS * (columns // BLOCK) * RECORD_BYTES)

    def set(self, **fields: int) -> None:
        """Write fields of the frame."""
        for name, value in fields.items():
            self.frame[FRAME.index(name)] = value

    def use_cache(self, cache: BlockedCache, kernels: AttentionAddresses) -> None:
        """Point the frame at `cache` and at the kernels for its shape."""
        self._kept["rotations"] = cache.rotations
        self._head_shape = cache.head_shape
        self.set(
            **kernels._asdict(),
            cache=cache.address,
            slot_bytes=cache.slot_bytes,
            block_bytes=cache.block_bytes,
            record_bytes=cache.head_shape.record_bytes,
            partial_bytes=cache.head_shape.partial_bytes,
            rotations=address(cache.rotations),
        )

    def use_rows(self, rows: Rows, logits: FloatArray) -> int:
        """Point the frame at `rows` and at where their logits go; returns how many rows want logits."""
        partitions = rows.positions // PARTITION + 1
        first_partials = np.concatenate([np.zeros(1, np.int64), np.cumsum(partitions)])
        partial_bytes = self._head_shape.partial_bytes
        self._provide("partials", int(first_partials[-1]) * self.config.n_kv_heads * partial_bytes)
        parts = attention_parts(rows.slots, rows.positions, self._head_shape.rows_at_once)
        logits_rows = np.flatnonzero(rows.wants_logits)
        arrays = {
            "token_ids": rows.token_ids,
            "slots": rows.slots,
            "positions": rows.positions,
            "logits_rows": logits_rows,
            "first_partials": first_partials,
            **parts._asdict(),
        }
        for name, array in arrays.items():
            contiguous = np.ascontiguousarray(array, np.int64)
            self._kept[name] = contiguous
            self.set(**{name: address(contiguous)})
        self.set(
            n_rows=len(partitions),
            n_parts=len(parts.part_rows),
            n_logits=len(logits_rows),
            logits=address(logits),
            logits_stride=logits.strides[0],
        )
        return len(logits_rows)

    def new_logits(self, n: int) -> FloatArray:
        """Room for `n` rows of logits, whole tiles wide."""
        return np.empty((n, self._model.head.n_tiles * TILE), np.float32)

    def _provide(self, name: str, n_bytes: int) -> None:
        """Make the workspace behind field `name` at least `n_bytes` large."""
        if name not in self._kept or self._kept[name].nbytes < n_bytes:
            self._kept[name] = allocate(n_bytes)
            self.set(**{name: address(self._kept[name])})


def _part(rows: Rows, part: slice) -> Rows:
    return Rows(rows.token_ids[part], rows.slots[part], rows.positions[part], rows.wants_logits[part])


def _float_bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))
