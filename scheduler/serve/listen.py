"""Opening the sockets a server listens on, and leaving none behind."""

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from engine.errors import LockstepError

BACKLOG = 512
ACCEPTED_AT_ONCE = 1
"""Connections taken in one turn of the event loop, asyncio's `backlog`.

Where no more files may be opened, asyncio does not stop at the first failure: it fails, logs a traceback and sets a
timer as many times a turn. With a backlog of hundreds, strangers filled the log.
"""
NOT_ON_THIS_MACHINE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class ListenError(LockstepError):
    """An address that cannot be listened on; the message names it and says why."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen on {address}: {reason}")


def listen_tcp(host: str, port: int, option: str = "port") -> list[socket.socket]:
    """One listening socket per address of `host`, all on the same port; `port` 0 takes one that is free.

    Raises `ListenError`, which for a port that is taken names the `option` to choose another with. An address this
    machine does not have is left out as long as another one works.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as exc:
        raise ListenError(f"{host}:{port}", f"the host name is not known ({exc})") from exc
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        try:
            sockets.append(_listening(family, (address[0], port, *address[2:])))
        except OSError as exc:
            if exc.errno not in NOT_ON_THIS_MACHINE:
                for sock in sockets:
                    sock.close()
                raise ListenError(f"{host}:{port}", _why(exc) + _way_out(exc, option)) from exc
            missing = exc
        else:
            port = sockets[0].getsockname()[1]
    if missing and not sockets:
        raise ListenError(f"{host}:{port}", _why(missing)) from missing
    return sockets


def _listening(family: int, address: tuple[object, ...] | str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class UnixListener:
    """A listening Unix socket and the file that stands for it.

    A socket file whose server is dead is replaced; one that a living server answers, and any file that is not a
    socket, is left alone. Raises `ListenError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _remove_if_dead(path)
        try:
            self.socket = _listening(socket.AF_UNIX, str(path))
        except OSError as exc:
            raise ListenError(str(path), _why(exc)) from exc
        self._identity = _identity(path)

    def close(self) -> None:
        """Stop listening and remove the file, unless another server has put its own in its place."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _identity(self.path) == self._identity:
                self.path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _remove_if_dead(path: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ListenError(str(path), _why(exc)) from exc
    if not is_socket:
        raise ListenError(str(path), "the file exists and is not a socket; it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except FileNotFoundError:
            return
        except TimeoutError:
            raise ListenError(str(path), "another server listens there") from None
        except OSError as exc:
            raise ListenError(str(path), _why(exc)) from exc
        else:
            raise ListenError(str(path), "another server listens there")


def _way_out(exc: OSError, option: str) -> str:
    if exc.errno not in {errno.EADDRINUSE, errno.EACCES}:
        return ""
    return f"; choose another with --{option.replace('_', '-')} or LOCKSTEP_{option.upper()}"


def _why(exc: OSError) -> str:
    return os.strerror(exc.errno).lower() if exc.errno else str(exc)
