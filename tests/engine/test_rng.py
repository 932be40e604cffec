import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.rng import philox4x64, request_rng

words = st.integers(0, 2**64 - 1)


@given(st.tuples(words, words, words, words), st.tuples(words, words))
def test_philox_gives_the_words_numpy_gives(counter, key):
    before = (sum(word << 64 * i for i, word in enumerate(counter)) - 1) % 2**256  # numpy counts up before it draws
    words_before = np.array([before >> 64 * i & 2**64 - 1 for i in range(4)], np.uint64)
    reference = np.random.Philox(counter=words_before, key=np.array(key, np.uint64))
    assert philox4x64(counter, key) == tuple(int(word) for word in reference.random_raw(4))


@given(st.integers(), st.integers(0, 200), st.integers(0, 2**40))
def test_a_draw_is_a_pure_function_below_one(seed, choice, position):
    draw = request_rng(seed, choice).uniform(position)
    assert 0 <= draw < 1
    assert draw * 2**53 == int(draw * 2**53)
    assert request_rng(seed % 2**64, choice).uniform(position) == draw


def test_negative_seeds_count_from_the_top():
    assert request_rng(-1).uniform(3) == request_rng(2**64 - 1).uniform(3)


def test_neighbouring_seeds_choices_and_positions_draw_different_numbers():
    draws = {request_rng(s, c).uniform(p) for s in range(10) for c in range(10) for p in range(10)}
    assert len(draws) == 1000


def test_draws_fill_the_unit_interval_evenly():
    rng = request_rng(seed=1)
    counts = np.histogram([rng.uniform(p) for p in range(10_000)], bins=20, range=(0, 1))[0]
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 43.8  # 19 degrees of freedom: one run in a thousand is above
