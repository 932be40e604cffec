"""The process that renders: a template from a model file is a stranger's program, and here it can do little harm.

It gets a template and then chats, one at a time, over the socket that is its standard input, and ends when the server
has closed it. It may use so much memory and open no file, and no chat may take longer than it was told: then the kernel
kills it. `isolated` is the other end.
"""

import contextlib
import functools
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2.debug  # noqa: F401 - imported by Jinja at its first error, when no file can be opened any more
import msgspec

from engine.chat import ChatTemplate
from engine.errors import ParamError, TemplateError
from scheduler.serve.rendering.frames import HEADER_BYTES, Answer, Refused, Rendered, frame_length, send_frame

MEMORY_BYTES = 512 * 2**20
"""Address space, Python itself included."""
MAX_MESSAGE = 1000
"""Characters of what a template says when it refuses."""


def main(cpu_s: float) -> None:
    """Answer the server until it is gone. A chat may take `cpu_s` seconds of a processor, and so may compiling."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the server, which closes the socket when it is done
    with socket.socket(fileno=0) as server:
        template: ChatTemplate = pickle.loads(_frame(server))  # noqa: S301 - the server's, who trusts us less
        _give_up_rights()
        send_frame(server, msgspec.msgpack.encode(Rendered(())))  # from here on, what goes wrong is the template's
        _answer(server, cpu_s, functools.partial(_compiled, template))
        while True:
            question = pickle.loads(_frame(server))  # noqa: S301
            _answer(server, cpu_s, functools.partial(_rendered, template, *question))


def _give_up_rights() -> None:
    """Let what a template might reach through a hole in its sandbox be of little use."""
    for limit, allowed in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            allowed = min(allowed, most)  # noqa: PLW2901 - nobody may allow himself more
        resource.setrlimit(limit, (allowed, allowed))


def _answer(server: socket.socket, cpu_s: float, work: Callable[[], Answer]) -> None:
    """Send what `work` returns, or the refusal it raises. The kernel ends this process if it takes too long."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        encoded = msgspec.msgpack.encode(work())
    except ParamError as error:
        encoded = _refusal(str(error), error.param)
    except TemplateError as error:
        encoded = _refusal(str(error))
    except UnicodeEncodeError:
        encoded = _refusal("the chat template writes what is no Unicode text")
    except MemoryError:
        encoded = _refusal("the chat template needs too much memory for these messages")
    signal.setitimer(signal.ITIMER_PROF, 0)
    send_frame(server, encoded)


def _refusal(message: str, param: str | None = None) -> bytes:
    encodable = message[:MAX_MESSAGE].encode(errors="replace").decode()
    return msgspec.msgpack.encode(Refused(encodable, param))


def _compiled(template: ChatTemplate) -> Rendered:
    template.compile()
    return Rendered(())


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], now: datetime | None, options: dict[str, Any]
) -> Rendered:
    clock = None if now is None else (lambda: now)
    return Rendered(template.render(messages, now=clock, **options).pieces)


def _frame(server: socket.socket) -> bytes:
    """The next frame. Raises `EOFError` when the server is gone."""
    return _exactly(server, frame_length(_exactly(server, HEADER_BYTES)))


def _exactly(server: socket.socket, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        piece = server.recv(min(n_bytes - len(data), 2**20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        main(float(sys.argv[1]))
