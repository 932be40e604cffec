"""What a client may expect to go wrong. The `lockstep` command prints these as one line."""


class ClientError(Exception):
    """The root: whatever a command refuses or cannot do, for a reason its user can act on."""


class UnreachableError(ClientError):
    """Nobody answers at the server's address, or the connection broke."""


class ServerError(ClientError):
    """The server refused or failed a request. `status` is the HTTP status, None if it came within a stream."""

    def __init__(
        self, message: str, *, status: int | None = None, param: str | None = None, code: str | int | None = None
    ) -> None:
        self.status = status
        self.param = param
        self.code = code
        super().__init__(message)
