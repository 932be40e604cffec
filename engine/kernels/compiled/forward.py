"""The whole forward of a tick as one compiled call: nine jobs a layer, each shared out over the pool.

Python fills a frame (`layouts.FRAME`) and a table of layers once; `forward(control, frame)` runs everything. An item of
a job writes nothing that another item of the same job reads.
"""

from llvmlite import ir

from engine.kernels.compiled.attention import BLOCK_POSITIONS
from engine.kernels.compiled.attention_jobs import attend, merge
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import PTR, Function
from engine.kernels.compiled.layouts import FRAME, LAYER
from engine.kernels.compiled.pool import Pool
from engine.kernels.compiled.product_jobs import gate_and_up, logits, project_qkv, project_residual
from engine.kernels.compiled.quantize import PANEL_ROWS
from engine.kernels.compiled.row_jobs import embed, normalize, normalize_for_logits, rotate_and_append

_TOGETHER = {"rows of panels": PANEL_ROWS, "logits rows": PANEL_ROWS, "rows of cache records": BLOCK_POSITIONS}
"""Items that one thread takes together: they may write to the same cache lines, which two would fight for."""


def build(module: ir.Module, path: CPUPath) -> None:
    """Fill `module` with `forward(control, frame)` and the pool's `worker(control)`."""
    pool = Pool(module, path)
    before = embed(module)
    in_layer = (
        (normalize(module, path, "attention_norm"), "rows of panels"),
        (project_qkv(module), "qkv tiles"),
        (rotate_and_append(module, path), "rows of cache records"),
        (attend(module), "attention items"),
        (merge(module, path), "rows of panels"),
        (project_residual(module, "o", "mixed_panels"), "o tiles"),
        (normalize(module, path, "ffn_norm"), "rows of panels"),
        (gate_and_up(module, path), "gate pairs"),
        (project_residual(module, "down", "ffn_panels"), "down tiles"),
    )
    after = ((normalize_for_logits(module, path), "logits rows"), (logits(module), "head tiles"))

    f = Function(module, f"{module.name}.forward", [("control", PTR), ("frame", PTR)], exported=True)
    frame = f["frame"]
    layers, n_rows, n_logits = (
        FRAME.get(frame, "layers", PTR),
        FRAME.get(frame, "n_rows"),
        FRAME.get(frame, "n_logits"),
    )
    counts = {
        "rows of panels": n_rows,
        "rows of cache records": n_rows,
        "attention items": FRAME.get(frame, "n_parts") * FRAME.get(frame, "n_kv_heads"),
        "logits rows": n_logits,
        "head tiles": FRAME.get(frame, "head_n_tiles"),
    }
    pool.run(f, before, layers, n_rows, 1)
    with f.range(0, FRAME.get(frame, "n_layers")) as index:
        layer = layers + index * LAYER.size
        tiles = {name: LAYER.get(layer, f"{name}_n_tiles") for name in ("q", "k", "v", "o", "gate", "down")}
        in_layer_counts = counts | {
            "qkv tiles": tiles["q"] + tiles["k"] + tiles["v"],
            "o tiles": tiles["o"],
            "gate pairs": tiles["gate"] // 2,
            "down tiles": tiles["down"],
        }
        for job, items in in_layer:
            pool.run(f, job, layer, in_layer_counts[items], _TOGETHER.get(items, 1))
    with f.when(n_logits > 0):
        for job, items in after:
            pool.run(f, job, layers, counts[items], _TOGETHER.get(items, 1))
    f.finish()
