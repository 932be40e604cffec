"""The whole forward of a tick as one compiled call: ten jobs a layer, each shared out over the pool.

Python fills a `FRAME` (sizes, addresses of workspace, rows) and a table of `LAYER` records once; `forward(control,
frame)` runs everything. A job is a function (frame, layer, begin, end) over rows, tiles or attention partitions, and
writes nothing that another item of the same job reads.
"""

from llvmlite import ir

from engine.kernels.compiled.attention import BLOCK_POSITIONS, PARTITION
from engine.kernels.compiled.formats import BLOCK, TILE
from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import F32, F64, I64, LANES, PTR, VOID, F32x16, Function, Layout, Value
from engine.kernels.compiled.pool import Pool
from engine.kernels.compiled.quantize import PANEL_ROWS, RECORD_BYTES, quantize_block, quantize_row
from engine.kernels.compiled.tile import ADD, STORE
from engine.kernels.compiled.vectors import exp, fold, square_root

MATRIX_FIELDS = ("data", "product", "row", "tile_bytes", "n_tiles", "blocks")
MATRIX = Layout(*MATRIX_FIELDS)
LAYER_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
LAYER = Layout(
    "attention_norm", "ffn_norm", *(f"{matrix}_{field}" for matrix in LAYER_MATRICES for field in MATRIX_FIELDS)
)
FRAME = Layout(
    # The model.
    "n_layers", "layers", "d_model", "norm_eps", "n_heads", "n_kv_heads", "head_width", "d_head", "score_scale",
    "output_norm", *(f"{matrix}_{field}" for matrix in ("embedding", "head") for field in MATRIX_FIELDS),
    # The cache.
    "attend", "append", "cache", "slot_bytes", "block_bytes", "record_bytes", "partial_bytes", "rotations",
    # The rows of this call.
    "n_rows", "token_ids", "slots", "positions", "n_logits", "logits_rows", "logits", "logits_stride",
    "n_parts", "part_rows", "first_parts",
    # Workspace: row-major float32 and panels.
    "x", "x_stride", "qkv", "qkv_stride", "k_start", "v_start", "partials", "mixed", "mixed_stride",
    "x_panels", "mixed_panels", "ffn_panels",
)  # fmt: skip


def build(module: ir.Module, path: CPUPath) -> None:
    """Fill `module` with `forward(control, frame)` and the pool's `worker(control)`."""
    pool = Pool(module, path)
    jobs = _Jobs(module, path)
    f = Function(module, f"{module.name}.forward", [("control", PTR), ("frame", PTR)], exported=True)
    frame, control = f["frame"], f["control"]
    n_rows, n_logits = FRAME.get(frame, "n_rows"), FRAME.get(frame, "n_logits")
    head_tiles = FRAME.get(frame, "head_n_tiles")
    layers = FRAME.get(frame, "layers", PTR)
    pool.run(f, control, jobs.embed, frame, layers, n_rows)
    with f.range(0, FRAME.get(frame, "n_layers")) as index:
        layer = layers + index * LAYER.size
        qkv_tiles = LAYER.get(layer, "q_n_tiles") + LAYER.get(layer, "k_n_tiles") + LAYER.get(layer, "v_n_tiles")
        attention_items = FRAME.get(frame, "n_parts") * FRAME.get(frame, "n_kv_heads")
        for job, count in (
            (jobs.normalize_for_attention, n_rows),
            (jobs.project_qkv, qkv_tiles),
            (jobs.rotate_and_append, n_rows),
            (jobs.attend, attention_items),
            (jobs.merge, n_rows),
            (jobs.project_output, LAYER.get(layer, "o_n_tiles")),
            (jobs.normalize_for_ffn, n_rows),
            (jobs.gate_and_up, LAYER.get(layer, "gate_n_tiles") // 2),
            (jobs.project_down, LAYER.get(layer, "down_n_tiles")),
        ):
            pool.run(f, control, job, frame, layer, count)
    with f.when(n_logits > 0):
        pool.run(f, control, jobs.normalize_for_logits, frame, layers, n_logits)
        pool.run(f, control, jobs.logits, frame, layers, head_tiles)
    f.finish()


class _Jobs:
    """Each job's function, built into one module."""

    def __init__(self, module: ir.Module, path: CPUPath) -> None:
        self._module = module
        self._path = path
        self.embed = self._embed()
        self.normalize_for_attention = self._normalize("normalize_for_attention", "attention_norm")
        self.project_qkv = self._project_qkv()
        self.rotate_and_append = self._rotate_and_append()
        self.attend = self._attend()
        self.merge = self._merge()
        self.project_output = self._project_residual("project_output", "o", "mixed_panels")
        self.normalize_for_ffn = self._normalize("normalize_for_ffn", "ffn_norm")
        self.gate_and_up = self._gate_and_up()
        self.project_down = self._project_residual("project_down", "down", "ffn_panels")
        self.normalize_for_logits = self._normalize_for_logits()
        self.logits = self._logits()

    def _job(self, name: str) -> Function:
        params = [("frame", PTR), ("layer", PTR), ("begin", I64), ("end", I64)]
        return Function(self._module, f"{self._module.name}.{name}", params)

    def _embed(self) -> Function:
        """Rows: x = the token's row of the embedding."""
        f = self._job("embed")
        frame = f["frame"]
        with f.range(f["begin"], f["end"]) as row:
            token = (FRAME.get(frame, "token_ids", PTR) + row * 8).load(I64)
            tile = FRAME.get(frame, "embedding_data", PTR) + token // TILE * FRAME.get(frame, "embedding_tile_bytes")
            f.call_address(
                FRAME.get(frame, "embedding_row"),
                VOID,
                tile,
                FRAME.get(frame, "embedding_blocks"),
                token % TILE,
                _x_row(frame, row),
            )
        return f.finish()

    def _normalize(self, name: str, gain: str) -> Function:
        """Rows: RMSNorm of x, quantized into the panels."""
        f = self._job(name)
        frame = f["frame"]
        with f.range(f["begin"], f["end"]) as row:
            self._rms_norm(f, _x_row(frame, row), LAYER.get(f["layer"], gain, PTR), row)
        return f.finish()

    def _normalize_for_logits(self) -> Function:
        """Logits rows: the same with the output norm, packed together."""
        f = self._job("normalize_for_logits")
        frame = f["frame"]
        with f.range(f["begin"], f["end"]) as index:
            row = (FRAME.get(frame, "logits_rows", PTR) + index * 8).load(I64)
            self._rms_norm(f, _x_row(frame, row), FRAME.get(frame, "output_norm", PTR), index)
        return f.finish()

    def _rms_norm(self, f: Function, x: Value, gain: Value, panel_row: Value) -> None:
        """x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich, 2019) as row `panel_row` of the x panels."""
        frame = f["frame"]
        blocks = FRAME.get(frame, "embedding_blocks")
        squares = f.variable(f.constant(F32x16, 0.0))
        with f.range(0, blocks * (BLOCK // LANES)) as i:
            values = (x + i * (4 * LANES)).load(F32x16)
            squares.value = self._path.fma(f, values, values, squares.value)
        mean = fold(squares.value, Value.__add__) / FRAME.get(frame, "d_model").to(F32)
        eps = FRAME.get(frame, "norm_eps", F64).to(F32)
        inverse = f.constant(F32, 1.0) / square_root(f, mean + eps)
        panel = _panel(FRAME.get(frame, "x_panels", PTR), panel_row, blocks)
        with f.range(0, blocks) as block:
            halves = []
            for half in range(2):
                at = block * (4 * BLOCK) + 4 * LANES * half
                halves.append((x + at).load(F32x16) * inverse * (gain + at).load(F32x16))
            quantize_block(f, halves[0], halves[1], panel + block * RECORD_BYTES, panel_row % PANEL_ROWS)

    def _multiply(
        self,
        f: Function,
        matrix: dict[str, Value],
        tile: Value,
        panels: Value,
        n_rows: Value,
        out: Value,
        out_stride: Value,
        mode: int,
    ) -> None:
        """One tile against every row of `panels`; row r of the result goes to `out + r * out_stride`."""
        weights = matrix["data"].as_pointer() + tile * matrix["tile_bytes"]
        with f.range(0, n_rows, step=PANEL_ROWS) as first:
            f.call_address(
                matrix["product"],
                VOID,
                weights,
                matrix["blocks"],
                _panel(panels, first, matrix["blocks"]),
                (n_rows - first).minimum(f.constant(I64, PANEL_ROWS)),
                out + first * out_stride,
                out_stride,
                f.constant(I64, mode),
            )

    def _project_qkv(self) -> Function:
        """Tiles of q, then of k, then of v."""
        f = self._job("project_qkv")
        frame, layer = f["frame"], f["layer"]
        n_rows, panels = FRAME.get(frame, "n_rows"), FRAME.get(frame, "x_panels", PTR)
        out, stride = FRAME.get(frame, "qkv", PTR), FRAME.get(frame, "qkv_stride")
        first = f.constant(I64, 0)
        starts = (f.constant(I64, 0), FRAME.get(frame, "k_start"), FRAME.get(frame, "v_start"))
        for name, start in zip("qkv", starts, strict=True):
            matrix = _matrix(LAYER, layer, name)
            after = first + matrix["n_tiles"]
            with f.range(f["begin"].maximum(first), f["end"].minimum(after)) as index:
                tile = index - first
                self._multiply(f, matrix, tile, panels, n_rows, out + start + tile * (4 * TILE), stride, STORE)
            first = after
        return f.finish()

    def _project_residual(self, name: str, matrix_name: str, panels: str) -> Function:
        """Tiles: x += matrix times `panels`."""
        f = self._job(name)
        frame = f["frame"]
        matrix = _matrix(LAYER, f["layer"], matrix_name)
        with f.range(f["begin"], f["end"]) as tile:
            self._multiply(
                f, matrix, tile, FRAME.get(frame, panels, PTR), FRAME.get(frame, "n_rows"),
                FRAME.get(frame, "x", PTR) + tile * (4 * TILE), FRAME.get(frame, "x_stride"), ADD,
            )  # fmt: skip
        return f.finish()

    def _rotate_and_append(self) -> Function:
        """Rows: rotary embedding of q and k in place, then k and v into the cache.

        `rotations` holds per position, for each element, the cosine, then the sine signed for its pair (minus for the
        first of two); elements that do not turn have 1 and 0.
        """
        f = self._job("rotate_and_append")
        frame = f["frame"]
        width, n_kv_heads = FRAME.get(frame, "head_width"), FRAME.get(frame, "n_kv_heads")
        with f.range(f["begin"], f["end"]) as row:
            q = FRAME.get(frame, "qkv", PTR) + row * FRAME.get(frame, "qkv_stride")
            keys, values = q + FRAME.get(frame, "k_start"), q + FRAME.get(frame, "v_start")
            position = (FRAME.get(frame, "positions", PTR) + row * 8).load(I64)
            cosines = FRAME.get(frame, "rotations", PTR) + position * width * 8
            self._rotate(f, q, FRAME.get(frame, "n_heads"), width, cosines)
            self._rotate(f, keys, n_kv_heads, width, cosines)
            record = _first_record(f, row, position // BLOCK_POSITIONS)
            with f.range(0, n_kv_heads) as head:
                f.call_address(
                    FRAME.get(frame, "append"),
                    VOID,
                    keys + head * width * 4,
                    values + head * width * 4,
                    record + head * FRAME.get(frame, "record_bytes"),
                    position % BLOCK_POSITIONS,
                )
        return f.finish()

    def _rotate(self, f: Function, heads: Value, n_heads: Value, width: Value, cosines: Value) -> None:
        sines = cosines + width * 4
        with f.range(0, n_heads) as head, f.range(0, width, step=LANES) as first:
            at = heads + (head * width + first) * 4
            values = at.load(F32x16)
            partners = values.shuffle([i ^ 1 for i in range(LANES)])
            cosine, sine = ((table + first * 4).load(F32x16) for table in (cosines, sines))
            at.store(self._path.fma(f, partners, sine, values * cosine))

    def _attend(self) -> Function:
        """Items (partition of a row, key/value head): the partition's unmerged result."""
        f = self._job("attend")
        frame, layer = f["frame"], f["layer"]
        n_kv_heads, width = FRAME.get(frame, "n_kv_heads"), FRAME.get(frame, "head_width")
        group = FRAME.get(frame, "n_heads") // n_kv_heads
        with f.range(f["begin"], f["end"]) as item:
            part, head = item // n_kv_heads, item % n_kv_heads
            row = (FRAME.get(frame, "part_rows", PTR) + part * 8).load(I64)
            first = (part - (FRAME.get(frame, "first_parts", PTR) + row * 8).load(I64)) * PARTITION
            position = (FRAME.get(frame, "positions", PTR) + row * 8).load(I64)
            record = _first_record(f, row, first // BLOCK_POSITIONS)
            queries = FRAME.get(frame, "qkv", PTR) + row * FRAME.get(frame, "qkv_stride") + head * group * width * 4
            f.call_address(
                FRAME.get(frame, "attend"),
                VOID,
                queries,
                record + head * FRAME.get(frame, "record_bytes"),
                FRAME.get(frame, "block_bytes"),
                (position + 1 - first).minimum(f.constant(I64, PARTITION)),
                FRAME.get(frame, "score_scale", F64).to(F32),
                FRAME.get(frame, "partials", PTR) + item * FRAME.get(frame, "partial_bytes"),
            )
        return f.finish()

    def _merge(self) -> Function:
        """Rows: partitions merged in ascending order, divided by the sum of weights, quantized into the panels."""
        f = self._job("merge")
        frame = f["frame"]
        n_kv_heads, width = FRAME.get(frame, "n_kv_heads"), FRAME.get(frame, "head_width")
        d_head = FRAME.get(frame, "d_head")
        group = FRAME.get(frame, "n_heads") // n_kv_heads
        partial_bytes = FRAME.get(frame, "partial_bytes")
        with f.range(f["begin"], f["end"]) as row:
            out = FRAME.get(frame, "mixed", PTR) + row * FRAME.get(frame, "mixed_stride")
            first_part = FRAME.get(frame, "first_parts", PTR) + row * 8
            begin, end = first_part.load(I64), (first_part + 8).load(I64)
            with f.range(0, n_kv_heads) as kv_head, f.range(0, group) as member:
                first = FRAME.get(frame, "partials", PTR) + (begin * n_kv_heads + kv_head) * partial_bytes
                step = n_kv_heads * partial_bytes
                target = out + (kv_head * group + member) * d_head * 4
                self._merge_head(f, first, step, end - begin, target, group, member, width)
            # Narrow heads were stored 16 lanes at a time: the last one's zeros fill the row up to its 32-block.
            blocks = LAYER.get(f["layer"], "o_blocks")
            panel = _panel(FRAME.get(frame, "mixed_panels", PTR), row, blocks)
            quantize_row(f, out, panel, row % PANEL_ROWS, blocks)
        return f.finish()

    def _merge_head(
        self,
        f: Function,
        first: Value,
        step: Value,
        count: Value,
        out: Value,
        group: Value,
        member: Value,
        width: Value,
    ) -> None:
        maxima = group * width * 4 + member * 4
        sums = maxima + group * 4
        maximum = f.variable((first + maxima).load(F32))
        with f.range(1, count) as i:
            maximum.value = maximum.value.maximum((first + i * step + maxima).load(F32))
        total = f.variable(f.constant(F32x16, 0.0))
        with f.range(0, count) as i:
            partial = first + i * step
            share = exp(f, self._path, ((partial + maxima).load(F32) - maximum.value).splat())
            total.value = self._path.fma(f, share, (partial + sums).load(F32).splat(), total.value)
        inverse = f.constant(F32x16, 1.0) / total.value
        with f.range(0, width, step=LANES) as column:
            mixed = f.variable(f.constant(F32x16, 0.0))
            with f.range(0, count) as i:
                partial = first + i * step
                share = exp(f, self._path, ((partial + maxima).load(F32) - maximum.value).splat())
                values = (partial + (member * width + column) * 4).load(F32x16)
                mixed.value = self._path.fma(f, share, values, mixed.value)
            (out + column * 4).store(mixed.value * inverse)

    def _gate_and_up(self) -> Function:
        """Items of 32 columns: silu(gate) * up (Shazeer, 2020), quantized into the panels as one 32-block."""
        f = self._job("gate_and_up")
        frame, layer = f["frame"], f["layer"]
        gate, up = _matrix(LAYER, layer, "gate"), _matrix(LAYER, layer, "up")
        n_rows = FRAME.get(frame, "n_rows")
        blocks = FRAME.get(frame, "embedding_blocks")
        stride = 2 * 4 * BLOCK
        products = f.scratch(PANEL_ROWS * stride)  # per row 32 of gate, then 32 of up
        with f.range(f["begin"], f["end"]) as item, f.range(0, n_rows, step=PANEL_ROWS) as first:
            panel = _panel(FRAME.get(frame, "x_panels", PTR), first, blocks)
            rows = (n_rows - first).minimum(f.constant(I64, PANEL_ROWS))
            for matrix, start in ((gate, 0), (up, 4 * BLOCK)):
                for half in range(BLOCK // TILE):
                    self._multiply(
                        f, matrix, item * (BLOCK // TILE) + half, panel, rows,
                        products + (start + 4 * TILE * half), f.constant(I64, stride), STORE,
                    )  # fmt: skip
            record = _panel(FRAME.get(frame, "ffn_panels", PTR), first, LAYER.get(layer, "down_blocks"))
            with f.range(0, rows) as row:
                at = products + row * stride
                halves = []
                for half in range(BLOCK // LANES):
                    gated = (at + 4 * LANES * half).load(F32x16)
                    raised = (at + (4 * BLOCK + 4 * LANES * half)).load(F32x16)
                    halves.append(gated / (exp(f, self._path, -gated) + 1.0) * raised)
                quantize_block(f, halves[0], halves[1], record + item * RECORD_BYTES, row)
        return f.finish()

    def _logits(self) -> Function:
        """Tiles: the output head over the logits rows."""
        f = self._job("logits")
        frame = f["frame"]
        matrix = _matrix(FRAME, frame, "head")
        with f.range(f["begin"], f["end"]) as tile:
            self._multiply(
                f, matrix, tile, FRAME.get(frame, "x_panels", PTR), FRAME.get(frame, "n_logits"),
                FRAME.get(frame, "logits", PTR) + tile * (4 * TILE), FRAME.get(frame, "logits_stride"), STORE,
            )  # fmt: skip
        return f.finish()


def _matrix(layout: Layout, record: Value, name: str) -> dict[str, Value]:
    return {field: layout.get(record, f"{name}_{field}") for field in MATRIX_FIELDS}


def _x_row(frame: Value, row: Value) -> Value:
    return FRAME.get(frame, "x", PTR) + row * FRAME.get(frame, "x_stride")


def _panel(panels: Value, row: Value, blocks: Value) -> Value:
    """The panel that holds `row`, of rows `blocks` long."""
    return panels + row // PANEL_ROWS * blocks * RECORD_BYTES


def _first_record(f: Function, row: Value, block: Value) -> Value:
    """The cache record of key/value head 0 for 16-position block `block` of `row`'s slot, in the job's layer."""
    frame = f["frame"]
    slot = (FRAME.get(frame, "slots", PTR) + row * 8).load(I64)
    layer_index = (f["layer"].as_address() - FRAME.get(frame, "layers")) // LAYER.size
    in_block = layer_index * FRAME.get(frame, "n_kv_heads") * FRAME.get(frame, "record_bytes")
    start = slot * FRAME.get(frame, "slot_bytes") + block * FRAME.get(frame, "block_bytes")
    return FRAME.get(frame, "cache", PTR) + start + in_block
