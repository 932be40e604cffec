from math import isnan

import pytest

from engine.batch import RowError
from scheduler.metrics import TICK_BUCKETS_S, Histogram, Metrics, token_count_buckets
from scheduler.request import FinishReason
from tests.scheduler.driver import Driver


def test_a_histogram_counts_by_upper_bound_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.sum == 14.0


def test_a_quantile_is_in_the_bucket_of_the_value_it_stands_for():
    histogram = Histogram((1.0, 2.0, 4.0))
    assert isnan(histogram.quantile(0.5))
    assert isnan(histogram.mean)
    for value in (0.5, 1.5, 3.0, 3.0):
        histogram.observe(value)
    assert histogram.mean == 2.0
    assert [histogram.quantile(part) for part in (0.25, 0.5, 0.75, 1.0)] == [1.0, 2.0, 3.0, 4.0]
    histogram.observe(100.0)
    assert histogram.quantile(1.0) == 4.0


def test_metrics_can_be_read_by_people():
    histogram = Histogram((1.0, 2.0))
    assert repr(histogram) == "Histogram(count=0)"
    for _ in range(4):
        histogram.observe(1.5)
    assert repr(histogram) == "Histogram(count=4, mean=1.5, p50~1.5, p90~1.9, p99~1.99)"
    assert "object at" not in str(vars(Metrics(8)))


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
    prefill, decode = (metrics.ticks[kind].tokens for kind in ("prefill", "decode"))
    assert prefill.count + decode.count == len(driver.batches) == metrics.iteration_tokens.count
    assert prefill.sum + decode.sum == sum(batch.num_tokens for batch in driver.batches) == metrics.iteration_tokens.sum
    assert metrics.request_generation_tokens.sum == 8
    assert metrics.request_longest_choice_tokens.sum == 3 + 2
    assert (metrics.params_n.count, metrics.params_n.sum) == (2, 3)
    assert (metrics.params_max_tokens.count, metrics.params_max_tokens.sum) == (2, 5)
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
    assert metrics.inference_s.sum == pytest.approx(6)
    assert metrics.e2e_s.sum == pytest.approx(11)


def test_a_first_token_is_counted_when_it_comes_and_once_whatever_the_choices():
    driver = Driver()
    driver.submit("a", n=3, max_tokens=5)
    driver.tick(3)
    assert driver.scheduler.metrics.ttft_s.count == 1
    driver.run()
    assert driver.scheduler.metrics.ttft_s.count == 1


def test_the_decode_gap_of_a_tick_is_the_wait_of_whoever_waited_longest():
    driver = Driver(prefill_chunk=8)
    gap = driver.scheduler.metrics.decode_gap_s
    driver.submit("a", prompt=b"1234", max_tokens=9)
    driver.tick(2)  # its prefill, which samples too, and a decode: one second later
    assert (gap.count, gap.sum) == (1, pytest.approx(1))
    driver.submit("b", prompt=b"1234567812345678", max_tokens=2)  # its two chunks take turns with decode ticks
    driver.run()
    assert gap.sum == driver.t - 1  # the first choice ran to the end and never waited unseen
    assert gap.counts[TICK_BUCKETS_S.index(2.5)] == 2
    assert gap.count < driver.scheduler.metrics.itl_s.count


def test_the_time_of_a_forward_counts_under_its_kind():
    metrics = Metrics(max_len=64)
    for kind, seconds in (("prefill", 2.0), ("decode", 0.5), ("prefill", 3.0)):
        metrics.on_scheduled(kind, num_tokens=1, num_busy=1)
        metrics.on_forward(seconds)
    assert (metrics.ticks["prefill"].seconds.sum, metrics.ticks["decode"].seconds.sum) == (5.0, 0.5)


def test_busy_slots_are_summed_over_ticks_and_the_longest_choice_is_kept():
    driver = Driver(n_slots=2, prefill_chunk=64)
    driver.submit("a", prompt=b"1234", max_tokens=3)
    driver.run()  # one prefill, two decodes
    assert driver.scheduler.metrics.busy_slots == 3
    driver.submit("b", prompt=b"12", max_tokens=1)
    driver.run()
    assert driver.scheduler.metrics.busy_slots == 4
    assert driver.scheduler.metrics.longest == 4 + 2  # the last token was sampled, not computed


def test_counts_of_tokens_have_vllms_bounds_up_to_the_context():
    assert token_count_buckets(4096) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert token_count_buckets(50) == (1, 2, 5, 10, 20, 50)


def test_of_a_prompt_that_was_not_finished_only_what_was_computed_counts():
    driver = Driver(n_slots=1, prefill_chunk=4)
    driver.submit("running", prompt=b"12345678", max_tokens=2)
    driver.submit("waiting", prompt=b"12345678", max_tokens=2)
    driver.tick()
    driver.abort("running")
    driver.abort("waiting")
    assert [driver.finished(name).usage.prompt_tokens for name in ("running", "waiting")] == [4, 0]
    assert driver.scheduler.metrics.prompt_tokens == 4


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
