"""Every option of `lockstep serve`, validated once.

Where a value comes from (flag, environment variable, TOML file, default) is the command's business; here is what it
means and what it may be.
"""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from engine.errors import LockstepError
from scheduler.defaults import PREFILL_CHUNK, SLOTS

KVDtype = Literal["float16", "float32"]
Kernels = Literal["auto", "reference", "compiled"]
Weights = Literal["auto", "f32"]
LogFormat = Literal["console", "json"]

ANY_MODEL_NAME = "*"
ANY_ORIGIN = "*"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
MAX_THREADS = 256
"""More than any machine this is made for has cores. Thousands would take longer to start than anyone waits."""
MAX_UNIX_PATH = 107
"""Bytes of a Unix socket's path: Linux's sockaddr_un.sun_path without its closing zero."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.ASCII | re.IGNORECASE)


class SettingError(LockstepError, ValueError):
    """An option outside its range. `option` is the field's name, `value` what was given."""

    def __init__(self, option: str, value: object, limit: str) -> None:
        self.option = option
        self.value = value
        super().__init__(f"--{option.replace('_', '-')} must be {limit}, got {value!r}")


def _about(description: str) -> msgspec.Meta:
    return msgspec.Meta(description=description)


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is started with. Raises `SettingError` naming the option, the value and the limit."""

    model: Annotated[Path, _about("Path of the GGUF file to serve.")]
    served_model_name: Annotated[
        tuple[str, ...],
        _about("Names clients may ask for; the first is the one reported. '*' accepts any. Default: the file's stem."),
    ] = ()
    kernels: Annotated[Kernels, _about("Kernel set; auto takes the fastest that is there.")] = "auto"
    weights: Annotated[
        Weights,
        _about("Float weights (F32, F16, BF16): f32 keeps them; auto lets the compiled kernels round them to 8 bits."),
    ] = "auto"
    threads: Annotated[
        int | None, _about("Threads the compiled kernels compute with. Default: one per physical core.")
    ] = None

    slots: Annotated[int, _about("Sequences that run at once.")] = SLOTS
    context: Annotated[
        int | None, _about("Positions per slot, at most the model's own. Default: the model's, but not above 4096.")
    ] = None
    kv_dtype: Annotated[KVDtype, _about("Type of the cached keys and values.")] = "float16"
    prefill_chunk: Annotated[int, _about("Prompt tokens computed in one tick, so that running streams go on.")] = (
        PREFILL_CHUNK
    )
    max_queue: Annotated[int, _about("Requests that may wait for a slot; the next one is refused with 429.")] = 256
    max_queue_tokens: Annotated[
        int, _about("Tokens the prompts of waiting requests may have together; one above it is refused with 429.")
    ] = 262_144
    request_timeout: Annotated[
        float | None, _about("Seconds after which a request is ended, waiting included. Default: no limit.")
    ] = None

    host: Annotated[str, _about("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _about("TCP port for HTTP; 0 takes any free one.")] = 8000
    jsonl_port: Annotated[
        int | None, _about("TCP port for the JSON socket; 0 takes any free one. Default: not opened.")
    ] = None
    unix_socket: Annotated[
        Path | None, _about("Path of a Unix socket for the JSON socket's protocol. Default: not opened.")
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        _about(
            "Keys of which a client must present one; a command line can be read by other users, so rather set "
            "them by environment or file. Default: none needed."
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None, _about("File of further keys, one a line, read again on SIGHUP. Default: none.")
    ] = None
    open_metrics: Annotated[bool, _about("Let /metrics be read without a key.")] = False
    ssl_cert: Annotated[
        Path | None,
        _about(
            "PEM file of a certificate and its chain: HTTP and the JSON socket over TCP speak TLS. Default: neither."
        ),
    ] = None
    ssl_key: Annotated[Path | None, _about("PEM file of its private key. Default: in the same file.")] = None
    cors_origin: Annotated[
        tuple[str, ...], _about("Origins whose web pages may call; '*' is any. Default: only the server's own.")
    ] = ()

    sse_ping: Annotated[float, _about("Seconds of silence in a stream before a comment line is sent; 0 = never.")] = 15
    grace: Annotated[float, _about("Seconds running requests may still take after SIGTERM or SIGINT.")] = 30
    write_timeout: Annotated[float, _about("Seconds a client may leave its answer unread.")] = 60
    body_timeout: Annotated[float, _about("Seconds a request's head may take to arrive, and then its body.")] = 30
    max_body: Annotated[int, _about("Bytes of a request's body, or of a line on the JSON socket.")] = 16 * 2**20
    max_connections: Annotated[int, _about("Connections open at once; the next one is refused.")] = 1024

    log_format: Annotated[LogFormat, _about("Log lines on stderr: for people (console) or machines (json).")] = (
        "console"
    )

    @property
    def model_name(self) -> str:
        """The name reported to clients."""
        named = [name for name in self.served_model_name if name != ANY_MODEL_NAME]
        return named[0] if named else _readable(self.model.stem)

    @property
    def file_name(self) -> str:
        """The model file's name, without its folder, as text."""
        return _readable(self.model.name)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that means this model, the reported one first, without '*'."""
        return tuple(dict.fromkeys([self.model_name, *(n for n in self.served_model_name if n != ANY_MODEL_NAME)]))

    @property
    def accepts_any_model_name(self) -> bool:
        """Whether a request's model name is not looked at."""
        return ANY_MODEL_NAME in self.served_model_name

    @property
    def is_reloadable(self) -> bool:
        """Whether there are files to read again."""
        return self.api_key_file is not None or self.ssl_cert is not None

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach `host`."""
        return self.host not in LOOPBACK_HOSTS and not self.host.startswith("127.")

    def __post_init__(self) -> None:
        _check("kernels", self.kernels, self.kernels in get_args(Kernels), f"one of {', '.join(get_args(Kernels))}")
        _check("weights", self.weights, self.weights in get_args(Weights), f"one of {', '.join(get_args(Weights))}")
        _check("kv_dtype", self.kv_dtype, self.kv_dtype in get_args(KVDtype), f"one of {', '.join(get_args(KVDtype))}")
        _check(
            "log_format",
            self.log_format,
            self.log_format in get_args(LogFormat),
            f"one of {', '.join(get_args(LogFormat))}",
        )
        for name in ("slots", "prefill_chunk", "max_body", "max_connections"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        if self.threads is not None:
            _check("threads", self.threads, 1 <= self.threads <= MAX_THREADS, f"in [1, {MAX_THREADS}]")
        for name in ("max_queue", "max_queue_tokens"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, ">= 0")
        if self.context is not None:
            _check("context", self.context, self.context >= 2, ">= 2 (one token in, one out)")
        _check_port("port", self.port)
        if self.jsonl_port is not None:
            _check_port("jsonl_port", self.jsonl_port)
            same = self.jsonl_port == self.port and self.port != 0
            _check("jsonl_port", self.jsonl_port, not same, "another port than --port")
        for name in ("write_timeout", "body_timeout"):
            _check_seconds(name, getattr(self, name), zero=False)
        for name in ("sse_ping", "grace"):
            _check_seconds(name, getattr(self, name), zero=True)
        if self.request_timeout is not None:
            _check_seconds("request_timeout", self.request_timeout, zero=False)
        _check("host", self.host, bool(self.host), "an address or a host name")
        for name in ("served_model_name", "cors_origin"):
            for value in getattr(self, name):
                _check(name, value, bool(value), "not empty")
                _check(name, value, value == _readable(value), "UTF-8")
        for key in self.api_key:
            # Its value is a secret: the message shows it only where it is empty.
            _check("api_key", key and "one with a space", key.split() == [key], "not blank and without spaces")
        for origin in self.cors_origin:
            _check("cors_origin", origin, _is_origin(origin), "an origin such as https://app.example:8443, null, or *")
        _check("ssl_key", str(self.ssl_key), self.ssl_key is None or self.ssl_cert is not None, "with --ssl-cert")
        if self.unix_socket is not None:
            n_bytes = len(os.fsencode(self.unix_socket))
            limit = f"a path of 1 to {MAX_UNIX_PATH} bytes"
            _check("unix_socket", str(self.unix_socket), 0 < n_bytes <= MAX_UNIX_PATH, limit)


def _readable(text: str) -> str:
    """`text` with U+FFFD for what is not UTF-8: Python keeps such bytes of arguments and file names as surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_origin(text: str) -> bool:
    return text in {ANY_ORIGIN, "null"} or _ORIGIN.fullmatch(text) is not None


def _check(option: str, value: object, valid: bool, limit: str) -> None:
    if not valid:
        raise SettingError(option, value, limit)


def _check_port(option: str, port: int) -> None:
    _check(option, port, 0 <= port <= 65535, "in [0, 65535]")


def _check_seconds(option: str, seconds: float, *, zero: bool) -> None:
    valid = math.isfinite(seconds) and (seconds >= 0 if zero else seconds > 0)
    _check(option, seconds, valid, "a finite number of seconds " + (">= 0" if zero else "> 0"))
