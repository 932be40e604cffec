"""A client that goes away, whenever and however, leaves a free slot and nothing else."""

import asyncio
import json

import pytest

from tests.fakes import FakeBackend
from tests.scheduler.serve.rig import http_post, reset, until

ENDLESS = {"prompt": "Once upon a time", "ignore_eos": True}


def hang_up(writer):
    writer.close()


def half_close(writer):
    writer.write_eof()


WAYS = [hang_up, half_close, reset]


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["one", ["several", "prompts"]])
async def test_a_client_that_leaves_while_decoding_frees_its_slots(serve, leave, stream, prompts):
    server = await serve(FakeBackend(delay_s=0.005))
    _, writer = await server.open("/v1/completions", {**ENDLESS, "prompt": prompts, "stream": stream, "n": 2})
    await until(lambda: server.engine.metrics.generation_tokens > 6)
    leave(writer)
    await server.idle()
    assert server.engine.metrics.generation_tokens < 200
    writer.transport.abort()


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_prefilling_frees_its_slot(serve, leave, stream):
    backend = FakeBackend(delay_s=0.02)
    server = await serve(backend)
    _, writer = await server.open("/v1/completions", {"prompt": "x" * 250, "stream": stream})
    await until(lambda: any(view.state == "prefilling" and view.num_computed for view in server.engine.slots()))
    leave(writer)
    await server.idle()
    assert server.engine.metrics.generation_tokens == 0
    writer.transport.abort()


@pytest.mark.slow
@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_waiting_is_forgotten(serve, leave, stream):
    server = await serve(FakeBackend(delay_s=0.005), n_slots=1)
    running = asyncio.create_task(server.complete(**ENDLESS, max_tokens=60))
    await until(lambda: server.engine.num_running == 1)
    _, writer = await server.open("/v1/completions", {**ENDLESS, "stream": stream})
    await until(lambda: server.engine.num_waiting == 1)
    leave(writer)
    await until(lambda: server.engine.num_waiting == 0)
    assert not running.done()
    assert (await running).json["usage"]["completion_tokens"] == 60
    writer.transport.abort()


@pytest.mark.parametrize("leave", [hang_up, reset])
async def test_a_client_that_leaves_before_its_body_is_whole_starts_nothing(server, leave):
    raw = http_post("/v1/completions", json.dumps(ENDLESS).encode())
    for cut in (10, len(raw) // 2, len(raw) - 1):
        _, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(raw[:cut])
        await asyncio.sleep(0.01)
        leave(writer)
    assert (await server.get("/health")).status == 200
    assert server.engine.metrics.num_requests == 0


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_starts_nothing(server, monkeypatch):
    entered, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*_args, **_kwargs):
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return [72]

    monkeypatch.setattr(server.service.tokenizer, "encode", slow)
    _, writer = await server.open("/v1/completions", ENDLESS)
    await entered.wait()
    reset(writer)
    await asyncio.sleep(0.05)
    release.set()
    await asyncio.sleep(0.05)
    assert server.engine.metrics.num_requests == 0


@pytest.mark.slow
async def test_31_hundreds_of_broken_streams_leave_no_task_behind(serve):
    server = await serve(FakeBackend(delay_s=0.001), n_slots=4)
    reference = (await server.complete("Hi", temperature=0, max_tokens=8)).json["choices"][0]["text"]
    before = len(asyncio.all_tasks())
    for round_number in range(20):
        opened = [await server.open("/v1/completions", {**ENDLESS, "stream": True}) for _ in range(6)]
        for reader, _ in opened[: round_number % 7]:
            await reader.readuntil(b"data: ")
        for _, writer in opened:
            reset(writer)
        await server.idle()
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert (await server.complete("Hi", temperature=0, max_tokens=8)).json["choices"][0]["text"] == reference
