"""Who may call: keys, origins, hosts."""

import pytest

from tests.scheduler.serve.rig import chat_body, http_post, reply_of

CHAT = "/v1/chat/completions"
APP = "http://app.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture
async def keyed(serve):
    return await serve(api_key=("s\u00e9cret", "other"), cors_origin=(APP,))


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer other"}, {"Authorization": "bearer  other "}, {"x-api-key": "other"},
     {"Authorization": "Bearer s\u00e9cret"}],
)  # fmt: skip
async def test_any_of_the_keys_opens_the_door(keyed, headers):
    assert (await keyed.post(CHAT, chat_body(max_tokens=1), headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "}, {"Authorization": "Bearer othe"},
     {"Authorization": "Basic other"}, {"Authorization": "other"}, {"x-api-key": "OTHER"}, {"x-api-key": ""},
     {"Authorization": "Bearer \udcff"}],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/v1/nope"])
async def test_41_without_a_key_nothing_is_told_but_that_one_is_needed(keyed, path, headers):
    reply = await keyed.post(path, chat_body(), {"Origin": APP, **headers})
    error = reply.refused(401)
    assert error["code"] == "invalid_api_key"
    assert "other" not in error["message"]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["access-control-allow-origin"] == APP


async def test_41_health_needs_no_key_and_everything_that_tells_does(keyed):
    assert (await keyed.get("/health")).status == 200
    assert (await keyed.get("/ping")).status == 200
    for path in ("/v1/models", "/slots", "/metrics", "/docs", "/openapi.json"):
        (await keyed.get(path)).refused(401)


async def test_41_a_browser_may_ask_first_without_a_key(keyed):
    reply = await keyed.request("OPTIONS", CHAT, headers={"Origin": APP, **ASK})
    assert reply.status == 204
    assert reply.body == b""
    assert reply.headers["access-control-allow-origin"] == APP
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"].lower()
    assert reply.headers["vary"] == "Origin"


async def test_an_allowed_page_reads_answers_streams_and_errors(keyed):
    headers = {"Origin": APP, "Authorization": "Bearer other"}
    for body in (chat_body(max_tokens=1), chat_body(max_tokens=1, stream=True), chat_body(n=0)):
        assert (await keyed.post(CHAT, body, headers)).headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://app.example", APP + ".evil.example", ""])
async def test_a_foreign_page_is_refused_key_or_no_key(keyed, origin):
    headers = {"Origin": origin, "Authorization": "Bearer other"}
    reply = await keyed.post(CHAT, chat_body(), headers)
    reply.refused(403)
    assert "access-control-allow-origin" not in reply.headers
    (await keyed.request("OPTIONS", CHAT, headers={**headers, **ASK})).refused(403)
    (await keyed.get("/health", Origin=origin)).refused(403)


async def test_without_cors_only_the_servers_own_pages_may_call(server):
    own = f"http://{server.host}:{server.port}"
    assert (await server.post(CHAT, chat_body(max_tokens=1), {"Origin": own})).status == 200
    (await server.post(CHAT, chat_body(), {"Origin": APP})).refused(403)
    (await server.post(CHAT, chat_body(), {"Origin": f"http://{server.host}:1"})).refused(403)


@pytest.mark.parametrize(
    "origin", ["HTTP://APP.example", "http://app.example:80", "http://App.Example:80"]
)  # fmt: skip
async def test_an_origin_is_the_same_however_it_is_written(serve, origin):
    for configured, presented in ((origin, APP), (APP, origin)):
        server = await serve(cors_origin=(configured,))
        reply = await server.post(CHAT, chat_body(max_tokens=1), {"Origin": presented})
        assert reply.headers["access-control-allow-origin"] == presented


@pytest.mark.parametrize(
    "origin",
    [f"{APP}:8080", f"{APP}/", f"{APP}@evil.example", f"http://evil.example@{APP[7:]}", f"{APP}.", f"http://x.{APP[7:]}",
     f"{APP} http://evil.example", f"{APP}, http://evil.example", f"{APP}#", "file://", "http://[::1]", "*", "https://app.example:80"],
)  # fmt: skip
async def test_what_only_looks_like_an_allowed_origin_is_refused(keyed, origin):
    reply = await keyed.post(CHAT, chat_body(), {"Origin": origin, "Authorization": "Bearer other"})
    reply.refused(403)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("lines", [(APP, "http://evil.example"), ("http://evil.example", APP), ("null", APP)])
async def test_of_several_origins_none_may_be_foreign(keyed, lines):
    headers = [f"Origin: {origin}" for origin in lines]
    raw = await keyed.raw(http_post(CHAT, b"{}", "Authorization: Bearer other", "Connection: close", *headers))
    assert reply_of(raw).status in {400, 403}


async def test_a_star_lets_every_page_in(serve):
    server = await serve(cors_origin=("*",))
    for origin in (APP, "null"):
        reply = await server.post(CHAT, chat_body(max_tokens=1), {"Origin": origin})
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:9", "127.0.0.1", "[::1]:8000", "[::1]", "[fe80::1%25eth0]:1",
     "10.0.0.1", "host.docker.internal", "a.localhost", "a.LOCALHOST.:80"],
)  # fmt: skip
async def test_a_local_server_answers_to_local_names(server, host):
    assert (await server.get("/health", Host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
     "evil.example.", "EVIL.example", "evillocalhost",
     "evil.example#localhost", "evil.example/localhost", "localhost@evil.example",
     "localhost:80@evil.example", "evil.example@localhost",
     "evil.example\\@localhost", "localhost:evil.example", "[evil.example]:80"],
)  # fmt: skip
async def test_a_rebound_domain_does_not_reach_a_local_server(server, host):
    (await server.get("/v1/models", Host=host)).refused(403)
    reply = await server.post(CHAT, chat_body(), {"Host": host, "Origin": f"http://{host}"})
    reply.refused(403)


@pytest.mark.parametrize("host", ["[", "a b", "\u00e9", ":", "[::1"])
async def test_a_host_that_is_none_is_refused(server, host):
    assert (await server.get("/health", Host=host)).status in {400, 403}


async def test_a_public_server_answers_to_any_name(serve):
    server = await serve(host="0.0.0.0")
    assert (await server.get("/health", Host="llm.example")).status == 200


@pytest.mark.parametrize(
    "target", ["http://evil.example/v1/models", "http://evil.example:80/v1/models", "//evil.example/v1/models"]
)
async def test_a_request_as_to_a_proxy_is_not_served_under_a_foreign_name(server, target):
    raw = await server.raw(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert reply_of(raw).status in {403, 404}
    own = target.replace("evil.example", "localhost", 1)
    raw = await server.raw(f"GET {own} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode())
    assert reply_of(raw).status == 403


async def test_of_two_hosts_none_may_be_foreign(server):
    for hosts in (("localhost", "evil.example"), ("evil.example", "localhost")):
        lines = "".join(f"Host: {host}\r\n" for host in hosts)
        raw = await server.raw(f"GET /v1/models HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())
        assert reply_of(raw).status in {400, 403}


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_a_foreign_page_opens_no_web_socket(server, origin):
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MTIzNA=="
    head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n{upgrade}\r\n\r\n"
    (await server.first_reply(head.encode())).refused(403)


async def test_either_header_with_a_valid_key_is_enough(keyed):
    headers = {"Authorization": "Bearer unused", "x-api-key": "other"}
    assert (await keyed.get("/v1/models", **headers)).status == 200


async def test_metrics_alone_can_be_opened(serve):
    server = await serve(api_key=("k",), open_metrics=True)
    assert (await server.get("/metrics")).status == 200
    for path in ("/v1/models", "/slots"):
        (await server.get(path)).refused(401)


async def test_keys_come_from_the_file_too(serve, tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  filed  \n")
    server = await serve(api_key=("given",), api_key_file=path)
    for key in ("given", "filed"):
        assert (await server.get("/v1/models", Authorization=f"Bearer {key}")).status == 200
    for key in ("# ours", "ours", ""):
        (await server.get("/v1/models", Authorization=f"Bearer {key}")).refused(401)
