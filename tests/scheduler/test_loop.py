import asyncio
import threading

import pytest

from engine.batch import RowError
from engine.errors import ContextLengthError, DrainingError, QueueFullError
from engine.params import SamplingParams
from scheduler.events import ChoiceFinished, Delta, Finished, Started
from scheduler.request import FinishReason, Request
from tests.fakes import FakeBackend, fake_loop, mixed, solo
from tests.scheduler.driver import request


class Running:
    """`async with Running() as loop`: an EngineLoop that runs, and has stopped cleanly at the end."""

    def __init__(self, backend=None, **kwargs):
        self.loop = fake_loop(backend, **kwargs)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.loop.run())
        return self.loop

    async def __aexit__(self, *_):
        await self.loop.stop()
        await self.task
        assert self.loop.num_running == self.loop.num_waiting == 0


class Gate(FakeBackend):
    """A backend that waits in its thread until it is let through, tick by tick."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def run(self, batch):
        self.entered.release()
        assert self.passes.acquire(timeout=60)
        return super().run(batch)

    async def reached(self):
        """A forward is in flight."""
        await asyncio.to_thread(self.entered.acquire, timeout=60)


async def collect(stream):
    return [event async for event in stream]


def text_of(events, index=0):
    return "".join(e.text for e in events if isinstance(e, Delta) and e.index == index)


async def test_a_stream_runs_from_started_to_finished():
    async with Running() as loop:
        events = await collect(loop.submit(request(max_tokens=3)))
    assert isinstance(events[0], Started)
    assert [type(e) for e in events[-2:]] == [ChoiceFinished, Finished]
    assert text_of(events) == solo(request(max_tokens=3), max_len=64)[1]


async def test_many_requests_at_once_get_their_solo_text():
    asked = [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(b"prompt %d" % i) * (1 + i % 3),
            n=1 + i % 4,
            params=SamplingParams(seed=i, max_tokens=None if i % 5 == 0 else 3 + i, stop=("ab", "b ")),
        )
        for i in range(16)
    ]
    async with Running(FakeBackend(next_token=mixed), n_slots=3, max_queue=100) as loop:
        answers = await asyncio.gather(*(collect(loop.submit(r)) for r in asked))
    for r, events in zip(asked, answers, strict=True):
        assert sum(isinstance(e, Finished) for e in events) == 1
        for index in range(r.n):
            assert text_of(events, index) == solo(r, index, max_len=64, next_token=mixed)[1]


async def test_refusals_come_before_any_stream():
    async with Running(n_slots=1, max_queue=0, max_len=16) as loop:
        with pytest.raises(ContextLengthError):
            loop.submit(request(prompt=b"x" * 16))
        stream = loop.submit(request("a"))
        with pytest.raises(QueueFullError):
            loop.submit(request("b"))
        stream.close()
        await collect(loop.submit(request("b", max_tokens=1)))


async def test_a_slow_consumer_costs_one_pending_delta_per_choice():
    async with Running() as loop:
        stream = loop.submit(request(max_tokens=40))
        await loop.join()
        events = await collect(stream)
    assert [type(e) for e in events] == [Started, Delta, ChoiceFinished, Finished]
    assert len(events[1].tokens) == 40
    assert text_of(events) == solo(request(max_tokens=40), max_len=64)[1]


async def test_closing_a_stream_in_mid_flight_frees_the_slot_before_the_forward_ends():
    gate = Gate()
    async with Running(gate, n_slots=1) as loop:
        gone = loop.submit(request("a"))
        waiting = loop.submit(request("b", max_tokens=2))
        await gate.reached()
        gone.close()
        gone.close()
        assert loop.slots()[0].request_id == "b"
        gate.passes.release(100)
        assert text_of(await collect(waiting)) == solo(request("b", max_tokens=2), max_len=64)[1]
        assert (await collect(gone))[-1].reason is FinishReason.ABORT


async def test_abort_says_whether_there_was_something_to_abort():
    async with Running() as loop:
        stream = loop.submit(request("a"))
        assert loop.abort("a")
        assert not loop.abort("a")
        assert not loop.abort("nobody")
        assert (await collect(stream))[-1].reason is FinishReason.ABORT


async def test_many_aborted_streams_leave_nothing_behind():
    async with Running(n_slots=4) as loop:
        for round_number in range(50):
            streams = [loop.submit(request(f"{round_number}.{i}")) for i in range(4)]
            for stream in streams:
                await anext(stream)
                await anext(stream)
                stream.close()
            assert loop.num_running == loop.num_waiting == 0
        assert len(asyncio.all_tasks()) == 2
        events = await collect(loop.submit(request(max_tokens=5)))
    assert text_of(events) == solo(request(max_tokens=5), max_len=64)[1]
    assert loop.metrics.num_finished[FinishReason.ABORT] == 200


async def test_a_failing_row_ends_its_request_alone_and_the_log_hears_why():
    def fault(work):
        fails = work.sequence.request.id == "a" and len(work.sequence.output_ids) == 3
        return RowError("it broke", ZeroDivisionError("inner")) if fails else None

    ended = []
    async with Running(FakeBackend(fault=fault), on_finished=ended.append) as loop:
        a, b = await asyncio.gather(
            collect(loop.submit(request("a"))), collect(loop.submit(request("b", max_tokens=9)))
        )
    assert a[-1].reason is FinishReason.ERROR
    assert a[-1].error == "it broke"
    assert text_of(a) == solo(request("a", max_tokens=3), max_len=64)[1]
    assert text_of(b) == solo(request("b", max_tokens=9), max_len=64)[1]
    assert ended == [a[-1], b[-1]]
    assert isinstance(a[-1].cause, ZeroDivisionError)
    assert b[-1].cause is None


async def test_a_failing_forward_ends_its_batch_and_the_others_go_on():
    def fault(work):
        if work.sequence.request.id == "a" and len(work.sequence.output_ids) == 2:
            raise MemoryError("no more")

    async with Running(FakeBackend(fault=fault), n_slots=2) as loop:
        a, b, c = await asyncio.gather(
            collect(loop.submit(request("a"))),
            collect(loop.submit(request("b", max_tokens=30))),
            collect(loop.submit(request("c", max_tokens=5))),
        )
    assert (a[-1].reason, b[-1].reason) == (FinishReason.ERROR, FinishReason.ERROR)
    assert "MemoryError" not in a[-1].error
    assert isinstance(a[-1].cause, MemoryError)
    assert text_of(c) == solo(request("c", max_tokens=5), max_len=64)[1]


async def test_a_log_that_fails_ends_no_request_and_not_the_loop():
    heard, reported = [], []

    def broken_log(finished):
        heard.append(finished.request_id)
        raise BrokenPipeError("nobody reads the log")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with Running(on_finished=broken_log, n_slots=1) as loop:
        events = await asyncio.gather(*(collect(loop.submit(request(name, max_tokens=3))) for name in "abc"))
        gone = loop.submit(request("d"))
        gone.close()
        assert (await collect(gone))[-1].reason is FinishReason.ABORT
        assert not loop.is_draining
    assert [text_of(e) for e in events] == [solo(request(max_tokens=3), max_len=64)[1]] * 3
    assert heard == ["a", "b", "c", "d"]
    assert [type(fault) for fault in reported] == [BrokenPipeError] * 4


async def test_draining_refuses_the_new_and_finishes_the_old():
    async with Running() as loop:
        stream = loop.submit(request(max_tokens=20))
        loop.drain()
        with pytest.raises(DrainingError):
            loop.submit(request("b"))
        await loop.join()
        assert (await collect(stream))[-1].reason is FinishReason.LENGTH


async def test_stopping_aborts_what_runs_and_waits_for_the_forward():
    gate = Gate()
    loop = fake_loop(gate, n_slots=1)
    task = asyncio.create_task(loop.run())
    streams = [loop.submit(request("a")), loop.submit(request("b"))]
    await gate.reached()
    stopping = asyncio.create_task(loop.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    gate.passes.release()
    await stopping
    await task
    for stream in streams:
        assert (await collect(stream))[-1].reason is FinishReason.ABORT


async def test_stopping_a_loop_that_never_ran_is_fine():
    await fake_loop().stop()


async def test_a_scheduler_that_fails_ends_every_request_before_the_loop_dies():
    loop = fake_loop()

    def broken_update(*_args):
        raise AssertionError("a bug")

    loop._scheduler.update = broken_update
    stream = loop.submit(request())
    with pytest.raises(AssertionError, match="a bug"):
        await loop.run()
    assert (await collect(stream))[-1].reason is FinishReason.ERROR
    with pytest.raises(DrainingError):
        loop.submit(request("b"))
    await loop.stop()


async def test_an_idle_loop_runs_nothing_and_wakes_for_a_request():
    backend = FakeBackend()
    async with Running(backend) as loop:
        await asyncio.sleep(0.05)
        assert backend.num_ticks == 0
        await collect(loop.submit(request("a", max_tokens=2)))
        assert backend.num_ticks == 2
        await asyncio.sleep(0.05)
        assert backend.num_ticks == 2


async def test_the_event_loop_is_free_while_a_forward_runs():
    gate = Gate()
    async with Running(gate) as loop:
        stream = loop.submit(request(max_tokens=1))
        await gate.reached()
        for _ in range(100):  # the forward cannot end; the event loop goes round all the same
            await asyncio.sleep(0)
        gate.passes.release()
        assert (await collect(stream))[-1].reason is FinishReason.LENGTH


async def test_a_run_that_is_cancelled_ends_every_request():
    loop = fake_loop()
    task = asyncio.create_task(loop.run())
    stream = loop.submit(request())
    await anext(stream)
    await anext(stream)
    task.cancel()
    assert (await collect(stream))[-1].reason is FinishReason.ERROR
    with pytest.raises(asyncio.CancelledError):
        await task
    await loop.stop()
