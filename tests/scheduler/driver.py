"""Drives a Scheduler over the fake backend, tick by tick, and keeps what came out."""

from collections import defaultdict
from functools import partial

from engine.params import SamplingParams
from scheduler.core import Scheduler
from scheduler.events import ChoiceFinished, Delta, Finished, Started
from scheduler.output import TextOutput
from scheduler.request import FinishReason, Request
from tests.fakes import ByteTokenizer, FakeBackend, letters, solo


def request(request_id="a", prompt=b"prompt", *, n=1, priority=0, reports_progress=False, **params):
    return Request(
        id=request_id,
        prompt_ids=tuple(prompt),
        n=n,
        priority=priority,
        reports_progress=reports_progress,
        params=SamplingParams(**{"seed": 0, **params}),
    )


class Driver:
    """`t` is the clock; each tick takes one second."""

    def __init__(
        self,
        *,
        n_slots=4,
        max_len=64,
        prefill_chunk=8,
        max_queue=8,
        max_queue_tokens=10_000,
        next_token=letters,
        fault=None,
    ):
        self.backend = FakeBackend(next_token) if fault is None else FakeBackend(next_token, fault)
        self.max_len = max_len
        self.scheduler = Scheduler(
            n_slots=n_slots,
            max_len=max_len,
            prefill_chunk=prefill_chunk,
            max_queue=max_queue,
            max_queue_tokens=max_queue_tokens,
            eos_ids=ByteTokenizer.eos_ids,
        )
        self.open_output = partial(TextOutput, tokenizer=ByteTokenizer())
        self.t = 0.0
        self.requests = {}
        self.batches = []
        self.events = defaultdict(list)

    def submit(self, *args, **kwargs):
        new = request(*args, **kwargs)
        self._keep(self.scheduler.submit(new, self.t, self.open_output))
        self.requests[new.id] = new
        return new

    def abort(self, request_id):
        self._keep(self.scheduler.finish(request_id, FinishReason.ABORT, self.t))

    def begin_tick(self):
        batch = self.scheduler.schedule()
        if batch is not None:
            self.batches.append(batch)
        return batch

    def end_tick(self, batch):
        results = self.backend.run(batch)
        self.t += 1
        self._keep(self.scheduler.update(batch, results, self.t))

    def tick(self, count=1):
        for _ in range(count):
            batch = self.begin_tick()
            if batch is None:
                return False
            self.end_tick(batch)
        return True

    def run(self):
        while self.tick():
            pass

    def _keep(self, events):
        for event in events:
            self.events[event.request_id].append(event)

    def text(self, request_id="a", index=0):
        return "".join(d.text for d in self._deltas(request_id, index))

    def token_ids(self, request_id="a", index=0):
        return [token.token_id for d in self._deltas(request_id, index) for token in d.tokens]

    def _deltas(self, request_id, index):
        return [e for e in self.events[request_id] if isinstance(e, Delta) and e.index == index]

    def choice(self, request_id="a", index=0):
        (event,) = [e for e in self.events[request_id] if isinstance(e, ChoiceFinished) and e.index == index]
        return event

    def finished(self, request_id="a"):
        (event,) = [e for e in self.events[request_id] if isinstance(e, Finished)]
        return event

    def is_started(self, request_id):
        return any(isinstance(e, Started) for e in self.events[request_id])

    def assert_equals_solo(self, request_id="a"):
        """Every choice has the ids, text and reason it would have had alone."""
        asked = self.requests[request_id]
        for index in range(asked.n):
            ids, text, reason = solo(asked, index, max_len=self.max_len, next_token=self.backend.next_token)
            assert self.token_ids(request_id, index) == ids
            assert self.text(request_id, index) == text
            assert self.choice(request_id, index).reason is reason
            assert self.choice(request_id, index).num_tokens == len(ids)

    def assert_all_slots_free(self):
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_unfinished == 0
        assert {view.state for view in self.scheduler.slots()} == {"idle"}
        assert self.scheduler.cache_usage == 0
