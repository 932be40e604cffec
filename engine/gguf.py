"""Reads a GGUF model file: header, metadata, and views of the tensors' bytes over a memory map.

Format after `docs/gguf.md` of github.com/ggml-org/ggml, versions 2 and 3, little-endian. Nothing in the file is
trusted: a count or a length is compared with the bytes that are left before anything is allocated for it, and whatever
is refused is refused as `ModelFileError`, naming the file, the reason and the key or tensor at fault.
"""

import mmap
import reprlib
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.quants import BLOCK_FORMATS

T = TypeVar("T")

_MAX_DIMS = 4
_MAX_KEY_BYTES = 65535
_MAX_TENSOR_NAME_BYTES = 64
_MAX_ARRAY_DEPTH = 4
_MAX_ELEMENTS = 2**63 - 1

_NUMBERS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_VALUE_BYTES = {type_id: dtype.itemsize for type_id, dtype in _NUMBERS.items()} | {_BOOL: 1, _STRING: 8, _ARRAY: 12}
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, one byte of value
_MIN_TENSOR_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one letter, number of dimensions, one of them, type, offset

_KIND_NAMES = {
    int: "an integer",
    float: "a floating-point number",
    bool: "a boolean",
    str: "a string",
    list: "an array of strings",
    tuple: "an array of arrays",
    np.ndarray: "an array of numbers",
}
_READABLE_TYPES = ", ".join(block_format.name for block_format in BLOCK_FORMATS.values())


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `shape` outermost dimension first, `offset` in bytes from the start of the file."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """An open model file. `metadata` and `tensors` were read and checked by `open`; `data` maps a tensor's bytes.

    In `metadata` an array of numbers or booleans is a numpy array, of strings a list, of arrays a tuple.
    """

    def __init__(
        self,
        path: Path,
        version: int,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        content: NDArray[np.uint8],
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self._content: NDArray[np.uint8] | None = content

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The file at `path`, its header read and checked; tensor data is only mapped.

        Raises `ModelFileError` for whatever is not a whole, readable, single-file, little-endian GGUF of version 2 or
        3 whose tensors all have a type this engine reads.
        """
        path = Path(path)
        mapped = _map(path)
        cursor = _Cursor(path, mapped)
        version = _read_version(cursor)
        n_tensors, n_keys = cursor.number("<Q"), cursor.number("<Q")
        cursor.check_count(n_keys, _MIN_KEY_VALUE_BYTES, "metadata keys")
        metadata = _read_metadata(cursor, n_keys)
        cursor.subject = None
        cursor.check_count(n_tensors, _MIN_TENSOR_INFO_BYTES, "tensors")
        tensors = _read_tensors(cursor, n_tensors, _alignment(cursor, metadata))
        content = np.frombuffer(mapped, np.uint8)
        return cls(path, version, MappingProxyType(metadata), MappingProxyType(tensors), content)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name`, flat and read-only: a view of the map, valid even after `close`.

        Raises `ModelFileError` naming a tensor that is not there, and `ValueError` once the file is closed.
        """
        if self._content is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(self.path, "the file has no such tensor", name)
        return self._content[info.offset : info.offset + info.n_bytes]

    def require(self, key: str, kind: type[T]) -> T:
        """The metadata value of `key`, which must be of `kind`: int, float, bool, str, list, tuple or np.ndarray.

        Raises `ModelFileError` naming the key if it is missing or of another kind.
        """
        if key not in self.metadata:
            raise ModelFileError(self.path, "the file has no such metadata key", key)
        value = self.metadata[key]
        if type(value) is not kind:
            found, wanted = _KIND_NAMES[type(value)], _KIND_NAMES[kind]
            raise ModelFileError(self.path, f"must be {wanted}, and is {found}", key)
        return value

    def get(self, key: str, kind: type[T], default: T) -> T:
        """As `require`, with `default` for a key that is missing (but not for one of another kind)."""
        return self.require(key, kind) if key in self.metadata else default

    def close(self) -> None:
        """Let go of the map; the system unmaps the file when the last view from `data` is gone."""
        self._content = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _map(path: Path) -> mmap.mmap:
    """The whole file, mapped for reading."""
    try:
        # Looked at before it is opened: opening a named pipe would wait for somebody to write into it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError(path, "is not a regular file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelFileError(path, "is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the path
        raise ModelFileError(path, f"cannot be opened: {error}") from error


class _Cursor:
    """Reads forward through the header and refuses to read beyond the end of the file.

    `subject` is the key or tensor being read, for the message.
    """

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.size = len(content)
        self.position = 0
        self.subject: str | None = None

    def fail(self, reason: str) -> NoReturn:
        subject = self.subject
        if subject is not None and not (subject.isprintable() and len(subject) <= _MAX_TENSOR_NAME_BYTES):
            subject = reprlib.repr(subject)  # a message stays one readable line, whatever the file says
        raise ModelFileError(self.path, reason, subject)

    def skip(self, n_bytes: int) -> int:
        """The position of the next `n_bytes` bytes, which are passed over."""
        start, end = self.position, self.position + n_bytes
        if end > self.size:
            self.fail(f"the file is truncated: needs {end} bytes up to here, has {self.size}")
        self.position = end
        return start

    def number(self, fmt: str) -> Any:
        start = self.skip(struct.calcsize(fmt))
        return struct.unpack_from(fmt, self.content, start)[0]

    def text(self, what: str, max_bytes: int | None = None) -> str:
        n_bytes = self.number("<Q")
        if max_bytes is not None and not 0 < n_bytes <= max_bytes:
            self.fail(f"{what} has {n_bytes} bytes, must have 1 to {max_bytes}")
        start = self.skip(n_bytes)
        try:
            return str(self.content[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse `count` items that cannot fit into the rest of the file, each being `min_bytes` long or longer."""
        left = self.size - self.position
        if count * min_bytes > left:
            self.fail(f"{count} {what} need {count * min_bytes} bytes or more, and {left} are left in the file")

    def value(self, type_id: int, depth: int = 0) -> Any:
        """One metadata value of GGUF value type `type_id`."""
        if type_id in _NUMBERS:
            return self.numbers(type_id, 1)[0].item()
        if type_id == _BOOL:
            return bool(self.numbers(_BOOL, 1)[0])
        if type_id == _STRING:
            return self.text("the value")
        if type_id != _ARRAY:
            self.fail(f"has unknown value type {type_id}")
        return self.array(depth + 1)

    def array(self, depth: int) -> NDArray[Any] | list[str] | tuple[Any, ...]:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(f"has arrays nested more than {_MAX_ARRAY_DEPTH} deep")
        type_id, count = self.number("<I"), self.number("<Q")
        if type_id not in _MIN_VALUE_BYTES:
            self.fail(f"is an array of unknown value type {type_id}")
        self.check_count(count, _MIN_VALUE_BYTES[type_id], "array elements")
        if type_id == _STRING:
            return self.strings(count)
        if type_id == _ARRAY:
            return tuple(self.value(_ARRAY, depth) for _ in range(count))
        return self.numbers(type_id, count)

    def numbers(self, type_id: int, count: int) -> NDArray[Any]:
        """`count` numbers or booleans, copied out of the map."""
        dtype = _NUMBERS.get(type_id, np.dtype("<u1"))
        start = self.skip(count * dtype.itemsize)
        numbers: NDArray[Any] = np.frombuffer(self.content[start : self.position], dtype)
        if type_id != _BOOL:
            return numbers
        if numbers.max(initial=0) > 1:
            self.fail(f"has a boolean of value {numbers.max()}, must be 0 or 1")
        return numbers.astype(np.bool_)

    def strings(self, count: int) -> list[str]:
        """`count` strings; a vocabulary has hundreds of thousands of them, so this is `text` unrolled into one loop."""
        content, size, position = self.content, self.size, self.position
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(content, position)[0]
                if position > size:
                    break
                strings.append(str(content[start:position], "utf-8"))
        except struct.error:
            position = start
        except UnicodeDecodeError as error:
            self.fail(f"element {len(strings)} is not UTF-8: {error}")
        self.skip(position - self.position)
        return strings


def _read_version(cursor: _Cursor) -> int:
    magic = bytes(cursor.content[:4])
    if magic != b"GGUF":
        cursor.fail(f"is not a GGUF file: begins with {magic!r}, must begin with b'GGUF'")
    cursor.skip(4)
    version: int = cursor.number("<I")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version != 0:
            cursor.fail("is a big-endian GGUF file; only little-endian files can be read")
        cursor.fail(f"has GGUF version {version}; only versions 2 and 3 can be read")
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.subject = f"metadata key {index}"
        key = cursor.text("its name", _MAX_KEY_BYTES)
        cursor.subject = key
        if key in metadata:
            cursor.fail("the metadata key occurs twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    cursor.subject = "split.count"
    shards = metadata.get("split.count", 1)
    if type(shards) is not int or shards > 1:
        cursor.fail(f"is one of {reprlib.repr(shards)} shards of a split model; merge them into one file first")
    return metadata


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    """The file's alignment of tensor data, by the specification a multiple of 8; a power of two, as all have it."""
    alignment = metadata.get("general.alignment", 32)
    cursor.subject = "general.alignment"
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        cursor.fail(f"must be a power of two of at least 8, and is {reprlib.repr(alignment)}")
    if "general.alignment" in metadata and alignment > cursor.size:
        cursor.fail(f"is {alignment}, more than the {cursor.size} bytes of the whole file")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.subject = f"tensor {index}"
        name = cursor.text("its name", _MAX_TENSOR_NAME_BYTES)
        cursor.subject = name
        if name in tensors:
            cursor.fail("the tensor occurs twice")
        tensors[name] = _read_tensor_info(cursor, name, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(name, info.type_id, info.shape, data_start + info.offset, info.n_bytes)
        for name, info in tensors.items()
    }
    _check_extents(cursor, tensors)
    return tensors


def _read_tensor_info(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """One entry of the tensor table; its offset still counts from the start of the data section."""
    n_dims = cursor.number("<I")
    if not 1 <= n_dims <= _MAX_DIMS:
        cursor.fail(f"has {n_dims} dimensions, must have 1 to {_MAX_DIMS}")
    shape = tuple(cursor.number("<Q") for _ in range(n_dims))[::-1]
    if 0 in shape:
        cursor.fail(f"has a dimension of 0: {shape}")
    if prod(shape) > _MAX_ELEMENTS:
        cursor.fail(f"has more than {_MAX_ELEMENTS} elements: {shape}")
    type_id = cursor.number("<I")
    block_format = BLOCK_FORMATS.get(type_id)
    if block_format is None:
        cursor.fail(f"has tensor type {type_id}, which is not supported; supported are {_READABLE_TYPES}")
    if shape[-1] % block_format.block_size:
        cursor.fail(f"has rows of {shape[-1]}, no multiple of {block_format.name}'s block of {block_format.block_size}")
    offset = cursor.number("<Q")
    if offset % alignment:
        cursor.fail(f"has offset {offset}, no multiple of the alignment {alignment}")
    return TensorInfo(name, type_id, shape, offset, block_format.n_bytes(shape))


def _check_extents(cursor: _Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors whose data leaves the file or overlaps another's."""
    previous: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        cursor.subject = info.name
        if previous is not None and info.offset < previous.offset + previous.n_bytes:
            cursor.fail(f"its data overlaps that of {previous.name}")
        previous = info
    if previous is not None and previous.offset + previous.n_bytes > cursor.size:
        needed = previous.offset + previous.n_bytes
        cursor.fail(f"the file is truncated or its offset is wrong: needs {needed} bytes, has {cursor.size}")
