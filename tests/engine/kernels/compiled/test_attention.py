"""One partition's attention against numpy, and against itself in other company."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.compiled.attention import BLOCK_POSITIONS, PARTITION, HeadShape
from tests.engine.kernels.compiled.native import PATHS, attention_kernel, call

pytestmark = pytest.mark.slow

DTYPES = {2: np.float16, 4: np.float32}


class Partition:
    """256 positions of one key/value head, appended one by one; where nothing was appended stands NaN."""

    def __init__(self, path, shape, count, seed=0):
        rng = np.random.default_rng(seed)
        self.path, self.shape, self.count = path, shape, count
        dtype = DTYPES[shape.float_bytes]
        self.keys, self.values = rng.normal(0, 1, (2, count, shape.width)).astype(dtype).astype(np.float32)
        self.records = np.full(PARTITION // BLOCK_POSITIONS * shape.record_bytes, 0xFF, np.uint8)
        self.append(self.keys, self.values)

    def append(self, keys, values):
        """Write positions 0, 1, ..."""
        kernel = attention_kernel(self.path, self.shape, "append")
        for position, (key, value) in enumerate(zip(keys, values, strict=True)):
            record = self.records[position // BLOCK_POSITIONS * self.shape.record_bytes :]
            call(kernel, key, value, record, position % BLOCK_POSITIONS)

    def attend(self, queries, count):
        """`queries` [R, G, D] of rows that see count, count + 1, ... positions -> outputs, maxima, sums of weights."""
        n_rows, group, width = queries.shape
        name = "attend_one" if n_rows == 1 else "attend_some"
        partials = np.full((n_rows, group * (width + 2)), np.nan, np.float32)
        queries = np.ascontiguousarray(queries)
        call(
            attention_kernel(self.path, self.shape, name), queries, queries.strides[0], self.records, self.records,
            self.shape.record_bytes, count, 0.25, partials, partials.strides[0],
        )  # fmt: skip
        outputs = partials[:, : group * width].reshape(n_rows, group, width)
        return outputs, *partials[:, group * width :].reshape(n_rows, 2, group).transpose(1, 0, 2)

    def expected(self, queries, count):
        scores = 0.25 * queries.astype(np.float64) @ self.keys[:count].T.astype(np.float64)
        maxima = scores.max(axis=-1)
        weights = np.exp(scores - maxima[..., None])
        return weights @ self.values[:count], maxima, weights.sum(axis=-1)


def queries(shape, n_rows, seed=1):
    return np.random.default_rng(seed).normal(0, 1, (n_rows, shape.group, shape.width)).astype(np.float32)


SHAPES = [HeadShape(1, 16, 4), HeadShape(3, 64, 2), HeadShape(4, 80, 4), HeadShape(8, 32, 2), HeadShape(7, 128, 2)]


@pytest.mark.parametrize(
    ("path", "shape"), [(path, shape) for path in PATHS for shape in (SHAPES if path == PATHS[0] else SHAPES[:2])]
)
def test_a_partition_is_the_softmax_over_its_positions(path, shape):
    for count in (1, 2, 15, 16, 17, 31, 33, 100, 255, 256):
        partition = Partition(path, shape, count)
        asked = queries(shape, 1)
        for actual, expected in zip(partition.attend(asked, count), partition.expected(asked, count), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("group", "float_bytes"), [(1, 2), (2, 4), (3, 2)])
def test_neighbouring_rows_get_what_each_gets_alone(group, float_bytes, path):
    """Bit for bit, whichever blocks their last positions are in, and with not-a-numbers in all they may not see."""
    shape = HeadShape(group, 32, float_bytes)
    n_rows = shape.rows_at_once
    assert n_rows > 1
    for count in (1, 13, 15, 16, 17, 30, 47, 250):
        partition = Partition(path, shape, count + n_rows - 1)
        asked = queries(shape, n_rows)
        together = partition.attend(asked, count)
        for row in range(n_rows):
            alone = partition.attend(asked[row : row + 1], count + row)
            for shared, own in zip(together, alone, strict=True):
                np.testing.assert_array_equal(shared[row : row + 1], own)


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_see_the_whole_partition_share_it_alike(path):
    shape = HeadShape(3, 16, 2)
    partition = Partition(path, shape, PARTITION)
    asked = queries(shape, shape.rows_at_once)
    together = partition.attend(asked, PARTITION)
    for row in range(shape.rows_at_once):
        for shared, own in zip(together, partition.attend(asked[row : row + 1], PARTITION), strict=True):
            np.testing.assert_array_equal(shared[row : row + 1], own)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 255), later=st.integers(1, 64), seed=st.integers(0, 99))
def test_later_positions_change_nothing_for_a_row(count, later, seed):
    shape = HeadShape(2, 16, 4)
    exact = Partition(PATHS[0], shape, count, seed)
    longer = Partition(PATHS[0], shape, min(count + later, PARTITION), seed + 1)
    longer.append(exact.keys, exact.values)
    asked = queries(shape, 1, seed)
    for one, other in zip(exact.attend(asked, count), longer.attend(asked, count), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()
