"""The API keys: where they come from, and whether a client's is one of them.

Only their digests are kept, so that nothing that is logged or dumped can show a key, and two digests are compared in a
time that tells nothing about a key or its length.
"""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from engine.errors import LockstepError
from scheduler.serve.reread import ONLY_ONCE, may_wait


class KeyFileError(LockstepError):
    """A file of API keys that holds none, or cannot be read. The message shows no key."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"--api-key-file {path}: {reason}")


class ApiKeys:
    """The keys `given` and those in the file at `path`, one a line; blank lines and lines that begin with # are none.

    Raises `KeyFileError`.
    """

    def __init__(self, given: Iterable[str] = (), path: Path | None = None) -> None:
        self._given = tuple(_digest(key.encode("utf-8", "surrogateescape")) for key in given)
        self._path = path
        self._digests = self._read()

    @property
    def are_needed(self) -> bool:
        """Whether a client must present one."""
        return bool(self._digests)

    def allow(self, presented: bytes) -> bool:
        """Whether `presented` is one of the keys. How long it takes tells nothing of which one was nearly right."""
        digest = _digest(presented)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def reload(self) -> None:
        """Read the file anew. Raises `KeyFileError`, and then the keys are what they were."""
        if self._path is not None and may_wait(self._path):
            raise KeyFileError(self._path, ONLY_ONCE)
        self._digests = self._read()

    def _read(self) -> tuple[bytes, ...]:
        return self._given if self._path is None else (*self._given, *map(_digest, _keys_in(self._path)))


def _keys_in(path: Path) -> list[bytes]:
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise KeyFileError(path, (error.strerror or str(error)).lower()) from error
    for number, line in enumerate(lines, start=1):
        if not line.startswith(b"#") and len(line.split()) > 1:
            raise KeyFileError(path, f"line {number} has a space in it, and no key has")
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise KeyFileError(path, "there is no key in it")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
