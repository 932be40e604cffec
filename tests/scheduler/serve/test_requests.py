"""GET and DELETE /v1/requests/{id}, priorities, and what a full queue says."""

import asyncio

import pytest

from tests.fakes import FakeBackend
from tests.live_server import parse_sse
from tests.scheduler.serve.rig import until


@pytest.fixture
async def server(serve):
    return await serve(FakeBackend(delay_s=0.005), n_slots=1, max_len=20_000)  # a call lasts until it is ended


@pytest.fixture
async def busy(server):
    """The server, its one slot taken by a call named "first"."""
    first = asyncio.create_task(server.complete(request_id="first", n=2))
    await until(lambda: server.engine.num_running == 1)
    yield server
    await server.request("DELETE", "/v1/requests/first")
    await first


def state(server, call_id):
    return server.get(f"/v1/requests/{call_id}")


async def test_a_request_is_found_by_its_own_id_and_by_the_name_its_client_chose(busy):
    by_name, by_id = [(await state(busy, call_id)).json for call_id in ("first", "cmpl-first")]
    assert (by_name["id"], by_id["id"]) == ("first", "cmpl-first")
    assert by_id["state"] in {"prefilling", "decoding"}
    assert (by_id["position"], by_id["waits_for"], by_id["prompt_tokens"], by_id["choices"]) == (None, None, 5, 2)
    await until(lambda: busy.engine.slots()[0].num_output >= 2)
    after = (await state(busy, "first")).json
    assert (after["state"], after["computed_prompt_tokens"]) == ("decoding", 5)
    assert after["completion_tokens"] >= 2


@pytest.mark.parametrize("unknown", ["firs", "cmpl-firs", "first-0", "cmpl", "x", "%E2%82%AC"])
async def test_only_a_whole_id_is_an_id(busy, unknown):
    assert (await state(busy, unknown)).refused(404, "id")["code"] == "request_not_found"
    assert (await busy.request("DELETE", f"/v1/requests/{unknown}")).json["aborted"] is False
    assert (await state(busy, "first")).status == 200


async def test_who_waits_is_told_its_place_and_priority_moves_it(busy, monkeypatch):
    calls, ended = [], []
    monkeypatch.setattr(busy.engine, "_on_finished", lambda finished: ended.append(finished.request_id))
    for count, (name, priority) in enumerate((("later", 5), ("a", 0), ("b", 0), ("sooner", -1)), 2):
        calls.append(asyncio.create_task(busy.complete(request_id=name, priority=priority, max_tokens=1)))
        await until(lambda count=count: busy.engine.num_unfinished == count)
    places = [(await state(busy, name)).json for name in ("sooner", "a", "b", "later")]
    assert [place["position"] for place in places] == [1, 2, 3, 4]
    assert {(place["state"], place["waits_for"]) for place in places} == {("queued", "slot")}
    await busy.request("DELETE", "/v1/requests/first")
    await asyncio.gather(*calls)
    assert ended == [f"cmpl-{name}" for name in ("first", "sooner", "a", "b", "later")]


async def test_a_batch_of_prompts_is_one_request(busy):
    batch = asyncio.create_task(busy.complete(["ab", "cde"], request_id="batch", n=2, max_tokens=2))
    await until(lambda: "batch" in busy.service.calls)
    seen = (await state(busy, "batch")).json
    assert (seen["state"], seen["position"], seen["prompt_tokens"], seen["choices"]) == ("queued", 1, 5, 4)
    assert (await busy.request("DELETE", "/v1/requests/batch")).json == {
        "id": "batch",
        "object": "request.deleted",
        "aborted": True,
    }
    assert [choice["finish_reason"] for choice in (await batch).json["choices"]] == ["abort"] * 4
    assert (await state(busy, "batch")).status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_deleting_ends_a_call_once_and_may_be_repeated(server, stream):
    call = asyncio.create_task(server.chat(request_id="mine", stream=stream))
    await until(lambda: server.engine.num_running == 1 and server.engine.slots()[0].num_output > 1)
    deleted = [(await server.request("DELETE", "/v1/requests/chatcmpl-mine")).json["aborted"] for _ in range(3)]
    assert deleted == [True, False, False]
    reply = await call
    reasons = (
        parse_sse(reply.body).finish_reasons()
        if stream
        else [choice["finish_reason"] for choice in reply.json["choices"]]
    )
    assert reasons == ["abort"]
    assert server.service.calls == {}
    assert (await state(server, "chatcmpl-mine")).status == 404


async def test_a_name_is_taken_while_its_call_runs_whatever_the_path(busy):
    (await busy.complete(request_id="first")).refused(400, "request_id")
    (await busy.chat(request_id="first")).refused(400, "request_id")
    (await busy.complete(request_id="cmpl-first")).refused(400, "request_id")
    await busy.request("DELETE", "/v1/requests/first")
    assert (await busy.chat(request_id="first", max_tokens=1)).status == 200


@pytest.mark.parametrize(("path", "name"), [("/load", "server_load"), ("/get_load", "load")])
async def test_load_counts_requests_that_are_not_finished(busy, path, name):
    assert (await busy.get(path)).json == {name: 1}
    waiting = asyncio.create_task(busy.complete(max_tokens=1))
    await until(lambda: busy.engine.num_unfinished == 2)
    assert (await busy.get(path)).json == {name: 2}
    await busy.request("DELETE", "/v1/requests/first")
    await waiting
    assert (await busy.get(path)).json == {name: 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_when_to_come_again_by_the_measured_pace(serve, monkeypatch, stream):
    server = await serve(FakeBackend(delay_s=0.002), n_slots=1, max_queue=1)
    clock = server.engine._clock
    monkeypatch.setattr(server.engine, "_clock", lambda: 1000 * clock())  # a slow machine
    await server.complete(max_tokens=5)
    names = ("running", "waiting")
    calls = []
    for count, name in enumerate(names, 1):
        calls.append(asyncio.create_task(server.complete(request_id=name)))
        await until(lambda count=count: server.engine.num_unfinished == count)
    refused = await server.complete(stream=stream)
    assert refused.refused(429)["code"] == "queue_full"
    assert 10 <= int(refused.headers["retry-after"]) < 100_000  # 5 ticks of at least 2 s, one slot
    for name in names:
        await server.request("DELETE", f"/v1/requests/{name}")
    await asyncio.gather(*calls)
