"""The records through which Python tells the compiled forward where everything is, and how jobs find their way in them.

Activations of a call are row-major float32 (`x` the residual stream, `qkv`, `mixed` the attention's output) or panels
(see `quantize`). Strides and starts are in bytes.
"""

from dataclasses import dataclass

from engine.kernels.compiled.lang import I64, PTR, Function, Layout, Value
from engine.kernels.compiled.quantize import PANEL_ROWS, RECORD_BYTES

MATRIX = Layout("data", "product", "row", "tile_bytes", "n_tiles", "blocks")
LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER = Layout("attention_norm", "ffn_norm", *(f"{m}_{field}" for m in LAYER_MATRICES for field in MATRIX.names))
FRAME = Layout(
    # The model.
    "n_layers", "layers", "d_model", "norm_eps", "n_heads", "n_kv_heads", "head_width", "d_head", "score_scale",
    "output_norm", *(f"{m}_{field}" for m in ("embedding", "head") for field in MATRIX.names),
    # The cache.
    "attend_one", "attend_some", "append",
    "cache", "slot_bytes", "block_bytes", "record_bytes", "partial_bytes", "rotations",
    # The rows of this call; row r's partial results are first_partials[r] .. first_partials[r + 1] - 1.
    "n_rows", "token_ids", "slots", "positions", "n_logits", "logits_rows", "logits", "logits_stride",
    "first_partials",
    # Their attention: a part is one partition for one row, or for several that share it.
    "n_parts", "part_rows", "part_partitions", "part_is_shared",
    # Workspace.
    "x", "x_stride", "qkv", "qkv_stride", "k_start", "v_start", "partials", "mixed", "mixed_stride",
    "x_panels", "mixed_panels", "ffn_panels",
)  # fmt: skip


class Job(Function):
    """A function (frame, layer, begin, end) that does items begin..end-1 of one of the forward's jobs."""

    def __init__(self, module: object, name: str) -> None:
        params = [("frame", PTR), ("layer", PTR), ("begin", I64), ("end", I64)]
        super().__init__(module, f"{module.name}.{name}", params)  # type: ignore[attr-defined]

    def frame(self, name: str, kind: object = I64) -> Value:
        """A field of the frame."""
        return FRAME.get(self["frame"], name, kind)

    def layer(self, name: str, kind: object = I64) -> Value:
        """A field of the layer."""
        return LAYER.get(self["layer"], name, kind)

    def of_row(self, name: str, row: Value) -> Value:
        """Entry `row` of the int64 array that field `name` of the frame points to."""
        return (self.frame(name, PTR) + row * 8).load(I64)

    def x_row(self, row: Value) -> Value:
        """Where `row` of the residual stream is."""
        return self.frame("x", PTR) + row * self.frame("x_stride")

    def panel(self, name: str, row: Value, blocks: Value) -> Value:
        """The panel that holds `row`, of the panels `name` with rows of `blocks` 32-blocks."""
        return self.frame(name, PTR) + row // PANEL_ROWS * blocks * RECORD_BYTES

    def cache_record(self, row: Value, block: Value) -> Value:
        """The record of key/value head 0 for 16-position block `block` of the slot of `row`, in this layer."""
        layer_index = (self["layer"].as_address() - self.frame("layers")) // LAYER.size
        in_block = layer_index * self.frame("n_kv_heads") * self.frame("record_bytes")
        start = self.of_row("slots", row) * self.frame("slot_bytes") + block * self.frame("block_bytes")
        return self.frame("cache", PTR) + start + in_block


@dataclass(frozen=True, slots=True)
class MatrixFields:
    """A `MATRIX` record's fields as loaded by a job."""

    data: Value
    product: Value
    tile_bytes: Value
    n_tiles: Value
    blocks: Value

    @classmethod
    def of_layer(cls, job: Job, name: str) -> "MatrixFields":
        """Matrix `name` of the job's layer."""
        return cls._load(LAYER, job["layer"], name)

    @classmethod
    def of_frame(cls, job: Job, name: str) -> "MatrixFields":
        """Matrix `name` of the frame."""
        return cls._load(FRAME, job["frame"], name)

    @classmethod
    def _load(cls, layout: Layout, record: Value, name: str) -> "MatrixFields":
        names = ("product", "tile_bytes", "n_tiles", "blocks")
        return cls(layout.get(record, f"{name}_data", PTR), *(layout.get(record, f"{name}_{n}") for n in names))
