"""Whatever is submitted, cancelled, broken and finished, in whatever order and at whatever moment."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.batch import RowError
from engine.errors import QueueFullError
from scheduler.events import ChoiceFinished, Delta, Finished, Started
from scheduler.request import FinishReason
from tests.fakes import mixed, solo
from tests.scheduler.driver import Driver

pytestmark = pytest.mark.slow

MAX_LEN = 40


class SchedulerUnderFire(RuleBasedStateMachine):
    """The driver's batches run half a tick at a time, so that every rule may also fall between schedule and update."""

    @initialize(n_slots=st.integers(1, 4), prefill_chunk=st.integers(1, 9), max_queue=st.integers(0, 6))
    def start(self, n_slots, prefill_chunk, max_queue):
        self.doomed = set()
        self.driver = Driver(
            n_slots=n_slots,
            max_len=MAX_LEN,
            prefill_chunk=prefill_chunk,
            max_queue=max_queue,
            next_token=mixed,
            fault=self.fault,
        )
        self.batch = None
        self.cancelled = set()

    def fault(self, work):
        return RowError("it broke") if work.sequence.request.id in self.doomed else None

    @rule(
        prompt=st.binary(min_size=1, max_size=MAX_LEN - 1),
        n=st.sampled_from([1, 1, 1, 2, 3, 7]),
        priority=st.integers(-1, 1),
        reports_progress=st.booleans(),
        params=st.fixed_dictionaries(
            {
                "seed": st.integers(-5, 5),
                "temperature": st.sampled_from([0.0, 1.0]),
                "max_tokens": st.none() | st.integers(0, 12),
                "stop": st.lists(st.text("aéb ", min_size=1, max_size=3), max_size=2).map(tuple),
                "stop_token_ids": st.sampled_from([(), (ord("b"),)]),
                "include_stop_str_in_output": st.booleans(),
                "ignore_eos": st.booleans(),
                "skip_special_tokens": st.booleans(),
                "prompt_logprobs": st.sampled_from([None, None, 1]),
            }
        ),
    )
    def submit(self, prompt, n, priority, reports_progress, params):
        request_id = f"r{len(self.driver.requests)}"
        try:
            self.driver.submit(
                request_id, prompt=prompt, n=n, priority=priority, reports_progress=reports_progress, **params
            )
        except QueueFullError:
            assert all(view.state != "idle" for view in self.driver.scheduler.slots())

    @rule(data=st.data())
    def cancel(self, data):
        if self.driver.requests:
            request_id = data.draw(st.sampled_from(sorted(self.driver.requests)))
            self.cancelled.add(request_id)
            self.driver.abort(request_id)

    @rule(data=st.data())
    def break_one(self, data):
        if self.driver.requests:
            self.doomed.add(data.draw(st.sampled_from(sorted(self.driver.requests))))

    @rule()
    def half_a_tick(self):
        if self.batch is None:
            self.batch = self.driver.begin_tick()
        else:
            batch, self.batch = self.batch, None
            self.driver.end_tick(batch)

    @rule(count=st.integers(1, 20))
    def many_ticks(self, count):
        for _ in range(2 * count):
            self.half_a_tick()

    @invariant()
    def slots_add_up_and_nobody_shares_one(self):
        if not hasattr(self, "driver"):
            return
        scheduler = self.driver.scheduler
        held = [sequence.slot for sequence in scheduler._running]
        assert len(set(held)) == len(held)
        assert scheduler._pool.num_free + len(held) == scheduler._pool.n_slots
        assert not (scheduler.num_waiting and scheduler._pool.num_free)
        taken = [view for view in scheduler.slots() if view.state != "idle"]
        assert sorted(view.slot for view in taken) == sorted(held)
        assert len({(view.request_id, view.index) for view in taken}) == len(held)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        if self.batch is not None:
            self.half_a_tick()
        self.driver.run()
        self.driver.assert_all_slots_free()
        metrics = self.driver.scheduler.metrics
        assert metrics.num_requests == sum(metrics.num_finished.values()) == len(self.driver.requests)
        prompt_tokens = completion_tokens = 0
        for request_id in self.driver.requests:
            self.check_events(request_id)
            usage = self.driver.finished(request_id).usage
            prompt_tokens += usage.prompt_tokens
            completion_tokens += usage.completion_tokens
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (prompt_tokens, completion_tokens)

    def check_events(self, request_id):
        events = self.driver.events[request_id]
        asked = self.driver.requests[request_id]
        assert sum(isinstance(e, Finished) for e in events) == 1
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert sum(isinstance(e, Started) for e in events) <= 1
        timings = finished.timings
        assert timings.queue_s + timings.prefill_s + timings.decode_s == timings.e2e_s
        for index in range(asked.n):
            own = [e for e in events if isinstance(e, Delta | ChoiceFinished) and e.index == index]
            assert [e for e in own if isinstance(e, ChoiceFinished)] == own[-1:]
            self.check_choice(asked, index)
        if finished.reason is FinishReason.ABORT:
            assert request_id in self.cancelled
        elif finished.reason is FinishReason.ERROR:
            assert request_id in self.doomed

    def check_choice(self, asked, index):
        """All of the solo answer, or if it was cut short a beginning of it."""
        driver = self.driver
        ids, text, reason = solo(asked, index, max_len=MAX_LEN, next_token=mixed)
        choice = driver.choice(asked.id, index)
        if choice.reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert ids[: len(driver.token_ids(asked.id, index))] == driver.token_ids(asked.id, index)
            assert text.startswith(driver.text(asked.id, index).removesuffix("\ufffd"))
        else:
            assert driver.token_ids(asked.id, index) == ids
            assert driver.text(asked.id, index) == text
            assert (choice.reason, choice.num_tokens) == (reason, len(ids))


TestSchedulerUnderFire = SchedulerUnderFire.TestCase
TestSchedulerUnderFire.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
