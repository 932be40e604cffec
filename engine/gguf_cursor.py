"""Reads the values a GGUF header is made of, and never beyond the end of the file.

Nothing read is trusted: a count or a length is compared with the bytes that are left before anything is allocated for
it. Value types after `docs/gguf.md` of github.com/ggml-org/ggml.
"""

import mmap
import reprlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError

_MAX_ARRAY_DEPTH = 4

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


class Cursor:
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
        """Raise `ModelFileError` for `reason`, naming the file and the present subject."""
        raise ModelFileError(self.path, reason, self.subject)

    def skip(self, n_bytes: int) -> int:
        """The position of the next `n_bytes` bytes, which are passed over."""
        start, end = self.position, self.position + n_bytes
        if end > self.size:
            self.fail(f"the file is truncated: needs {end} bytes up to here, has {self.size}")
        self.position = end
        return start

    def number(self, fmt: str) -> Any:
        """The next number, of the `struct` format `fmt`."""
        start = self.skip(struct.calcsize(fmt))
        return struct.unpack_from(fmt, self.content, start)[0]

    def text(self) -> str:
        """The next string: its length, then that many bytes of UTF-8."""
        start = self.skip(self.number("<Q"))
        try:
            return str(self.content[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"is not UTF-8: {error}")

    def name(self, max_bytes: int) -> str:
        """The next string, to name a key or a tensor: neither empty nor too long, and fit to be printed."""
        start = self.position
        name = self.text()
        n_bytes = self.position - start - 8
        if not 0 < n_bytes <= max_bytes:
            self.fail(f"has a name of {n_bytes} bytes, must be 1 to {max_bytes}")
        if not name.isprintable():
            self.fail(f"has a name with characters that cannot be printed: {reprlib.repr(name)}")
        return name

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
            return self.text()
        if type_id != _ARRAY:
            self.fail(f"has unknown value type {type_id}")
        return self.array(depth + 1)

    def array(self, depth: int) -> NDArray[Any] | list[str] | tuple[Any, ...]:
        """The next array: its element type, their number, and the elements. `depth` is 1 for the outermost."""
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
