import asyncio
import gc
import threading

import pytest

from engine.errors import (
    CacheError,
    ContextLengthError,
    DrainingError,
    GenerationError,
    ModelFileError,
    ParamError,
    TemplateError,
)
from engine.model import Model
from engine.params import SamplingParams
from scheduler.backend import ModelBackend
from scheduler.events import ChoiceFinished, Delta, Finished, Started
from scheduler.inprocess import Engine
from scheduler.request import FinishReason
from tests.tiny_model import write_tiny_llama

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def engine(model):
    async with Engine(model, slots=4) as engine:
        yield engine


async def _begun(stream):
    """Return once the first piece of text has come."""
    async for event in stream:
        if isinstance(event, Delta):
            return


async def _until_finished(stream):
    """Every event, without what iterating raises after the last one."""
    async for event in stream:
        yield event
        if isinstance(event, Finished):
            return


async def test_the_events_tell_the_text_of_generate(engine, alone):
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    events = [event async for event in engine.generate("Hello", params=SamplingParams(**params))]
    assert isinstance(events[0], Started)
    assert [type(event) for event in events[-2:]] == [ChoiceFinished, Finished]
    assert "".join(event.text for event in events if isinstance(event, Delta)) == alone("Hello", **params).text


async def test_many_completions_at_once_are_each_that_of_generate(engine, alone):
    asked = [(f"prompt {i} " * (i % 4 + 1), {"max_tokens": 5 + i, "temperature": 1.0, "seed": i}) for i in range(12)]
    completions = await asyncio.gather(
        *(engine.complete(prompt, params=SamplingParams(**params)) for prompt, params in asked)
    )
    for (prompt, params), completion in zip(asked, completions, strict=True):
        expected = alone(prompt, **params)
        assert completion.text == expected.text
        assert completion.finish_reason.value == expected.finish_reason
        assert completion.usage.completion_tokens == expected.stats.num_completion_tokens
        assert completion.ids[: len(expected.ids)] == expected.ids


async def test_a_completion_has_everything_that_was_asked_for(engine, model):
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=1)
    completion = await engine.complete("Hello", params=params, n=3)
    assert completion.prompt_ids == tuple(model.tokenizer.encode("Hello"))
    assert [len(choice.ids) for choice in completion.choices] == [6, 6, 6]
    assert len({choice.ids for choice in completion.choices}) == 3
    for choice in completion.choices:
        assert choice.text == model.tokenizer.decode(choice.ids)
        assert tuple(entry.token_id for entry in choice.logprobs) == choice.ids
        assert {len(entry.top) for entry in choice.logprobs} == {2}
    first = completion.choices[0]
    assert (completion.text, completion.ids, completion.logprobs) == (first.text, first.ids, first.logprobs)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.prompt_logprobs[0] is None
    assert [entry.token_id for entry in completion.prompt_logprobs[1:]] == list(completion.prompt_ids[1:])
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 18)
    times = completion.timings
    assert times.queue_s + times.prefill_s + times.decode_s == pytest.approx(times.e2e_s)


async def test_what_was_not_asked_for_is_none(engine):
    completion = await engine.complete("Hello", params=SamplingParams(max_tokens=2))
    assert completion.logprobs is None
    assert completion.prompt_logprobs is None


async def test_no_tokens_at_all_still_score_the_prompt(engine):
    completion = await engine.complete("Hello", params=SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=0))
    assert (completion.text, completion.ids, completion.logprobs) == ("", (), ())
    assert len(completion.prompt_logprobs) == 5


async def test_a_drawn_seed_gives_the_same_answer_again(engine):
    first = await engine.complete("Hello", params=SamplingParams(max_tokens=30, ignore_eos=True))
    other = await engine.complete("Hello", params=SamplingParams(max_tokens=30, ignore_eos=True))
    again = await engine.complete("Hello", params=SamplingParams(max_tokens=30, ignore_eos=True, seed=first.seed))
    assert again.ids == first.ids != other.ids
    stream = engine.generate("Hello")
    assert 0 <= stream.request.params.seed < 2**53


async def test_text_token_ids_and_messages_are_prompts(engine, model):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    ids = model.tokenizer.encode("Hello")
    assert (await engine.complete(ids, params=greedy)).ids == (await engine.complete("Hello", params=greedy)).ids
    rendered = model.chat_template.render(HI).encode(model.tokenizer)
    assert (await engine.complete(messages=HI, params=greedy)).prompt_ids == tuple(rendered)


async def test_requests_run_together_from_the_moment_generate_is_called(engine):
    streams = [engine.generate("Hello", params=LONG) for _ in range(6)]
    assert (engine.num_running, engine.num_waiting) == (4, 2)
    for stream in streams:
        stream.close()
    assert (engine.num_running, engine.num_waiting) == (0, 0)


async def test_breaking_out_of_the_loop_frees_the_slots_at_once(engine):
    async for event in engine.generate("Hello", params=LONG, n=3):
        if isinstance(event, Delta):
            assert engine.num_running == 3
            break
    await asyncio.sleep(0)
    assert engine.num_running == 0


async def test_an_exception_in_the_loop_frees_the_slot(engine):
    async def use():
        async for event in engine.generate("Hello", params=LONG):
            assert isinstance(event, Started), "the second event"

    with pytest.raises(AssertionError, match="second"):
        await use()
    await asyncio.sleep(0)
    assert engine.num_running == 0


async def test_a_stream_that_is_kept_ends_with_its_block_or_by_close(engine):
    async with engine.generate("Hello", params=LONG) as stream:
        await _begun(stream)
        assert engine.num_running == 1
    assert engine.num_running == 0
    assert [event async for event in stream][-1].reason is FinishReason.ABORT
    stream = engine.generate("Hello", params=LONG)
    stream.close()
    stream.close()
    assert engine.num_running == 0


async def test_a_stream_never_iterated_is_aborted_when_it_is_let_go_of(engine):
    engine.generate("Hello", params=LONG)
    await asyncio.sleep(0)
    assert engine.num_running == 0


async def test_a_stream_let_go_of_in_another_thread_is_aborted_too(engine):
    streams = [engine.generate("Hello", params=LONG)]
    await asyncio.to_thread(streams.clear)
    while engine.num_running:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.001)


async def test_a_cancelled_completion_frees_its_slot(engine):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.complete("Hello", params=LONG)
    assert engine.num_running == 0


async def test_letting_go_of_a_finished_stream_aborts_nothing(engine):
    stream = engine.generate("Hello", params=SamplingParams(max_tokens=2, ignore_eos=True))
    events = [event async for event in stream]
    del stream
    assert events[-1].reason is FinishReason.LENGTH
    assert (await engine.complete("Hello", params=SamplingParams(max_tokens=2))).text


async def test_leaving_the_block_ends_everything(model):
    before = threading.active_count()
    async with Engine(model, slots=2) as engine:
        streams = [engine.generate("Hello", params=LONG) for _ in range(3)]
        await _begun(streams[0])
        completing = asyncio.create_task(engine.complete("Hello", params=LONG))
        await asyncio.sleep(0)
    for stream in streams:
        assert [event async for event in stream][-1].reason is FinishReason.ABORT
    assert (await completing).finish_reason is FinishReason.ABORT
    assert asyncio.all_tasks() == {asyncio.current_task()}
    while threading.active_count() > before + 1:  # noqa: ASYNC110 - the default executor's thread may stay
        await asyncio.sleep(0.001)
    with pytest.raises(DrainingError, match="with"):
        engine.generate("Hello")


async def test_outside_its_block_an_engine_says_how_it_is_used(model):
    engine = Engine(model)
    with pytest.raises(DrainingError, match="with"):
        await engine.complete("Hello")
    with pytest.raises(DrainingError):
        _ = engine.model


async def test_an_engine_may_be_entered_again(model):
    engine = Engine(model, slots=1)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    async with engine:
        first = await engine.complete("Hello", params=greedy)
    async with engine:
        assert (await engine.complete("Hello", params=greedy)).ids == first.ids


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "Hello", "messages": HI}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1_000_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "\ud800"}, "text"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"prompt": "Hello", "n": 0}, "n"),
        ({"prompt": "Hello", "params": SamplingParams(logit_bias={1_000_000: 1.0})}, "logit_bias"),
        ({"prompt": "Hello", "params": SamplingParams(allowed_token_ids=(-1,))}, "allowed_token_ids"),
        ({"prompt": "Hello", "params": SamplingParams(stop_token_ids=(1_000_000,))}, "stop_token_ids"),
        ({"prompt": "Hello", "params": SamplingParams(bad_words=((1_000_000,),))}, "bad_words"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_name_and_the_others_go_on(engine, asked, param):
    other = engine.generate("Hello", params=SamplingParams(max_tokens=5, ignore_eos=True))
    with pytest.raises(ParamError) as refusal:
        engine.generate(**asked)
    assert refusal.value.param == param
    assert engine.num_running == 1
    assert [event async for event in other][-1].reason is FinishReason.LENGTH


async def test_token_ids_must_be_integers(engine):
    with pytest.raises(TypeError):
        engine.generate([1.0])


async def test_a_prompt_that_fills_the_context_is_refused(model):
    async with Engine(model, context=8) as engine:
        assert engine.context == 8
        with pytest.raises(ContextLengthError):
            await engine.complete("Hello Hello")
        assert len((await engine.complete("Hello", params=SamplingParams(ignore_eos=True))).ids) == 3


async def test_messages_need_a_template_and_one_that_takes_them(tmp_path):
    raising = "{{ raise_exception('no ' + messages[0].role) }}"
    path = write_tiny_llama(tmp_path / "raising.gguf", chat_template=raising)
    async with Engine(path, kernels="reference", slots=1) as engine:
        with pytest.raises(TemplateError, match="no user"):
            await engine.complete(messages=HI)
    path = write_tiny_llama(tmp_path / "none.gguf", chat_template=None)
    async with Engine(str(path), kernels="reference", slots=1) as engine:
        with pytest.raises(ParamError, match="no chat template"):
            await engine.complete(messages=HI)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"slots": 0}, CacheError),
        ({"kv_dtype": "int4"}, CacheError),
        ({"context": 1}, ParamError),
        ({"context": 513}, ParamError),
        ({"kernels": "quick"}, ParamError),
    ],
)
async def test_an_engine_that_cannot_be_is_refused_when_entered(path, options, error):
    with pytest.raises(error):
        async with Engine(path, **{"kernels": "reference", **options}):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_file_that_is_no_model_is_refused_when_entered(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"<html>")
    with pytest.raises(ModelFileError, match=r"x\.gguf"):
        async with Engine(tmp_path / "x.gguf"):
            pass


async def test_a_loaded_model_keeps_its_kernels(model):
    with pytest.raises(ParamError, match="kernels"):
        async with Engine(model, kernels="compiled"):
            pass


async def test_a_request_that_fails_raises_what_it_failed_of_and_the_others_go_on(engine, monkeypatch):
    def fails(self, work, logits):
        if work.sequence.request.params.top_k == 7:
            raise ZeroDivisionError("inner")
        return result(self, work, logits)

    result = ModelBackend._result
    monkeypatch.setattr(ModelBackend, "_result", fails)
    good, bad = SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(top_k=7)
    other = asyncio.create_task(engine.complete("Hello", params=good))
    with pytest.raises(GenerationError) as failure:
        await engine.complete("Hello", params=bad)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
    assert "ZeroDivisionError" not in str(failure.value)

    stream = engine.generate("Hello", params=bad)
    reasons = [event.reason async for event in _until_finished(stream) if isinstance(event, Finished)]
    assert reasons == [FinishReason.ERROR]
    with pytest.raises(GenerationError):
        await anext(stream)
    assert len((await other).ids) == 3


async def test_a_refusal_met_while_running_is_raised_as_it_is(engine):
    forbidden = SamplingParams(allowed_token_ids=(5,), bad_words=((5, 5),), ignore_eos=True)
    with pytest.raises(ParamError, match="allowed_token_ids"):
        await engine.complete("Hello", params=forbidden)


async def test_an_engine_that_breaks_ends_every_request_and_says_so_at_the_end(model):
    async def use():
        async with Engine(model, slots=1) as engine:

            def broken(*_):
                raise AssertionError("a bug")

            engine._running.loop._scheduler.update = broken
            with pytest.raises(GenerationError, match="stopped"):
                await engine.complete("Hello")
            with pytest.raises(DrainingError):
                await engine.complete("Hello")

    with pytest.raises(AssertionError, match="a bug"):
        await use()


async def test_the_fingerprint_is_the_models(engine, model):
    assert engine.fingerprint == model.fingerprint("float16")
    assert engine.model is model


def test_nothing_is_left_behind_when_the_event_loop_ends_first(model):
    async def abandon():
        engine = Engine(model, slots=1)
        await engine.__aenter__()
        return engine, engine.generate("Hello", params=LONG)

    kept = list(asyncio.run(abandon()))
    kept.clear()
    gc.collect()


async def test_more_requests_than_any_server_would_queue_are_taken(model):
    async with Engine(model, slots=2) as engine:
        one = SamplingParams(max_tokens=1)
        completions = await asyncio.gather(*(engine.complete("a", params=one) for _ in range(300)))
    assert len(completions) == 300


def test_a_model_may_be_loaded_from_a_name_as_well(path):
    async def fingerprint():
        async with Engine(str(path), kernels="reference", slots=1) as engine:
            return engine.fingerprint

    assert asyncio.run(fingerprint()) == Model.load(path, kernels="reference").fingerprint("float16")
