"""Jobs whose items are rows: embedding, norms, rotary embedding and cache append."""

from llvmlite import ir

from engine.kernels.compiled.attention import BLOCK_POSITIONS
from engine.kernels.compiled.formats import BLOCK, TILE
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, F64, LANES, PTR, VOID, F32x16, Function, Value
from engine.kernels.compiled.layouts import Job
from engine.kernels.compiled.quantize import PANEL_ROWS, RECORD_BYTES, quantize_block
from engine.kernels.compiled.vectors import fold, square_root


def embed(module: ir.Module) -> Function:
    """Rows: x = the token's row of the embedding."""
    f = Job(module, "embed")
    with f.range(f["begin"], f["end"]) as row:
        token = f.of_row("token_ids", row)
        tile = f.frame("embedding_data", PTR) + token // TILE * f.frame("embedding_tile_bytes")
        blocks = f.frame("embedding_blocks")
        f.call_address(f.frame("embedding_row"), VOID, tile, blocks, token % TILE, f.x_row(row))
    return f.finish()


def normalize(module: ir.Module, path: CPUPath, gain: str) -> Function:
    """Rows: x normalized with the layer's `gain`, into the x panels."""
    f = Job(module, f"normalize_{gain}")
    with f.range(f["begin"], f["end"]) as row:
        _rms_norm(f, path, f.x_row(row), f.layer(gain, PTR), row)
    return f.finish()


def normalize_for_logits(module: ir.Module, path: CPUPath) -> Function:
    """Logits rows: the same with the output norm; panel rows count logits rows only."""
    f = Job(module, "normalize_for_logits")
    with f.range(f["begin"], f["end"]) as index:
        row = f.of_row("logits_rows", index)
        _rms_norm(f, path, f.x_row(row), f.frame("output_norm", PTR), index)
    return f.finish()


def _rms_norm(f: Job, path: CPUPath, x: Value, gain: Value, panel_row: Value) -> None:
    """x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich, arXiv 1910.07467), quantized."""  # noqa: D403 - a formula
    blocks = f.frame("embedding_blocks")
    squares = f.variable(f.constant(F32x16, 0.0))
    with f.range(0, blocks * (BLOCK // LANES)) as i:
        values = (x + i * (4 * LANES)).load(F32x16)
        squares.value = path.fma(f, values, values, squares.value)
    mean = fold(squares.value, Value.__add__) / f.frame("d_model").to(F32)
    inverse = f.constant(F32, 1.0) / square_root(f, mean + f.frame("norm_eps", F64).to(F32))
    panel = f.panel("x_panels", panel_row, blocks)
    with f.range(0, blocks) as block:
        halves = []
        for half in range(BLOCK // LANES):
            at = block * (4 * BLOCK) + 4 * LANES * half
            halves.append((x + at).load(F32x16) * inverse * (gain + at).load(F32x16))
        quantize_block(f, halves, panel + block * RECORD_BYTES, panel_row % PANEL_ROWS)


def rotate_and_append(module: ir.Module, path: CPUPath) -> Function:
    """Rows: rotary embedding of q and k in place, then k and v into the cache.

    `rotations` holds per position, for each element, the cosine, then the sine signed for its pair (minus for the
    first of two); elements that do not turn have 1 and 0.
    """
    f = Job(module, "rotate_and_append")
    width, n_kv_heads = f.frame("head_width") * 4, f.frame("n_kv_heads")
    with f.range(f["begin"], f["end"]) as row:
        queries = f.frame("qkv", PTR) + row * f.frame("qkv_stride")
        keys, values = queries + f.frame("k_start"), queries + f.frame("v_start")
        position = f.of_row("positions", row)
        cosines = f.frame("rotations", PTR) + position * width * 2
        for heads, count in ((queries, f.frame("n_heads")), (keys, n_kv_heads)):
            with f.range(0, count) as head:
                _rotate(f, path, heads + head * width, cosines)
        record = f.cache_record(row, position // BLOCK_POSITIONS)
        with f.range(0, n_kv_heads) as head:
            target = record + head * f.frame("record_bytes")
            lane = position % BLOCK_POSITIONS
            f.call_address(f.frame("append"), VOID, keys + head * width, values + head * width, target, lane)
    return f.finish()


def _rotate(f: Job, path: CPUPath, head: Value, cosines: Value) -> None:
    width = f.frame("head_width") * 4
    with f.range(0, width, step=4 * LANES) as first:
        values = (head + first).load(F32x16)
        partners = values.shuffle(i ^ 1 for i in range(LANES))
        cosine, sine = (cosines + first).load(F32x16), (cosines + width + first).load(F32x16)
        (head + first).store(path.fma(f, partners, sine, values * cosine))
