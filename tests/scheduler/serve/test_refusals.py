"""Whatever is refused leaves one line in the log, whichever way it came, and none of the client's words in it."""

import asyncio

import pytest
from structlog.testing import capture_logs

from scheduler.serve.jsonl.server import JsonlServer
from scheduler.serve.keys import ApiKeys
from scheduler.serve.settings import ServeSettings
from tests.scheduler.serve.rig import until

KEY = "sk-0123456789"


def refusals(logged):
    lines = [line for line in logged if line["event"] == "refused"]
    return [(line["status"], line["code"], line["path"], line["param"]) for line in lines]


async def test_a_field_that_is_wrong(server):
    with capture_logs() as logged:
        await server.chat("secret", temperature=-1)
    assert refusals(logged) == [(400, None, "/v1/chat/completions", "temperature")]
    assert "secret" not in str(logged)


async def test_a_name_of_the_clients_own_is_not_told(server):
    with capture_logs() as logged:
        await server.get("/v1/models/secret")
        await server.post("/v1/completions", b'{"secret words": NaN}')
    assert refusals(logged) == [
        (404, "model_not_found", "/v1/models/{name}", "model"),
        (400, None, "/v1/completions", None),
    ]


async def test_a_path_that_is_not_there_cannot_write_to_the_terminal_nor_without_end(server):
    with capture_logs() as logged:
        await server.raw(
            b"GET /%1b[2J" + b"a" * 500 + b"?secret HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
    ((status, _, path, _),) = refusals(logged)
    assert status == 404
    assert path.startswith("/%1B%5B2Jaaa")
    assert len(path) <= 128


async def test_a_call_without_a_key(serve):
    server = await serve(api_key=KEY)
    with capture_logs() as logged:
        await server.request("POST", "/v1/completions", b"{}", {"Authorization": f"Bearer {KEY}-almost"})
    assert refusals(logged) == [(401, "invalid_api_key", "/v1/completions", None)]
    assert KEY not in str(logged)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x00\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: a miracle\r\nConnection: close\r\n\r\n", 417),
    ],
)
async def test_bytes_refused_before_any_handler(server, sent, status):
    with capture_logs() as logged:
        await server.raw(sent)
    assert [status for status, *_ in refusals(logged)] == [status]


async def test_a_connection_too_many(serve):
    server = await serve(max_connections=1)
    _, writer = await asyncio.open_connection(server.host, server.port)
    await until(lambda: server.connections == 1)
    with capture_logs() as logged:
        await server.raw(b"")
    writer.close()
    assert refusals(logged) == [(503, "unavailable", None, None)]


async def test_what_is_answered_leaves_none(server):
    with capture_logs() as logged:
        await server.complete(max_tokens=1)
    assert refusals(logged) == []


async def test_a_line_on_the_json_socket(server, tmp_path):
    jsonl = JsonlServer(server.service, ServeSettings(model=tmp_path / "fake.gguf"), ApiKeys())
    listening = await asyncio.start_server(jsonl, server.host, 0)
    port = listening.sockets[0].getsockname()[1]
    with capture_logs() as logged:
        _, writer = await asyncio.open_connection(server.host, port)
        writer.write(b'{"op": "generate", "id": 1, "prompt": "secret", "top_p": 7}\n')
        await until(lambda: refusals(logged) != [])
        writer.close()
    assert refusals(logged) == [(400, None, "json-socket", "top_p")]
    assert "secret" not in str(logged)
    await jsonl.close(1)
    listening.close()
    await listening.wait_closed()
