"""TLS for the server's TCP sockets, from a certificate and its key in PEM files."""

import ssl
from pathlib import Path

from engine.errors import LockstepError
from scheduler.serve.reread import ONLY_ONCE, may_wait

HANDSHAKE_S = 10.0
"""Seconds a client may take to agree on a key; until then it is no connection that the limit counts."""


class CertificateError(LockstepError):
    """A certificate or a key that TLS cannot be spoken with."""


class Certificate:
    """The certificate chain in the file `chain` and the private key in `key`, or else in the same file.

    `context` is for listening sockets. Raises `CertificateError`.
    """

    def __init__(self, chain: Path, key: Path | None) -> None:
        self._chain = chain
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._read()

    def reload(self) -> None:
        """Read the files anew, for connections still to come. Raises `CertificateError`, and then nothing changes."""
        if may_wait(self._chain) or may_wait(self._key):
            raise CertificateError(f"{self._where}: {ONLY_ONCE}")
        self._read()

    def _read(self) -> None:
        # Tried on a context of its own: one that fails half-way has already taken the new certificate.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            try:
                context.load_cert_chain(self._chain, self._key, password=_no_password)
            except (OSError, ValueError) as error:
                raise CertificateError(f"{self._where}: {_why(error)}") from error

    @property
    def _where(self) -> str:
        return f"--ssl-cert {self._chain}" + (f" --ssl-key {self._key}" if self._key else "")


def _no_password() -> str:
    """Whoever starts a server does not wait at its terminal to be asked for one."""
    raise ValueError("the key is encrypted; it must be readable without a password")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        known = {"KEY_VALUES_MISMATCH": "the key is not that of the certificate"}
        return known.get(error.reason or "", "no PEM certificate with its private key")
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return str(error)
