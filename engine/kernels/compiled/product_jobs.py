"""Jobs that are matrix products: items are tiles of 16 output columns, or pairs of them."""

from llvmlite import ir

from engine.kernels.compiled.formats import BLOCK, TILE
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import I64, LANES, PTR, VOID, F32x16, Function, Value
from engine.kernels.compiled.layouts import Job, MatrixFields
from engine.kernels.compiled.quantize import PANEL_ROWS, RECORD_BYTES, quantize_block
from engine.kernels.compiled.tile import ADD, STORE
from engine.kernels.compiled.vectors import exp

_FFN_ROWS = 32  # rows that gate and up take at a time: a tile stays in the first-level cache while they pass


def project_qkv(module: ir.Module) -> Function:
    """Tiles of q, then of k, then of v: products of the x panels into `qkv`."""
    f = Job(module, "project_qkv")
    stride, zero = f.frame("qkv_stride"), f.constant(I64, 0)
    first = zero
    for name, start in (("q", zero), ("k", f.frame("k_start")), ("v", f.frame("v_start"))):
        matrix = MatrixFields.of_layer(f, name)
        after = first + matrix.n_tiles
        panels, n_rows = f.frame("x_panels", PTR), f.frame("n_rows")
        with f.range(f["begin"].maximum(first), f["end"].minimum(after)) as index:
            tile = index - first
            out = f.frame("qkv", PTR) + start + tile * (4 * TILE)
            _multiply(f, matrix, tile, panels, n_rows, (out, stride, STORE))
        first = after
    return f.finish()


def project_residual(module: ir.Module, name: str, panels: str) -> Function:
    """Tiles of the layer's matrix `name`: x += its product with `panels`."""
    f = Job(module, f"project_{name}")
    matrix = MatrixFields.of_layer(f, name)
    with f.range(f["begin"], f["end"]) as tile:
        out = (f.frame("x", PTR) + tile * (4 * TILE), f.frame("x_stride"), ADD)
        _multiply(f, matrix, tile, f.frame(panels, PTR), f.frame("n_rows"), out)
    return f.finish()


def logits(module: ir.Module) -> Function:
    """Tiles of the output head: its products with the logits rows."""
    f = Job(module, "logits")
    matrix = MatrixFields.of_frame(f, "head")
    with f.range(f["begin"], f["end"]) as tile:
        out = (f.frame("logits", PTR) + tile * (4 * TILE), f.frame("logits_stride"), STORE)
        _multiply(f, matrix, tile, f.frame("x_panels", PTR), f.frame("n_logits"), out)
    return f.finish()


def gate_and_up(module: ir.Module, path: CPUPath) -> Function:
    """Items of 32 columns: silu(gate) * up (Shazeer, arXiv 2002.05202), quantized as one 32-block of the FFN panels."""
    f = Job(module, "gate_and_up")
    gate, up = MatrixFields.of_layer(f, "gate"), MatrixFields.of_layer(f, "up")
    n_rows = f.frame("n_rows")
    stride = 2 * 4 * BLOCK
    products = f.scratch(_FFN_ROWS * stride)  # per row 32 of gate, then 32 of up
    with f.range(f["begin"], f["end"]) as item, f.range(0, n_rows, step=_FFN_ROWS) as first:
        rows = (n_rows - first).minimum(f.constant(I64, _FFN_ROWS))
        panels = f.panel("x_panels", first, gate.blocks)
        for matrix, start in ((gate, 0), (up, 4 * BLOCK)):
            for half in range(BLOCK // TILE):
                out = (products + (start + 4 * TILE * half), f.constant(I64, stride), STORE)
                _multiply(f, matrix, item * (BLOCK // TILE) + half, panels, rows, out)
        with f.range(0, rows) as row:
            gated = products + row * stride
            halves = [_swiglu(f, path, gated + 4 * LANES * half) for half in range(BLOCK // LANES)]
            panel = f.panel("ffn_panels", first + row, f.layer("down_blocks"))
            quantize_block(f, halves, panel + item * RECORD_BYTES, row % PANEL_ROWS)
    return f.finish()


def _swiglu(f: Job, path: CPUPath, gated: Value) -> Value:
    gate, up = gated.load(F32x16), (gated + 4 * BLOCK).load(F32x16)
    return gate / (exp(f, path, -gate) + 1.0) * up


def _multiply(  # noqa: PLR0917 - operands, then the result
    f: Job, matrix: MatrixFields, tile: Value, panels: Value, n_rows: Value, out: tuple[Value, Value, int]
) -> None:
    """One tile against the rows of `panels`; row r of the result goes to address + r * stride of `out`, by its mode."""
    address, stride, mode = out
    weights = matrix.data + tile * matrix.tile_bytes
    with f.range(0, n_rows, step=PANEL_ROWS) as first:
        panel = panels + first // PANEL_ROWS * matrix.blocks * RECORD_BYTES
        rows = (n_rows - first).minimum(f.constant(I64, PANEL_ROWS))
        target = address + first * stride
        f.call_address(matrix.product, VOID, weights, matrix.blocks, panel, rows, target, stride, f.constant(I64, mode))
