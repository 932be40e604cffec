"""TLS, and keys and certificates that change while the server runs."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess

import aiohttp
import pytest
import structlog

from scheduler.serve import app
from scheduler.serve.app import Server, serve
from scheduler.serve.settings import SettingError
from scheduler.serve.tls import Certificate, CertificateError
from tests.fakes import FakeBackend
from tests.live_server import parse_sse
from tests.scheduler.serve.rig import until
from tests.scheduler.serve.test_app import _load, _settings


def make_certificate(folder, name="localhost"):
    """A self-signed certificate for `name` and its key."""
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", chain],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return chain, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def trusting(certificate):
    return ssl.create_default_context(cafile=certificate[0])


def tls_settings(certificate, **fields):
    return _settings(ssl_cert=certificate[0], ssl_key=certificate[1], **fields)


async def test_http_and_the_json_socket_speak_tls(certificate, trusting):
    async with Server(tls_settings(certificate, jsonl_port=0)) as server:
        await server.start(_load())
        assert server.url == server.ready["url"] == f"https://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as session:
            body = {"prompt": "Hello", "max_tokens": 4, "stream": True}
            headers = {"Origin": server.url}
            async with session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
                assert parse_sse(await response.read()).finish_reasons() == ["length"]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.jsonl_port, ssl=trusting)
        writer.write(b'{"op":"generate","id":1,"prompt":"Hello","max_tokens":1}\n')
        assert json.loads(await reader.readline())["event"] == "started"
        writer.close()


async def test_the_unix_socket_needs_no_tls(certificate, tmp_path):
    async with Server(tls_settings(certificate, unix_socket=tmp_path / "s")) as server:
        await server.start(_load())
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(b'{"op":"generate","id":1,"prompt":"Hello","max_tokens":1}\n')
        assert json.loads(await reader.readline())["event"] == "started"
        writer.close()


async def test_who_speaks_no_tls_is_not_served_and_harms_nobody(certificate, trusting):
    async with Server(tls_settings(certificate)) as server:
        await server.start(_load())
        for data in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x00" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            writer.write_eof()
            assert b"HTTP/1.1 200" not in await reader.read()
            writer.close()
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting))
        async with session, session.get(server.url + "/health") as response:
            assert response.status == 200


async def test_a_handshake_that_does_not_come_is_not_waited_for(certificate, monkeypatch):
    monkeypatch.setattr(app, "HANDSHAKE_S", 0.1)
    async with Server(tls_settings(certificate)) as server:
        for data in (b"", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_old_protocols_are_refused(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with Server(tls_settings(certificate)) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=context)


def test_files_that_are_no_certificate_are_refused_in_one_line(certificate, tmp_path):
    chain, key = certificate
    other = make_certificate(tmp_path, "other")
    locked = tmp_path / "locked.key"
    lock = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    (tmp_path / "text").write_text("no certificate")
    for pair, reason in (
        ((tmp_path / "nowhere", key), "no such file or directory"),
        ((tmp_path, key), "is a directory|no PEM"),
        ((tmp_path / "text", key), "no PEM certificate"),
        ((chain, tmp_path / "text"), "no PEM certificate"),
        ((chain, None), "no PEM certificate"),
        ((chain, other[1]), "not that of the certificate"),
        ((chain, locked), "encrypted"),
    ):
        with pytest.raises(CertificateError, match=reason) as refusal:
            Certificate(*pair)
        assert str(pair[0]) in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_one_file_may_hold_both(certificate, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(path.read_bytes() for path in certificate))
    assert Certificate(both, None).context is not None


def test_a_key_without_a_certificate_is_refused(certificate):
    with pytest.raises(SettingError, match="--ssl-key must be with --ssl-cert"):
        _settings(ssl_key=certificate[1])


@pytest.mark.slow
async def test_a_reload_takes_new_keys_and_a_new_certificate_and_leaves_what_runs(tmp_path):
    paths = make_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    settings = tls_settings(paths, api_key_file=keys, jsonl_port=0)
    async with Server(settings) as server:
        await server.start(_load(FakeBackend(delay_s=0.01)))
        connector = aiohttp.TCPConnector(ssl=False)
        trusting = ssl.create_default_context(cafile=paths[0])
        lines, line_writer = await asyncio.open_connection("127.0.0.1", server.jsonl_port, ssl=trusting)
        line_writer.write(b'{"op":"auth","key":"old"}\n{"op":"generate","id":1,"prompt":"Hi","max_tokens":60}\n')
        assert json.loads(await lines.readline())["event"] == "started"
        async with aiohttp.ClientSession(connector=connector) as session:

            async def complete(key):
                body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(server.url + "/v1/completions", json=body, headers=headers) as response:
                    return response.status, await response.read()

            running = asyncio.create_task(complete("old"))
            await until(lambda: server.num_unfinished == 2)
            keys.write_text("new\n")
            renewed = make_certificate(tmp_path)
            server.reload()
            assert (await complete("old"))[0] == 401
            assert (await complete("new"))[0] == 200
            assert (await running)[0] == 200
        renewed_trust = ssl.create_default_context(cafile=renewed[0])
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=renewed_trust)
        writer.close()
        line_writer.write(b'{"op":"generate","id":2,"prompt":"Hi","max_tokens":1}\n')
        events = [json.loads(line) for line in (await lines.read()).splitlines() if line]
        assert events[-1]["error"]["code"] == "invalid_api_key"
        line_writer.close()


async def test_a_reload_that_fails_changes_nothing_and_says_so(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    async with Server(_settings(api_key_file=keys)) as server:
        await server.start(_load())
        keys.write_text("")
        with structlog.testing.capture_logs() as captured:
            server.reload()
        (line,) = captured
        assert line["log_level"] == "error"
        assert str(keys) in line["reason"]
        async with aiohttp.ClientSession() as session:
            for key, status in (("secret-key", 200), ("", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                async with session.get(server.url + "/v1/models", headers=headers) as response:
                    assert response.status == status


async def test_a_mistake_in_the_keys_does_not_keep_a_renewed_certificate_out(tmp_path):
    chain, key = make_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    async with Server(tls_settings((chain, key), api_key_file=keys)) as server:
        await server.start(_load())
        make_certificate(tmp_path)
        keys.write_text("")
        with structlog.testing.capture_logs() as captured:
            server.reload()
        assert [(line["log_level"], line["what"]) for line in captured] == [("error", "keys"), ("info", "certificate")]
        presented = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))
        assert presented == chain.read_text()


async def test_a_reload_waits_for_no_pipe(tmp_path):
    chain, key = make_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("secret-key\n")
    async with Server(tls_settings((chain, key), api_key_file=keys)) as server:
        for path in (keys, chain):
            path.unlink()
            os.mkfifo(path)
        with structlog.testing.capture_logs() as captured:
            server.reload()
        assert all("a pipe" in line["reason"] for line in captured)
        assert [line["what"] for line in captured] == ["keys", "certificate"]


async def test_sighup_reads_the_keys_again(tmp_path, capfd):
    keys = tmp_path / "keys"
    keys.write_text("old\n")

    async def change_keys_when_ready():
        while not (line := capfd.readouterr().out):  # noqa: ASYNC110 - stdout wakes nobody
            await asyncio.sleep(0.01)
        url = json.loads(line.splitlines()[0])["url"] + "/v1/models"
        async with aiohttp.ClientSession() as session:
            keys.write_text("new\n")
            os.kill(os.getpid(), signal.SIGHUP)
            status = 401
            while status == 401:
                async with session.get(url, headers={"x-api-key": "new"}) as response:
                    status = response.status
        os.kill(os.getpid(), signal.SIGTERM)
        return status

    stopping = asyncio.create_task(change_keys_when_ready())
    assert await serve(_settings(api_key_file=keys), _load()) == 0
    assert await stopping == 200


async def test_keys_are_never_logged():
    with structlog.testing.capture_logs() as captured:
        async with Server(_settings(host="0.0.0.0", api_key=("secret-1",), cors_origin=("*",))) as server:
            await server.start(_load())
            async with aiohttp.ClientSession() as session:
                for key in ("secret-1", "secret-2"):
                    body = {"prompt": "Hello", "max_tokens": 1}
                    async with session.post(server.url + "/v1/completions", json=body, headers={"x-api-key": key}) as r:
                        assert r.status in {200, 401}
    assert captured
    assert "secret" not in repr(captured)


async def test_a_server_open_to_every_page_warns():
    with structlog.testing.capture_logs() as captured:
        for fields in ({"cors_origin": ("*",)}, {"cors_origin": ("*",), "api_key": ("k",)}, {"cors_origin": ("null",)}):
            async with Server(_settings(**fields)):
                pass
    (warning,) = captured
    assert "web page" in warning["event"]
