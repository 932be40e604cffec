"""Reads a GGUF model file: header, metadata, and views of the tensors' bytes over a memory map.

Format after `docs/gguf.md` of github.com/ggml-org/ggml, versions 2 and 3, little-endian. Nothing in the file is
trusted: a count or a length is compared with the bytes that are left before anything is allocated for it, and whatever
is refused is refused as `ModelFileError`, naming the file, the reason and the key or tensor at fault.
"""

import hashlib
import mmap
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.gguf_cursor import Cursor
from engine.quants import BLOCK_FORMATS

T = TypeVar("T")

_MAX_DIMS = 4
_MAX_KEY_BYTES = 65535
_MAX_TENSOR_NAME_BYTES = 64
_MAX_ELEMENTS = 2**63 - 1

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

    In `metadata` an array of numbers or booleans is a numpy array, of strings a list, of arrays a tuple. The file must
    not shrink while it is open: the system kills a process that reads a mapped page that is gone.
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
        cursor = Cursor(path, mapped)
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

    def digest(self) -> bytes:
        """The BLAKE2b hash of the whole file; `ValueError` once it is closed. The GIL is released meanwhile."""
        if self._content is None:
            raise ValueError(f"{self.path} is closed")
        return hashlib.blake2b(self._content.data).digest()

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
        if path.is_dir():
            raise ModelFileError(path, "is a directory, not a .gguf file")
        # Looked at before it is opened: opening a named pipe would wait for somebody to write into it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError(path, "is not a regular file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelFileError(path, "is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        why = "there is no such file (`lockstep pull NAME` fetches a known model and prints its path)"
        raise ModelFileError(path, why) from error
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the path
        raise ModelFileError(path, f"cannot be opened: {error}") from error


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.content[:4])
    if magic != b"GGUF":
        cursor.fail(f"is not a GGUF file: begins with {magic!r}, must begin with b'GGUF'")
    cursor.skip(4)
    version: int = cursor.number("<I")
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3):
            cursor.fail("is a big-endian GGUF file; only little-endian files can be read")
        cursor.fail(f"has GGUF version {version}; only versions 2 and 3 can be read")
    return version


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.subject = f"metadata key {index}"
        key = cursor.name(_MAX_KEY_BYTES)
        cursor.subject = key
        if key in metadata:
            cursor.fail("the metadata key occurs twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    cursor.subject = "split.count"
    shards = metadata.get("split.count", 1)
    if type(shards) is not int or shards not in (0, 1):
        cursor.fail(f"is {reprlib.repr(shards)}: the file is a shard of a split model; merge its shards into one file")
    return metadata


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    """The file's alignment of tensor data, by the specification a multiple of 8; a power of two, as all have it."""
    alignment = metadata.get("general.alignment", 32)
    cursor.subject = "general.alignment"
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        cursor.fail(f"must be a power of two of at least 8, and is {reprlib.repr(alignment)}")
    if "general.alignment" in metadata and alignment > cursor.size:
        cursor.fail(f"is {alignment}, more than the {cursor.size} bytes of the whole file")
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        cursor.subject = f"tensor {index}"
        name = cursor.name(_MAX_TENSOR_NAME_BYTES)
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


def _read_tensor_info(cursor: Cursor, name: str, alignment: int) -> TensorInfo:
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


def _check_extents(cursor: Cursor, tensors: Mapping[str, TensorInfo]) -> None:
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
