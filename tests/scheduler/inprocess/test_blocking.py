import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import ContextLengthError, DrainingError, GenerationError, ModelFileError, ParamError
from engine.params import SamplingParams
from scheduler.backend import ModelBackend
from scheduler.events import Delta, Finished, Started
from scheduler.inprocess import BlockingEngine
from scheduler.request import FinishReason

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(model):
    with BlockingEngine(model, slots=4) as engine:
        yield engine


def until(condition):
    while not condition():
        time.sleep(0.001)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_the_events_tell_the_text_of_generate(engine, alone):
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
    events = list(engine.generate("Hello", params=SamplingParams(**params)))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == alone("Hello", **params).text


def test_many_threads_at_once_each_get_the_answer_of_generate(engine, alone):
    asked = [(f"prompt {i} " * (i % 4 + 1), {"max_tokens": 5 + i, "temperature": 1.0, "seed": i}) for i in range(12)]

    def stream(prompt, params):
        events = engine.generate(prompt, params=SamplingParams(**params))
        return "".join(event.text for event in events if isinstance(event, Delta))

    def complete(prompt, params):
        return engine.complete(prompt, params=SamplingParams(**params)).text

    with ThreadPoolExecutor(12) as pool:
        texts = [pool.submit((stream, complete)[i % 2], *pair) for i, pair in enumerate(asked)]
    for (prompt, params), text in zip(asked, texts, strict=True):
        assert text.result() == alone(prompt, **params).text


def test_messages_and_choices_are_answered_too(engine):
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    completion = engine.complete(messages=[{"role": "user", "content": "Hi"}], params=params, n=2)
    assert [len(choice.ids) for choice in completion.choices] == [4, 4]
    assert completion.seed == 1


def test_breaking_out_of_the_loop_frees_the_slots(engine):
    for event in engine.generate("Hello", params=LONG, n=3):
        if isinstance(event, Delta):
            break
    until(lambda: engine.num_running == 0)


def test_a_stream_that_is_kept_ends_with_its_block_or_by_close(engine):
    with engine.generate("Hello", params=LONG) as stream:
        next(stream)
    assert list(stream)[-1].reason is FinishReason.ABORT
    stream = engine.generate("Hello", params=LONG)
    stream.close()
    stream.close()
    assert list(stream)[-1].reason is FinishReason.ABORT
    assert list(stream) == []


def test_requests_run_together_from_the_moment_generate_is_called(engine):
    streams = [engine.generate("Hello", params=LONG) for _ in range(3)]
    assert engine.num_running == 3
    for stream in streams:
        stream.close()


def test_leaving_the_block_ends_what_other_threads_wait_for(model):
    with ThreadPoolExecutor(4) as pool:
        with BlockingEngine(model, slots=2) as engine:
            answers = [pool.submit(engine.complete, "Hello", params=LONG) for _ in range(4)]
            until(lambda: engine.num_running + engine.num_waiting == 4)
        assert engine_threads() == []
        assert [answer.result().finish_reason for answer in answers] == [FinishReason.ABORT] * 4


def test_a_stream_is_read_to_its_end_after_the_block(model):
    with BlockingEngine(model, slots=1) as engine:
        stream = engine.generate("Hello", params=LONG)
        next(stream)
    assert list(stream)[-1].reason is FinishReason.ABORT
    with pytest.raises(DrainingError, match="with"):
        engine.generate("Hello")
    stream.close()


def test_what_cannot_be_asked_is_refused(engine, model):
    with pytest.raises(ParamError, match="prompt"):
        engine.generate()
    with pytest.raises(ContextLengthError):
        engine.complete([1] * engine.context)
    with pytest.raises(ParamError, match="n must be"):
        engine.generate("Hello", n=0)
    assert engine.num_running == 0
    assert engine.fingerprint == model.fingerprint("float16")


def test_an_engine_that_cannot_be_is_refused_when_entered(tmp_path, model):
    (tmp_path / "x.gguf").write_bytes(b"<html>")
    with pytest.raises(ModelFileError, match=r"x\.gguf"), BlockingEngine(tmp_path / "x.gguf"):
        pass
    with pytest.raises(ParamError, match="context"), BlockingEngine(model, context=1):
        pass
    until(lambda: not engine_threads())


def test_a_request_that_fails_raises_in_the_thread_that_asked(engine, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("inner")

    monkeypatch.setattr(ModelBackend, "_result", fails)
    stream = engine.generate("Hello")
    until(lambda: engine.num_running == 0)
    assert isinstance(next(stream), Started)
    assert next(event for event in stream if isinstance(event, Finished)).reason is FinishReason.ERROR
    with pytest.raises(GenerationError) as failure:
        next(stream)
    assert isinstance(failure.value.__cause__, ZeroDivisionError)
    with pytest.raises(GenerationError):
        engine.complete("Hello")
    monkeypatch.undo()
    assert engine.complete("Hello", params=SamplingParams(max_tokens=1)).ids


def test_an_engine_that_breaks_ends_every_request_and_says_so_at_the_end(model):
    def use():
        with BlockingEngine(model, slots=1) as engine:

            def broken(*_):
                raise AssertionError("a bug")

            engine._running.loop._scheduler.update = broken
            with pytest.raises(GenerationError, match="stopped"):
                engine.complete("Hello")
            with pytest.raises(DrainingError):
                engine.complete("Hello")

    with pytest.raises(AssertionError, match="a bug"):
        use()
    assert engine_threads() == []
