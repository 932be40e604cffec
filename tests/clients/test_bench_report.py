import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.bench_report import Trace, percentile, summarize

# 100 ms to the first token, then gaps of 20 and 40 ms; and one request of a single token.
LONG = Trace(t_start=10.0, t_pieces=(10.1, 10.12, 10.16), num_prompt=7, num_output=4)
SHORT = Trace(t_start=10.0, t_pieces=(10.3,), num_prompt=5, num_output=1)
FAILED = Trace(t_start=10.0, t_pieces=(10.2,), num_prompt=9, num_output=9, error="refused")


def test_a_trace_measures_what_its_client_saw():
    assert LONG.ttft_s == pytest.approx(0.1)
    assert LONG.itls_s == pytest.approx([0.02, 0.04])
    assert LONG.e2el_s == pytest.approx(0.16)
    assert LONG.tpot_s == pytest.approx(0.06 / 3)
    assert SHORT.tpot_s is None


def test_failed_requests_are_counted_and_nothing_else_of_them():
    summary = summarize([LONG, FAILED, SHORT], duration_s=2.0, max_concurrency=3)
    assert (summary.completed, summary.failed) == (2, 1)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (12, 5)
    assert (summary.request_throughput, summary.output_throughput, summary.total_token_throughput) == (1.0, 2.5, 8.5)
    assert summary.latencies["ttft"]["mean"] == pytest.approx(200)
    assert summary.latencies["ttft"]["median"] == pytest.approx(200)
    assert summary.latencies["tpot"]["p99"] == pytest.approx(20)
    assert summary.latencies["itl"]["mean"] == pytest.approx(30)


def test_if_all_failed_there_are_no_latencies_rather_than_zeros():
    summary = summarize([FAILED], duration_s=1.0, max_concurrency=1)
    assert summary.latencies == {}
    assert "TTFT" not in summary.to_text()


def test_the_saved_result_is_flat_and_named_as_in_vllm():
    flat = summarize([LONG], duration_s=2.0, max_concurrency=1).to_json()
    assert flat["mean_ttft_ms"] == pytest.approx(100)
    assert flat["p99_e2el_ms"] == pytest.approx(160)
    assert {"duration", "completed", "request_throughput", "output_throughput", "median_itl_ms"} <= set(flat)
    assert all(isinstance(value, int | float) for value in flat.values())


def test_the_table_has_the_layout_of_vllm():
    assert [line.rstrip() for line in summarize([LONG], duration_s=2.0, max_concurrency=8).to_text().splitlines()] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1",
        "Failed requests:                         0",
        "Maximum request concurrency:             8",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      7",
        "Total generated tokens:                  4",
        "Request throughput (req/s):              0.50",
        "Output token throughput (tok/s):         2.00",
        "Total token throughput (tok/s):          5.50",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          100.00",
        "Median TTFT (ms):                        100.00",
        "P99 TTFT (ms):                           100.00",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          20.00",
        "Median TPOT (ms):                        20.00",
        "P99 TPOT (ms):                           20.00",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           30.00",
        "Median ITL (ms):                         30.00",
        "P99 ITL (ms):                            39.80",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          160.00",
        "Median E2EL (ms):                        160.00",
        "P99 E2EL (ms):                           160.00",
        "==================================================",
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 99, 100]))
@settings(max_examples=200, deadline=None)
def test_percentiles_are_those_of_numpy(values, percent):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)
