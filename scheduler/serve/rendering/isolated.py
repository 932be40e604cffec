"""A chat template at arm's length: rendered by a process of its own (`worker`), which is killed and replaced at need.

One rendering runs at a time. What comes back is data, and trusted no further than that.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import structlog

from engine.chat import ChatTemplate, RenderedChat
from engine.errors import LockstepError, ParamError, TemplateError
from scheduler.serve.rendering import worker
from scheduler.serve.rendering.frames import HEADER_BYTES, Answer, Rendered, frame_length, send_frame

CPU_S = 2.0
"""Seconds of a processor one chat may take, and compiling the template."""
START_S = 60.0
"""Seconds the process may take to start and to compile the template: far more than it needs if it starts at all."""
ANSWER_S = 10.0
"""Seconds after which a process is killed that neither answers nor gets enough of a processor to be stopped by that."""
MAX_ANSWER = 64 * 2**20
"""Bytes a rendered chat may have, encoded."""

_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

_log: structlog.stdlib.BoundLogger = structlog.get_logger("lockstep.rendering")


class RenderingProcessError(LockstepError):
    """The process that renders chats does not start, which is no fault of the template."""


class IsolatedTemplate:
    """`template` with the face of one, rendered elsewhere. Any thread may call it; `close` ends its process."""

    def __init__(self, template: ChatTemplate, *, cpu_s: float = CPU_S) -> None:
        self._template = template
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = _Process(template, cpu_s)

    @property
    def source(self) -> str:
        """The template as it is written."""
        return self._template.source

    def check(self) -> None:
        """Return when the template is compiled and ready to render.

        Raises `TemplateError` if it cannot be, and `RenderingProcessError`.
        """
        with self._lock, self._replacing_what_fails():
            _pieces(self._process.compiled())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: Callable[[], datetime] | None = None,
        **template_kwargs: Any,
    ) -> RenderedChat:
        """`ChatTemplate.render`, with a clock that stands still.

        Raises `TemplateError` if it takes too much, and `RenderingProcessError`.
        """
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **template_kwargs,
        }
        question = pickle.dumps((messages, now and now(), options), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self._process.has_ended:  # by another's hand, such as the kernel's when memory is short
                self._replace()
            with self._replacing_what_fails():
                _pieces(self._process.compiled())
                return RenderedChat(_pieces(self._process.ask(question)))

    def close(self) -> None:
        """End the process. A rendering in it fails."""
        self._is_closed = True
        self._process.kill()
        with self._lock:
            self._process.dispose()

    @contextlib.contextmanager
    def _replacing_what_fails(self) -> Iterator[None]:
        """Say as `TemplateError` that the process has failed, and have another one ready for the next chat."""
        try:
            yield
        except _FailedError as failure:
            if not self._is_closed:
                _log.warning("the process that renders chats has been replaced", reason=str(failure))
                self._replace()
            raise TemplateError(f"the chat template {failure}") from failure

    def _replace(self) -> None:
        self._process.dispose()
        self._process = _Process(self._template, self._cpu_s)


def _pieces(answer: Answer) -> tuple[str, ...]:
    """What was rendered. Raises `ParamError` and `TemplateError` as the worker has."""
    if isinstance(answer, Rendered):
        return answer.pieces
    if answer.param is None:
        raise TemplateError(answer.message)
    raise ParamError(answer.param, answer.message)


class _FailedError(Exception):
    """The process has given no answer; the message says why, as what the template does."""


class _Process:
    """One worker. Whoever has seen it fail disposes of it."""

    def __init__(self, template: ChatTemplate, cpu_s: float) -> None:
        self._template = template
        self._cpu_s = cpu_s
        self._compiled: Answer | None = None
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                (sys.executable, "-P", "-m", worker.__name__, str(cpu_s)),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback may quote what a client has written
                env=_environment(),
                start_new_session=True,
            )

    def compiled(self) -> Answer:
        """The worker's answer to its template, which it gets with the first call.

        Raises `_FailedError`, and `RenderingProcessError` if it does not come so far as to look at the template.
        """
        if self._compiled is None:
            try:
                self._exchange(pickle.dumps(self._template, pickle.HIGHEST_PROTOCOL), START_S)
            except _FailedError:
                self.kill()
                message = (
                    f"the process that renders chats does not start (it ended with status {self._process.wait()}): "
                    "is there memory for it, and may this server start processes?"
                )
                raise RenderingProcessError(message) from None
            self._compiled = self._exchange(None, START_S)
        return self._compiled

    def ask(self, question: bytes) -> Answer:
        """The worker's answer to a chat. Raises `_FailedError`."""
        return self._exchange(question, ANSWER_S)

    @property
    def has_ended(self) -> bool:
        """Whether there is nobody to ask."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it, whatever it does. A thread that waits for its answer gets none."""
        self._process.kill()

    def dispose(self) -> None:
        """End it and leave nothing behind. No other thread may be waiting for an answer."""
        self.kill()
        self._process.wait()
        self._connection.close()

    def _exchange(self, question: bytes | None, timeout_s: float) -> Answer:
        """The answer to `question`, or one more to the last if it is None. Raises `_FailedError`."""
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.settimeout(timeout_s)
            if question is not None:
                send_frame(self._connection, question)
            length = frame_length(self._receive(HEADER_BYTES, deadline))
            if length > MAX_ANSWER:
                raise _FailedError(f"writes more than {MAX_ANSWER} bytes")
            return _DECODER.decode(self._receive(length, deadline))
        except TimeoutError:
            raise _FailedError(f"takes longer than {timeout_s:g} s") from None
        except ConnectionError:
            if self._process.wait() == -signal.SIGPROF:
                raise _FailedError(f"takes more than {self._cpu_s:g} s of computing") from None
            raise _FailedError("ends the process that renders it") from None
        except msgspec.DecodeError:
            raise _FailedError("answers with nonsense") from None

    def _receive(self, n_bytes: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._connection.recv(min(n_bytes - len(data), 2**20))
            if not piece:
                raise ConnectionResetError
            data += piece
        return bytes(data)


def _environment() -> dict[str, str]:
    """What Python needs to find its modules and itself. The rest stays here: there are secrets in it."""
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
    return {**needed, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
