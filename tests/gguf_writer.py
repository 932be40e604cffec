"""Writes GGUF files, well-formed ones from plain values and broken ones from whatever a test hands in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np

F32 = 0
NUMBER_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11, "f8": 12}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class Typed:
    """A metadata value of any value type and any bytes, right or wrong."""

    type_id: int
    raw: bytes


@dataclass(frozen=True)
class RawTensor:
    """A tensor of any type; `shape` outermost first. Its offset follows from the tensors before it unless given."""

    type_id: int
    shape: tuple[int, ...]
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return pack("<Q", len(raw)) + raw


def typed(value: Any) -> Typed:
    """`value` as the GGUF type its Python type stands for: int is uint32 (int64 if it does not fit), float float32."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, pack("<?", value))
    if isinstance(value, int):
        return Typed(4, pack("<I", value)) if 0 <= value < 2**32 else Typed(11, pack("<q", value))
    if isinstance(value, float):
        return Typed(6, pack("<f", value))
    if isinstance(value, str | bytes):
        return Typed(STRING, text(value))
    if isinstance(value, np.ndarray):
        type_id = BOOL if value.dtype == np.bool_ else NUMBER_TYPES[value.dtype.str[1:]]
        return Typed(ARRAY, pack("<IQ", type_id, value.size) + value.tobytes())
    if isinstance(value, np.generic):
        return Typed(NUMBER_TYPES[value.dtype.str[1:]], value.tobytes())
    elements = [typed(element) for element in value]
    element_type = elements[0].type_id if elements else STRING
    return Typed(ARRAY, pack("<IQ", element_type, len(elements)) + b"".join(element.raw for element in elements))


def gguf_bytes(
    metadata: Mapping[str, Any] | Iterable[tuple[str | bytes, Any]] = (),
    tensors: Mapping[str, Any] | Iterable[tuple[str | bytes, Any]] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A whole file. Tensors are float32 arrays or `RawTensor`; pairs instead of mappings allow duplicates."""
    keys = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    entries = [
        (name, value if isinstance(value, RawTensor) else RawTensor(F32, value.shape, value.astype("<f4").tobytes()))
        for name, value in (tensors.items() if isinstance(tensors, Mapping) else tensors)
    ]
    alignment = dict(keys).get("general.alignment", 32)
    padding = alignment if isinstance(alignment, int) and 0 < alignment <= 2**16 else 32

    header = magic + pack("<I", version)
    header += pack("<QQ", len(entries) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    for key, value in keys:
        as_typed = typed(value)
        header += text(key) + pack("<I", as_typed.type_id) + as_typed.raw
    data = b""
    for name, tensor in entries:
        offset = len(data) if tensor.offset is None else tensor.offset
        header += text(name) + pack("<I", len(tensor.shape)) + pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        header += pack("<IQ", tensor.type_id, offset)
        data += tensor.data + bytes(-len(tensor.data) % padding)
    return header + bytes(-len(header) % padding) + data


def write_gguf(path: Path, *args: Any, **kwargs: Any) -> Path:
    """`gguf_bytes` into a file; returns its path."""
    path.write_bytes(gguf_bytes(*args, **kwargs))
    return path
