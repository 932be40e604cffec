"""How deep a JSON text nests and how many items it has, told before anything is built of it."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

PIECE_BYTES = 16 * 1024
"""Bytes looked at before other threads get their turn: what is one call into C lets none of them run."""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord(","): 0}


class Outline(NamedTuple):
    """The deepest nesting of arrays and objects so far, and the commas between their items."""

    depth: int
    commas: int


def outlines(body: bytes) -> Iterator[Outline]:
    """The outline of ever more of `body`, the last one that of all; what stands in strings does not count."""
    level = depth = commas = 0
    is_in_string = False
    for piece in _pieces(body):
        unescaped = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = unescaped.translate(None, _NOT_STRUCTURE).split(b'"')
        outside = b"".join(parts[is_in_string::2])
        levels = list(itertools.accumulate(map(_STEP.__getitem__, outside), initial=level))
        level, depth = levels[-1], max(depth, *levels)
        commas += outside.count(b",")
        is_in_string ^= len(parts) % 2 == 0
        yield Outline(depth, commas)


def _pieces(body: bytes) -> Iterator[bytes]:
    """`body` in pieces none of which ends between a backslash and what it escapes."""
    start = 0
    while start < len(body):
        end = start + PIECE_BYTES
        piece = body[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1
        yield body[start:end]
        start = end
