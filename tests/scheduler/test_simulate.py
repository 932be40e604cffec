import pytest

from engine.errors import ContextLengthError
from scheduler.core import Scheduler
from scheduler.request import FinishReason
from scheduler.simulate import Arrival, simulate
from tests.scheduler.driver import request


def scheduler(n_slots=2, max_queue=8):
    return Scheduler(n_slots=n_slots, max_len=64, prefill_chunk=8, max_queue=max_queue, eos_ids=frozenset())


def one_second(_batch):
    return 1.0


def timings(outcome):
    return {event.request_id: event.timings for event in outcome.finished}


def test_a_request_takes_as_long_as_its_ticks_cost():
    outcome = simulate(scheduler(), [Arrival(5.0, request("a", prompt=b"12345", max_tokens=3))], one_second)
    (event,) = outcome.finished
    assert (event.reason, event.usage.completion_tokens) == (FinishReason.LENGTH, 3)
    assert (event.timings.queue_s, event.timings.ttft_s, event.timings.e2e_s) == (0.0, 1.0, 3.0)
    assert outcome.t_end == 8.0


def test_the_cost_is_asked_of_every_batch():
    engine = scheduler()
    costs = []

    def cost(batch):
        costs.append(batch.num_tokens * 0.5)
        return costs[-1]

    outcome = simulate(engine, [Arrival(0.0, request("a", prompt=b"1234567890", max_tokens=2))], cost)
    assert costs == [4.0, 1.0, 0.5]
    assert outcome.t_end == sum(costs)
    assert engine.metrics.ticks["prefill"].seconds.sum == 5.0
    assert engine.metrics.ticks["decode"].seconds.sum == 0.5


def test_who_comes_in_the_midst_of_a_forward_waits_from_that_moment():
    arrivals = [Arrival(0.25, request("b", max_tokens=1)), Arrival(0.0, request("a", max_tokens=2))]
    outcome = simulate(scheduler(n_slots=1), arrivals, one_second)
    assert timings(outcome)["b"].queue_s == 1.75
    assert [event.request_id for event in outcome.finished] == ["a", "b"]


def test_whom_the_queue_has_no_room_for_is_refused():
    arrivals = [Arrival(0.0, request(name, max_tokens=1)) for name in "abc"]
    outcome = simulate(scheduler(n_slots=1, max_queue=1), arrivals, one_second)
    assert (outcome.refused, set(timings(outcome))) == (("c",), {"a", "b"})


def test_a_request_that_can_never_run_is_a_mistake_of_the_simulation():
    with pytest.raises(ContextLengthError):
        simulate(scheduler(), [Arrival(0.0, request(prompt=b"x" * 64))], one_second)


def test_choices_and_scored_prompts_run_too():
    asked = request("a", prompt=b"12345", n=3, max_tokens=2, prompt_logprobs=0)
    (event,) = simulate(scheduler(), [Arrival(0.0, asked)], one_second).finished
    assert event.usage.completion_tokens == 6
    assert len(event.prompt_logprobs) == 5
