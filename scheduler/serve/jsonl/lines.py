"""Lines over a stream connection, with limits: length and time of what comes in, patience with what goes out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from scheduler.serve.wire.encode import encode_json
from scheduler.serve.wire.errors import ApiError

READ_BYTES = 2**16
LINGER_S = 2.0
"""How long what a client still sends is dropped after a refusal, so that it gets to read why."""


class HangUpError(ApiError):
    """The connection has to end, after telling the client why."""


async def lines_of(
    reader: asyncio.StreamReader, *, max_bytes: int, timeout_s: float, is_hurried: bool
) -> AsyncIterator[bytes]:
    """Every line without its newline; the last one may lack it.

    Raises `HangUpError` for a line of more than `max_bytes` or one whose rest does not arrive within `timeout_s`;
    between lines a client may be silent for as long as it likes, before the first one only if not `is_hurried`. Raises
    `ConnectionError` if the client is gone.
    """
    loop = asyncio.get_running_loop()
    pending = bytearray()
    deadline = loop.time() + timeout_s if is_hurried else None
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                data = await reader.read(READ_BYTES)
        except TimeoutError:
            message = f"{'the rest of the' if pending else 'a'} line did not arrive within {timeout_s} s"
            raise HangUpError(408, message, code="line_timeout") from None
        if not data:
            break
        *whole, rest = data.split(b"\n")
        for end in whole:
            _check_length(len(pending) + len(end), max_bytes)
            line = bytes(pending) + end
            pending.clear()
            yield line
        _check_length(len(pending) + len(rest), max_bytes)
        if rest and not pending:
            deadline = loop.time() + timeout_s
        pending += rest
        if not pending:
            deadline = None
    if pending:
        yield bytes(pending)


def _check_length(n_bytes: int, max_bytes: int) -> None:
    if n_bytes > max_bytes:
        raise HangUpError(413, f"the line is longer than {max_bytes} bytes", code="line_too_long")


class LineWriter:
    """JSON lines to one client, who may leave what it is sent unread for `timeout_s`."""

    def __init__(self, writer: asyncio.StreamWriter, *, timeout_s: float) -> None:
        self._writer = writer
        self._timeout_s = timeout_s

    async def send(self, line: object) -> None:
        """Write `line` and wait until most of what was written is on its way.

        Raises `ConnectionError` if the client is gone or reads too slowly.
        """
        await self._write(encode_json(line) + b"\n")

    async def probe(self) -> None:
        """Write an empty line, which means nothing. Raises `ConnectionError` soon after the client is gone."""
        await self._write(b"\n")

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise ConnectionError(f"the client took nothing for {self._timeout_s} s") from None

    async def linger(self, reader: asyncio.StreamReader) -> None:
        """Send no more, and drop what still comes for a moment: a connection closed on unread data is reset."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()
            async with asyncio.timeout(LINGER_S):
                while await reader.read(READ_BYTES):
                    pass

    async def close(self) -> None:
        """Close when everything has been sent, or the client's time is up."""
        self._writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(self._timeout_s):
                await self._writer.wait_closed()
        self.abort()

    def abort(self) -> None:
        """Close at once, whatever has not been sent."""
        self._writer.transport.abort()
