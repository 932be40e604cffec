import os
from pathlib import Path

import pytest

from engine.errors import LockstepError
from scheduler.serve.settings import ServeSettings, SettingError

MODEL = Path("models/tiny.Q4_1.gguf")


def test_the_defaults_listen_on_loopback_only_with_sixteen_slots():
    settings = ServeSettings(model=MODEL)
    assert (settings.host, settings.port, settings.is_public) == ("127.0.0.1", 8000, False)
    assert (settings.slots, settings.context, settings.kv_dtype, settings.prefill_chunk) == (16, None, "float16", 256)
    assert (settings.jsonl_port, settings.unix_socket, settings.api_key) == (None, None, ())


@pytest.mark.parametrize(
    ("option", "value", "limit"),
    [
        ("slots", 0, ">= 1"),
        ("threads", 0, r"in \[1, 256\]"),
        ("threads", 257, r"in \[1, 256\]"),
        ("prefill_chunk", -1, ">= 1"),
        ("context", 1, ">= 2"),
        ("max_queue", -1, ">= 0"),
        ("max_queue_tokens", -1, ">= 0"),
        ("port", 65536, r"in \[0, 65535\]"),
        ("port", -1, r"in \[0, 65535\]"),
        ("jsonl_port", 70000, r"in \[0, 65535\]"),
        ("jsonl_port", 8000, "another port than --port"),
        ("kv_dtype", "int4", "one of float16, float32"),
        ("kernels", "gpu", "one of auto, reference, compiled"),
        ("log_format", "xml", "one of console, json"),
        ("grace", -1.0, "finite number of seconds >= 0"),
        ("sse_ping", float("nan"), "finite number of seconds >= 0"),
        ("request_timeout", 0.0, "finite number of seconds > 0"),
        ("request_timeout", float("inf"), "finite number of seconds > 0"),
        ("write_timeout", 0.0, "finite number of seconds > 0"),
        ("max_body", 0, ">= 1"),
        ("max_connections", 0, ">= 1"),
        ("cors_origin", ("https://app.example/",), "an origin such as"),
        ("cors_origin", ("app.example",), "an origin such as"),
        ("cors_origin", ("https://user@app.example",), "an origin such as"),
        ("ssl_key", Path("key.pem"), "with --ssl-cert"),
        ("host", "", "an address or a host name"),
        ("unix_socket", Path("/tmp") / ("x" * 200), "1 to 107 bytes"),
    ],
)
def test_a_refused_option_is_named_with_its_value_and_its_limit(option, value, limit):
    with pytest.raises(SettingError, match=limit) as refused:
        ServeSettings(model=MODEL, **{option: value})
    assert isinstance(refused.value, LockstepError)
    assert f"--{option.replace('_', '-')} " in str(refused.value)
    shown = value[0] if isinstance(value, tuple) else value
    assert repr(str(shown) if isinstance(shown, Path) else shown) in str(refused.value)


@pytest.mark.parametrize("option", ["api_key", "served_model_name", "cors_origin"])
def test_an_empty_name_key_or_origin_is_refused_without_showing_the_others(option):
    with pytest.raises(SettingError) as refused:
        ServeSettings(model=MODEL, **{option: ("secret", "")})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("key", ["two words", " secret", "secret\n", "\t"])
def test_a_key_with_a_space_could_never_be_presented_and_is_refused_unseen(key):
    with pytest.raises(SettingError, match="without spaces") as refused:
        ServeSettings(model=MODEL, api_key=(key,))
    assert key not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("origin", ["*", "null", "https://app.example", "http://[::1]:3000", "tauri://localhost"])
def test_origins_are_what_browsers_send(origin):
    assert ServeSettings(model=MODEL, cors_origin=(origin,)).cors_origin == (origin,)


def test_the_model_is_named_after_its_file_unless_told_otherwise():
    assert ServeSettings(model=MODEL).model_name == "tiny.Q4_1"
    named = ServeSettings(model=MODEL, served_model_name=("small", "tiny", "small"))
    assert (named.model_name, named.model_names) == ("small", ("small", "tiny"))
    assert not named.accepts_any_model_name


def test_a_star_accepts_any_model_name_but_is_never_reported():
    settings = ServeSettings(model=MODEL, served_model_name=("*",))
    assert settings.accepts_any_model_name
    assert settings.model_names == ("tiny.Q4_1",)


@pytest.mark.parametrize(
    ("host", "public"),
    [
        ("127.0.0.1", False),
        ("127.0.0.53", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
    ],
)
def test_only_loopback_hosts_are_private(host, public):
    assert ServeSettings(model=MODEL, host=host).is_public is public


@pytest.mark.parametrize("port", [0, 1, 65535])
def test_every_port_is_accepted_zero_being_any(port):
    assert ServeSettings(model=MODEL, port=port).port == port
    assert ServeSettings(model=MODEL, port=0, jsonl_port=0).jsonl_port == 0


def test_a_name_that_is_not_utf_8_is_refused_and_a_files_is_shown_with_a_mark():
    wrong = os.fsdecode(b"b\xffd")
    with pytest.raises(SettingError, match="--served-model-name must be UTF-8"):
        ServeSettings(model=MODEL, served_model_name=("right", wrong))
    named_after_file = ServeSettings(model=Path(f"{wrong}.gguf"))
    assert (named_after_file.model_name, named_after_file.file_name) == ("b\ufffdd", "b\ufffdd.gguf")
    assert named_after_file.model_names == ("b\ufffdd",)
    with pytest.raises(SettingError, match="1 to 107 bytes"):
        ServeSettings(model=MODEL, unix_socket=Path(wrong * 50))
