import pytest

from engine.batch import RowError
from scheduler.metrics import Histogram
from scheduler.request import FinishReason
from tests.scheduler.driver import Driver


def test_a_histogram_counts_by_upper_bound_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.sum == 14.0


def test_tokens_ticks_and_requests_are_counted_once():
    driver = Driver(prefill_chunk=4)
    driver.submit("a", prompt=b"123456", n=2, max_tokens=3)
    driver.submit("b", prompt=b"123456", max_tokens=2)
    driver.run()
    metrics = driver.scheduler.metrics
    assert metrics.num_requests == 2
    assert metrics.num_finished[FinishReason.LENGTH] == 2
    assert metrics.prompt_tokens == 12
    assert metrics.generation_tokens == 8
    assert metrics.prefill_ticks + metrics.decode_ticks == len(driver.batches) == metrics.tick_tokens.count
    assert metrics.tick_tokens.sum == sum(batch.num_tokens for batch in driver.batches)
    assert metrics.request_generation_tokens.sum == 8
    assert metrics.ttft_s.count == metrics.e2e_s.count == 2


def test_latencies_come_from_the_ticks():
    driver = Driver(n_slots=1)
    driver.submit("a", max_tokens=5)  # one second a tick: the first token after one, four gaps of one
    driver.submit("b", max_tokens=1)
    driver.run()
    metrics = driver.scheduler.metrics
    assert metrics.ttft_s.sum == pytest.approx(1 + 6)
    assert (metrics.itl_s.count, metrics.itl_s.sum) == (4, pytest.approx(4))
    assert (metrics.tpot_s.count, metrics.tpot_s.sum) == (1, pytest.approx(1))
    assert metrics.queue_s.sum == pytest.approx(5)
    assert metrics.prefill_s.sum == pytest.approx(2)
    assert metrics.decode_s.sum == pytest.approx(4)
    assert metrics.e2e_s.sum == pytest.approx(11)


def test_requests_aborts_and_tokens_agree_after_aborts_everywhere():
    driver = Driver(n_slots=2, prefill_chunk=2)
    for name in "abcde":
        driver.submit(name, max_tokens=20)
    for name in "cab":  # one waits, two run
        driver.tick(4)
        driver.abort(name)
    driver.run()
    metrics = driver.scheduler.metrics
    assert metrics.num_requests == sum(metrics.num_finished.values()) == 5
    assert metrics.num_finished[FinishReason.ABORT] == 3
    assert metrics.generation_tokens == sum(driver.finished(name).usage.completion_tokens for name in "abcde")
    assert metrics.itl_s.count == metrics.generation_tokens - metrics.ttft_s.count


def test_a_failed_request_counts_as_an_error():
    driver = Driver(fault=lambda work: RowError("no") if len(work.sequence.output_ids) == 1 else None)
    driver.submit("a")
    driver.run()
    assert driver.scheduler.metrics.num_finished[FinishReason.ERROR] == 1
    assert driver.scheduler.metrics.generation_tokens == 1
