"""The real backend: a small random model behind the scheduler answers as `generate` does alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Chunk, Copy, RowError, Sampled, Scored
from engine.generate import generate
from engine.model import Model
from engine.params import SamplingParams
from engine.sampler import request_rng, sample, token_logprobs
from scheduler.backend import ModelBackend
from scheduler.batch import Batch, Work
from scheduler.core import Scheduler
from scheduler.events import ChoiceFinished, Delta, Finished
from scheduler.output import TextOutput, TokensOnly
from scheduler.request import FinishReason, Request
from scheduler.sequence import Sequence
from tests.tiny_model import write_tiny_llama

N_SLOTS, MAX_LEN = 3, 96


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return Model.load(write_tiny_llama(path, quant="Q8_0"), kernels="reference")


def run_all(model, requests):
    """{request id: its events}, all served at once."""
    scheduler = Scheduler(
        n_slots=N_SLOTS, max_len=MAX_LEN, prefill_chunk=7, max_queue=100, eos_ids=model.tokenizer.eos_ids
    )
    backend = ModelBackend(model, model.new_cache(N_SLOTS, MAX_LEN))
    events = []
    for request in requests:
        events += scheduler.submit(request, 0.0, lambda r, i: TextOutput(r, i, model.tokenizer))
    while (batch := scheduler.schedule()) is not None:
        events += scheduler.update(batch, backend.run(batch), 0.0)
    return {request.id: [e for e in events if e.request_id == request.id] for request in requests}


def tokens_of(events, index=0):
    return [token for e in events if isinstance(e, Delta) and e.index == index for token in e.tokens]


def text_of(events, index=0):
    return "".join(e.text for e in events if isinstance(e, Delta) and e.index == index)


def prompt(seed, length):
    return tuple(int(i) for i in np.random.default_rng(seed).integers(3, 250, length))


def test_a_served_batch_answers_as_generate_does_alone(model):
    varied = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "logit_bias": {2: 4.0}},
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_tokens": 4, "logprobs": 0},
        {"temperature": 1.0, "min_p": 0.05, "typical_p": 0.9, "ignore_eos": True},
    ]
    requests = [
        Request(id=f"r{i}", prompt_ids=prompt(i, 1 + 9 * i), params=SamplingParams(seed=i, max_tokens=12 + i, **params))
        for i, params in enumerate(varied * 2)
    ]
    answers = run_all(model, requests)
    for request in requests:
        alone = generate(
            model,
            model.tokenizer,
            request.prompt_ids,
            request.params,
            cache=model.new_cache(1, MAX_LEN),
        )
        events = answers[request.id]
        served = tokens_of(events)
        (choice,) = [e for e in events if isinstance(e, ChoiceFinished)]
        assert choice.reason == alone.finish_reason
        assert choice.num_tokens == alone.stats.num_completion_tokens
        ids = [token.token_id for token in served]
        assert ids[: len(alone.ids)] == list(alone.ids)
        assert set(ids[len(alone.ids) :]) <= model.tokenizer.eos_ids
        assert text_of(events) == alone.text
        if alone.logprobs is not None:
            assert [token.logprobs for token in served][: len(alone.logprobs)] == list(alone.logprobs)
    assert len({text_of(events) for events in answers.values()}) == len(requests)


def test_a_greedy_row_is_untouched_by_a_hot_neighbour(model):
    greedy = Request(id="cold", prompt_ids=prompt(1, 20), params=SamplingParams(temperature=0, seed=0, max_tokens=16))
    hot = Request(id="hot", prompt_ids=prompt(1, 20), params=SamplingParams(temperature=1.5, seed=0, max_tokens=16))
    alone = run_all(model, [greedy])["cold"]
    together = run_all(model, [hot, greedy])
    assert tokens_of(together["cold"]) == tokens_of(alone)
    assert tokens_of(together["hot"]) != tokens_of(alone)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_every_choice_is_the_same_however_many_share_the_prefill(model, length):
    def choices(n):
        request = Request(id="a", prompt_ids=prompt(5, length), n=n, params=SamplingParams(seed=9, max_tokens=8))
        events = run_all(model, [request])["a"]
        return [tokens_of(events, index) for index in range(n)]

    five = choices(5)  # two more than there are slots
    assert choices(2) == five[:2]
    assert choices(1) == five[:1]
    assert len({tuple(t.token_id for t in choice) for choice in five}) == 5


def test_prompt_logprobs_are_those_of_each_next_prompt_token(model):
    ids = prompt(3, 20)
    request = Request(id="a", prompt_ids=ids, params=SamplingParams(seed=0, max_tokens=1, prompt_logprobs=2))
    finished = run_all(model, [request])["a"][-1]
    logits = model.forward((Chunk(0, 0, ids, len(ids)),), model.new_cache(1, MAX_LEN))
    expected = [token_logprobs(row, token_id, 2) for row, token_id in zip(logits, ids[1:], strict=False)]
    assert finished.prompt_logprobs == (None, *expected)


class FixedModel:
    """A stand-in for `Model`: its logits are those it was made with."""

    class tokenizer:  # noqa: N801
        eos_ids = frozenset()

    def __init__(self, logits):
        self.logits = np.array(logits, np.float32)
        self.calls = []

    def forward(self, chunks, _cache):
        self.calls.append(("forward", chunks))
        return self.logits

    def copy(self, *args):
        self.calls.append(("copy", args))


def row(slot, n_logits=1, *, samples=True, **params):
    request = Request(id="a", prompt_ids=(0, 1, 2), params=SamplingParams(**{"temperature": 0, **params}))
    sequence = Sequence(request, 0, 9, 0.0, TokensOnly, slot=slot)
    return Work(sequence, Chunk(slot, 0, (0, 1, 2)[: max(n_logits, 1)], n_logits), samples)


def test_a_row_that_cannot_be_sampled_fails_alone_and_says_so_plainly():
    fixed = FixedModel([[0, 1, 0], [0, np.nan, 0], [2, 1, 0]])
    results = ModelBackend(fixed, fixed).run(Batch((row(0), row(1), row(2))))
    assert (results[0], results[2]) == (Sampled(1), Sampled(0))
    assert results[1].message == "the model's logits are not finite"


def test_an_unforeseen_failure_names_no_internals():
    fixed = FixedModel([[0, 1, 0]])
    work = row(0, temperature=1)
    work.sequence.index = None
    (result,) = ModelBackend(fixed, fixed).run(Batch((work,)))
    assert isinstance(result, RowError)
    assert isinstance(result.cause, TypeError)
    assert "TypeError" not in result.message


def test_rows_with_several_logits_or_none_stay_aligned():
    fixed = FixedModel([[0, 0, 1], [0, 1, 0], [1, 0, 0]])
    scored = row(0, 2, samples=False, prompt_logprobs=0)
    silent = row(1, 0, samples=False)
    results = ModelBackend(fixed, fixed).run(Batch((scored, silent, row(2))))
    assert isinstance(results[0], Scored)
    assert [lp.token_id for lp in results[0].logprobs] == [1, 2]
    assert results[1:] == [None, Sampled(0)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), n_rows=st.integers(1, 6), seed=st.integers(0, 999))
def test_a_batch_gets_the_tokens_that_sample_chooses_row_by_row(data, n_rows, seed):
    logits = np.random.default_rng(seed).integers(-4, 5, (n_rows, 3)).astype(np.float32)  # with many equals
    logits[data.draw(st.integers(0, n_rows - 1)), 1] = data.draw(st.sampled_from([0, np.nan, np.inf, -np.inf]))
    works = []
    for slot in range(n_rows):
        params = {
            "temperature": data.draw(st.sampled_from([0, 0, 1])),
            **data.draw(
                st.sampled_from(
                    [
                        {},
                        {"min_tokens": 2},
                        {"min_tokens": 2, "ignore_eos": True},
                        {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": (1,)},
                        {"bad_words": ((2,),)},
                        {"logit_bias": {0: 3.0}},
                        {"allowed_token_ids": (1, 2)},
                        {"repetition_penalty": 1.5},
                        {"presence_penalty": 1.0},
                        {"frequency_penalty": 1.0},
                        {"logprobs": 1},
                        {"top_p": 0.0},
                    ]
                )
            ),
        }
        works.append(row(slot, **params))
        works[-1].sequence.output_ids += data.draw(st.lists(st.integers(0, 2), max_size=3))
    fixed = FixedModel(logits)
    fixed.tokenizer = type("", (), {"eos_ids": frozenset({0})})
    results = ModelBackend(fixed, fixed).run(Batch(tuple(works)))
    for work, of_row, result in zip(works, logits, results, strict=True):
        sequence, params = work.sequence, work.sequence.request.params
        if np.isfinite(of_row).all():
            rng = request_rng(0, 0)
            prompt_ids = sequence.request.prompt_ids
            assert result == sample(of_row, params, sequence.output_ids, rng, prompt_ids, eos_ids=frozenset({0}))
        else:
            assert result.message == "the model's logits are not finite"


def test_copies_come_before_the_forward():
    fixed = FixedModel([[0, 1, 0]])
    ModelBackend(fixed, fixed).run(Batch((row(0),), (Copy(1, 0, 2),)))
    assert [name for name, _ in fixed.calls] == ["copy", "forward"]
    assert fixed.calls[0][1] == (1, 0, 2)


def test_the_only_terminal_event_is_the_last(model):
    request = Request(id="a", prompt_ids=prompt(2, 5), params=SamplingParams(seed=0, max_tokens=3))
    events = run_all(model, [request])["a"]
    assert [e for e in events if isinstance(e, Finished)] == [events[-1]]
    assert events[-1].reason in (FinishReason.LENGTH, FinishReason.STOP)
