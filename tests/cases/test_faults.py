"""Faults of ours while an answer runs, by a backend that fails on purpose, and a server that is not ready yet."""

import asyncio

import pytest

from engine.batch import RowError
from tests.fakes import FakeBackend
from tests.live_server import parse_sse
from tests.scheduler.serve.rig import serve

A, B = "fails", "goes on"


def fails_on_the_fourth_token_of_a(work):
    is_a = bytes(work.sequence.request.prompt_ids) == A.encode()
    if is_a and len(work.sequence.output_ids) == 3:
        return RowError("the server failed to choose a token", ZeroDivisionError("float division by zero"))
    return None


@pytest.mark.parametrize("stream", [False, True])
async def test_35_a_fault_on_the_way_ends_its_own_request_with_an_error_and_no_other(stream):
    async with serve(FakeBackend(fault=fails_on_the_fourth_token_of_a, delay_s=0.005)) as server:
        alone = (await server.complete(B, max_tokens=12, temperature=0)).json["choices"][0]["text"]
        failed, other = await asyncio.gather(
            server.complete(A, max_tokens=12, temperature=0, stream=stream),
            server.complete(B, max_tokens=12, temperature=0),
        )
        assert other.json["choices"][0]["text"] == alone
        if stream:
            assert failed.status == 200
            events = parse_sse(failed.body).chunks
            assert [event for event in events if "error" in event] == events[-1:]
            assert len(events) > 1
        else:
            failed.refused(500)
        assert b"ZeroDivision" not in failed.body
        assert b"division" not in failed.body
        await server.idle()


async def test_43_health_is_503_while_the_model_loads():
    async with serve(loading=True) as server:
        (await server.get("/health")).refused(503)
        (await server.complete("Hi")).refused(503)
