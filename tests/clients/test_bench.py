import asyncio
import json

import pytest

from clients.api import LockstepClient
from clients.bench import closed_loop, measure, poll_health, run
from clients.errors import ClientError
from clients.workload import Workload

LOAD = Workload(num_prompts=12, input_len=5, output_len=3, low_id=1, high_id=9)


async def test_a_trace_holds_one_instant_per_piece_and_the_servers_own_counts(canned):
    ticks = iter(range(100))
    async with LockstepClient(canned.url) as client:
        trace = await measure(client, [1, 2], model="canned", output_len=3, clock=lambda: float(next(ticks)))
    assert (trace.t_start, trace.t_pieces) == (0.0, (1.0, 2.0, 3.0))
    assert (trace.num_prompt, trace.num_output, trace.error) == (5, 3, None)
    asked = canned.bodies[0]
    assert (asked["prompt"], asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == ([1, 2], 3, True, 0)


async def test_chunks_without_text_are_no_tokens(canned):
    canned.pieces = ["", "a", "", "b"]
    async with LockstepClient(canned.url) as client:
        trace = await measure(client, [1], model="canned", output_len=4)
    assert len(trace.t_pieces) == 2


async def test_an_answer_without_any_text_is_a_failure(canned):
    canned.pieces = [""]
    async with LockstepClient(canned.url) as client:
        trace = await measure(client, [1], model="canned", output_len=1)
    assert trace.error == "no text came"


async def test_a_closed_loop_keeps_all_its_clients_busy_and_no_more(canned):
    done = []
    async with LockstepClient(canned.url) as client:
        traces = await closed_loop(client, LOAD, model="canned", num_clients=4, advance=done.append)
    assert canned.most_running == 4
    assert len(traces) == 12
    assert sum(done) == 12
    assert sorted(body["prompt"] for body in canned.bodies) == sorted(LOAD.prompts())


async def test_refused_requests_are_counted_named_and_saved(canned, capsys):
    canned.refuse_from = 8
    result = await run(canned.url, None, None, LOAD, num_clients=1, num_warmups=1)
    output = capsys.readouterr()
    assert (result["completed"], result["failed"], result["model_id"]) == (7, 5, "canned")
    assert "Failed requests:                         5" in output.out
    assert "5 failed: n must be >= 1, got 0" in output.err
    json.dumps(result, allow_nan=False)


async def test_a_warm_up_that_fails_ends_the_benchmark_at_once(canned):
    canned.refuse_from = 0
    with pytest.raises(ClientError, match="warm-up failed: n must be >= 1"):
        await run(canned.url, None, "canned", LOAD, num_clients=1, num_warmups=1)
    assert len(canned.bodies) == 1


async def test_no_more_are_said_to_be_at_once_than_there_are(canned, capsys):
    await run(canned.url, None, "canned", LOAD, num_clients=100, num_warmups=0)
    assert "12 requests, 12 at a time" in capsys.readouterr().err


async def test_health_is_asked_while_the_load_runs_and_shown_beside_it(canned, capsys):
    result = await run(canned.url, None, "canned", LOAD, num_clients=1, num_warmups=0, polls_health=True)
    assert result["p99_health_ms"] >= result["median_health_ms"] > 0
    assert "Answer to GET /health" in capsys.readouterr().out
    quiet = await run(canned.url, None, "canned", LOAD, num_clients=1, num_warmups=0)
    assert "p99_health_ms" not in quiet


async def test_a_server_that_is_gone_ends_no_polling_and_has_no_latency(unused_tcp_port):
    latencies_s = []
    async with LockstepClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(poll_health(client, latencies_s), timeout=0.2)
    assert latencies_s == []
