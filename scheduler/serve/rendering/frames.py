"""What the server and the process that renders say to each other: frames of bytes, and the two answers to a chat."""

import socket
import struct

import msgspec

_LENGTH = struct.Struct(">I")


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The pieces of a `RenderedChat`."""

    pieces: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """What a `ParamError` says, or without `param` a `TemplateError`."""

    message: str
    param: str | None = None


Answer = Rendered | Refused


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Send `payload` as one frame."""
    connection.sendall(_LENGTH.pack(len(payload)))
    connection.sendall(payload)


def frame_length(header: bytes) -> int:
    """Bytes of the frame that follows its header."""
    (length,) = _LENGTH.unpack(header)
    return int(length)


HEADER_BYTES = _LENGTH.size
