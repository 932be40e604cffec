import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Sampled
from engine.errors import LogitsError, ParamError
from engine.params import SamplingParams
from engine.sampler import distribution, request_rng, sample, sampled_entropy, token_logprobs

EIGHTHS = np.log(np.array([4, 2, 1, 1], np.float32) / 8)
"""Four tokens with the probabilities 1/2, 1/4, 1/8, 1/8."""


class FixedDraw:
    """In place of a RequestRng: always the same number, and a record of where it was asked for."""

    def __init__(self, draw):
        self.draw = draw
        self.positions = []

    def uniform(self, position):
        self.positions.append(position)
        return self.draw


def shares(logits=EIGHTHS, history=(), prompt=(), eos_ids=frozenset(), **params):
    """{token: probability} of the distribution drawn from."""
    ids, probabilities = distribution(
        np.asarray(logits, np.float32), SamplingParams(**params), history, prompt, eos_ids=eos_ids
    )
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def approx(expected):
    return pytest.approx(expected, rel=1e-6)


def test_without_filters_the_distribution_is_the_softmax():
    assert shares() == approx({0: 1 / 2, 1: 1 / 4, 2: 1 / 8, 3: 1 / 8})


def test_temperature_one_half_squares_the_probabilities():
    assert shares(temperature=0.5) == approx({0: 16 / 22, 1: 4 / 22, 2: 1 / 22, 3: 1 / 22})


def test_a_huge_temperature_levels_the_distribution():
    assert shares(temperature=1e300) == approx(dict.fromkeys(range(4), 1 / 4))


def test_a_tiny_temperature_leaves_the_largest():
    assert shares(temperature=1e-320) == {0: 1.0}


def test_top_k_keeps_the_k_likeliest():
    assert shares(top_k=2) == approx({0: 2 / 3, 1: 1 / 3})


def test_top_k_breaks_ties_by_id():
    assert set(shares(top_k=3)) == {0, 1, 2}
    assert set(shares(np.zeros(5), top_k=2)) == {0, 1}


@pytest.mark.parametrize("off", [0, -1, 4, 1000])
def test_top_k_can_be_off(off):
    assert shares(top_k=off) == shares()


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {0}), (0.6, {0, 1}), (0.8, {0, 1, 2}), (0.9, {0, 1, 2, 3})])
def test_top_p_keeps_as_few_as_hold_the_mass(top_p, kept):
    assert set(shares(top_p=top_p)) == kept


def test_top_p_renormalizes():
    assert shares(top_p=0.7) == approx({0: 2 / 3, 1: 1 / 3})


def test_min_p_is_a_share_of_the_likeliest():
    assert shares(min_p=0.4) == approx({0: 2 / 3, 1: 1 / 3})
    assert shares(min_p=1.0) == {0: 1.0}


@pytest.mark.parametrize(("typical_p", "kept"), [(0.2, {1}), (0.3, {0, 1}), (0.8, {0, 1, 2})])
def test_typical_p_keeps_the_least_surprising_first(typical_p, kept):
    # Entropy 1.75 bits; surprises 1, 2, 3, 3 bits: token 1 is nearest (0.25), then 0 (0.75), then 2 and 3 (1.25).
    assert set(shares(typical_p=typical_p)) == kept


def test_filters_see_what_the_one_before_left():
    assert set(shares(top_p=0.6)) == {0, 1}
    assert set(shares(top_k=2, top_p=0.6)) == {0}  # 1/2 of 3/4 is 2/3
    assert set(shares(typical_p=0.2, min_p=0.9)) == {1}  # the likeliest left is token 1


def test_repetition_penalty_counts_prompt_and_output_and_moves_both_signs_down():
    logits = [2.0, -1.0, 1.0, 1.0]
    expected = np.exp([1.0, -2.0, 1.0, 1.0])
    got = shares(logits, repetition_penalty=2.0, prompt=(0, 0), history=(1,))
    assert list(got.values()) == approx(list(expected / expected.sum()))


@pytest.mark.parametrize(
    ("last_n", "seen"), [(-1, {0, 1, 2}), (0, set()), (1, {2}), (2, {1, 2}), (3, {0, 1, 2}), (9, {0, 1, 2})]
)
def test_repetition_penalty_looks_back_as_far_as_repeat_last_n(last_n, seen):
    logits = [1.0, 1.0, 1.0, 1.0]
    expected = np.exp([0.5 if token_id in seen else 1.0 for token_id in range(4)])
    got = shares(logits, repetition_penalty=2.0, repeat_last_n=last_n, prompt=(0, 1), history=(2,))
    assert list(got.values()) == approx(list(expected / expected.sum()))


@pytest.mark.parametrize("penalty", [5e-324, 1e-308, 1e-40, 1e40, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 1.7e308])
def test_the_most_extreme_penalties_still_tell_what_was_seen_from_what_was_not(penalty, temperature):
    # A positive logit divided by next to nothing is the largest; a negative one multiplied by far too much is the last.
    logits = np.array([1.0, 3.0, 2.0, -1.0, -2.0, -np.float32(3.4e38)], np.float32)
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
    chosen = {sample(logits, params, (2, 3, 5), request_rng(seed)).token_id for seed in range(40)}
    if temperature <= 1:
        assert chosen == {2} if penalty < 1 else chosen.isdisjoint({3, 5})
    every = SamplingParams(repetition_penalty=penalty, temperature=temperature, allowed_token_ids=(3, 4))
    assert sample(logits, every, (3, 4), request_rng(0)).token_id in {3, 4}


def test_frequency_and_presence_penalties_count_the_output_only():
    logits = [1.0, 1.0, 1.0]
    expected = np.exp([1.0, 1.0, 1.0 - 2 * 0.5 - 0.25])
    got = shares(logits, frequency_penalty=0.5, presence_penalty=0.25, prompt=(0, 1), history=(2, 2))
    assert list(got.values()) == approx(list(expected / expected.sum()))


def test_logit_bias_is_added():
    assert shares(logit_bias={2: math.log(2)}) == approx({0: 4 / 9, 1: 2 / 9, 2: 2 / 9, 3: 1 / 9})


def test_allowed_token_ids_forbid_the_others():
    assert shares(allowed_token_ids=(3, 1)) == approx({1: 2 / 3, 3: 1 / 3})


def test_a_bad_word_of_one_token_never_comes():
    assert shares(bad_words=((0,),)) == approx({1: 1 / 2, 2: 1 / 4, 3: 1 / 4})


def test_a_longer_bad_word_is_stopped_at_its_last_token():
    assert set(shares(bad_words=((2, 3, 0),), history=(1, 2, 3))) == {1, 2, 3}
    assert set(shares(bad_words=((2, 3, 0),), history=(2, 3, 1))) == {0, 1, 2, 3}
    assert set(shares(bad_words=((2, 3, 0),), history=(3,), prompt=(2,))) == {0, 1, 2, 3}


def test_min_tokens_forbids_eos_and_stop_tokens_until_then():
    early = {"min_tokens": 2, "stop_token_ids": (1,), "eos_ids": frozenset({0})}
    assert set(shares(**early, history=(3,))) == {2, 3}
    assert set(shares(**early, history=(3, 3))) == {0, 1, 2, 3}
    assert set(shares(**early, history=(3,), ignore_eos=True)) == {0, 2, 3}


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0}])
def test_greedy_takes_the_lowest_of_the_largest(params):
    logits = np.array([0, 3, 1, 3], np.float32)
    assert sample(logits, SamplingParams(**params), (), FixedDraw(0.99)) == Sampled(1)


def test_greedy_sees_the_changed_logits():
    params = SamplingParams(temperature=0, logit_bias={3: 10})
    assert sample(EIGHTHS, params, (), FixedDraw(0.0)) == Sampled(3)


@pytest.mark.parametrize(("draw", "token_id"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.88, 3)])
def test_the_draw_runs_through_the_tokens_by_id(draw, token_id):
    assert sample(EIGHTHS, SamplingParams(), (), FixedDraw(draw)) == Sampled(token_id)


def test_the_draw_is_the_one_of_the_position():
    rng = FixedDraw(0.5)
    sample(EIGHTHS, SamplingParams(), [1, 2], rng, prompt=(3, 1, 2))
    assert rng.positions == [5]


def test_logits_are_left_as_they_were():
    logits = EIGHTHS.copy()
    params = SamplingParams(logit_bias={0: 5}, repetition_penalty=1.5, top_k=2, bad_words=((1,),), logprobs=2)
    sample(logits, params, [0], request_rng(1), (2,))
    assert np.array_equal(logits, EIGHTHS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    logits = np.array([0, bad, 1], np.float32)
    with pytest.raises(LogitsError, match="not finite"):
        sample(logits, SamplingParams(temperature=temperature), (), request_rng(0))
    with pytest.raises(LogitsError, match="not finite"):
        token_logprobs(logits, 0, 1)


def test_forbidding_every_token_is_refused():
    with pytest.raises(ParamError, match="every token"):
        shares(allowed_token_ids=(0,), bad_words=((0,),))


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {4: 1}), ("allowed_token_ids", (0, -1)), ("bad_words", ((9,),))],
)
def test_a_token_outside_the_vocabulary_is_refused_by_name(name, value):
    with pytest.raises(ParamError, match=name) as caught:
        shares(**{name: value})
    assert caught.value.param == name


def test_logprobs_are_of_the_raw_distribution():
    params = SamplingParams(temperature=0.1, logit_bias={3: 100}, logprobs=2)
    logprobs = sample(EIGHTHS, params, (), request_rng(0)).logprobs
    assert logprobs.token_id == 3
    assert logprobs.logprob == approx(math.log(1 / 8))
    assert logprobs.rank == 4
    assert [t.token_id for t in logprobs.top] == [0, 1]
    assert [t.logprob for t in logprobs.top] == approx([math.log(1 / 2), math.log(1 / 4)])


def test_logprobs_without_alternatives_have_only_the_token():
    assert token_logprobs(EIGHTHS, 2, 0).top == ()
    assert token_logprobs(EIGHTHS, 2, 0).rank == 3


def test_logprobs_stay_finite_for_far_apart_logits():
    logprobs = token_logprobs(np.array([-3e38, 3e38], np.float32), 0, 2)
    assert logprobs.logprob == approx(-6e38)
    assert logprobs.top[0].logprob == 0


def test_entropy_by_hand():
    assert sampled_entropy(EIGHTHS, SamplingParams()) == approx(1.75 * math.log(2))
    assert sampled_entropy(EIGHTHS, SamplingParams(top_k=1)) == 0
    assert sampled_entropy(EIGHTHS, SamplingParams(temperature=0)) == 0
    assert sampled_entropy(np.zeros(8, np.float32), SamplingParams()) == approx(math.log(8))


@pytest.mark.slow
def test_frequencies_follow_the_distribution():
    rng, params = request_rng(seed=7), SamplingParams(temperature=1.3, top_k=50)
    logits = np.random.default_rng(0).normal(0, 2, 300).astype(np.float32)
    ids, probabilities = distribution(logits, params)
    drawn = [sample(logits, params, (), rng, prompt=range(position)).token_id for position in range(5_000)]
    counts = np.array([drawn.count(token_id) for token_id in ids])
    assert counts.sum() == len(drawn)
    expected = probabilities * len(drawn)
    assert ((counts - expected) ** 2 / expected).sum() < 85.4  # 49 degrees of freedom: one run in a thousand is above


def test_choices_of_one_seed_draw_differently():
    answers = {
        tuple(
            sample(np.zeros(1000, np.float32), SamplingParams(), (), request_rng(3, choice), range(p)).token_id
            for p in range(8)
        )
        for choice in range(20)
    }
    assert len(answers) == 20


# ---- against the definition, written without any shortcut


def by_definition(logits, params):
    """[(id, weight)] ascending by id: every stage a sort over the whole list."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if params.top_k > 0:
        order = order[: params.top_k]
    best = float(logits[order[0]])
    weight = {i: math.exp((float(logits[i]) - best) / params.temperature) for i in order}
    if params.typical_p < 1:
        total = math.fsum(weight.values())
        surprise = {i: -math.log(w / total) for i, w in weight.items()}
        entropy = math.fsum(weight[i] / total * surprise[i] for i in weight)
        nearest = sorted(weight, key=lambda i: (abs(surprise[i] - entropy), i))
        order = _head(nearest, weight, params.typical_p)
    if params.top_p < 1:
        order = _head(sorted(order, key=lambda i: (-float(logits[i]), i)), weight, params.top_p)
    largest = max(weight[i] for i in order)
    return [(i, weight[i]) for i in sorted(order) if weight[i] >= params.min_p * largest]


def _head(order, weight, mass):
    total, reached, head = math.fsum(weight[i] for i in order), 0.0, []
    for i in order:
        head.append(i)
        reached += weight[i]
        if reached >= mass * total:
            break
    return head


share = st.floats(0.01, 1, allow_subnormal=False)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 2, 7, 63, 300, 2500]),
    with_ties=st.booleans(),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.2, 3),
        top_k=st.sampled_from([0, 1, 2, 20, 500]),
        top_p=st.just(1.0) | share,
        typical_p=st.just(1.0) | share,
        min_p=st.just(0.0) | st.floats(0, 1),
    ),
)
def test_shortcuts_change_nothing(seed, vocab_size, with_ties, params):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, vocab_size).astype(np.float32)
    if with_ties and params.typical_p == 1:  # equal distances from the entropy differ by rounding alone
        logits = np.round(logits)
    expected = by_definition(logits, params)
    ids, probabilities = distribution(logits, params)
    total = math.fsum(weight for _, weight in expected)
    boundary = abs(len(ids) - len(expected)) == 1 and (params.top_p < 1 or params.typical_p < 1)
    if not boundary:  # a sum that meets the mass to the last bit may fall either way
        assert ids.tolist() == [i for i, _ in expected]
        assert probabilities.tolist() == pytest.approx([weight / total for _, weight in expected], rel=1e-9)

    draw = rng.random()
    token_id = sample(logits, params, (), FixedDraw(draw)).token_id
    running = np.cumsum(probabilities)
    at = ids.tolist().index(token_id)
    assert (running[at - 1] if at else 0) <= draw + 1e-9
    assert draw < running[at] + 1e-9


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=st.integers(1, 1100), draw=st.sampled_from([0.0, 0.5, 1 - 2**-53]))
def test_a_forbidden_token_is_never_drawn(seed, vocab_size, draw):
    rng = np.random.default_rng(seed)
    allowed = tuple(rng.choice(vocab_size, size=rng.integers(1, min(vocab_size, 5) + 1), replace=False).tolist())
    logits = rng.normal(0, 20, vocab_size).astype(np.float32)
    assert sample(logits, SamplingParams(allowed_token_ids=allowed), (), FixedDraw(draw)).token_id in allowed
