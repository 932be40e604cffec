"""Every error Lockstep raises on purpose, in one tree.

A caller's mistake is one of these; a broken invariant of ours is an `assert`.
"""

from pathlib import Path


class LockstepError(Exception):
    """The root: `except LockstepError` catches whatever was refused on purpose."""


class ModelFileError(LockstepError):
    """A model file that cannot be served.

    `subject` is the metadata key or the tensor at fault, or None when it is the file as a whole.
    """

    def __init__(self, path: str | Path, reason: str, subject: str | None = None) -> None:
        self.path = str(path)
        self.reason = reason
        self.subject = subject
        where = f"{self.path}: {subject}" if subject else self.path
        super().__init__(f"{where}: {reason}")


class TemplateError(LockstepError):
    """A chat template that does not compile, or refuses or cannot render the messages given."""


class ParamError(LockstepError, ValueError):
    """A request parameter outside its range. `param` is the name the user wrote."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(message)


class ContextLengthError(LockstepError, ValueError):
    """A prompt that leaves no room for an answer: it has `num_prompt` tokens, a slot holds `max_len`."""

    def __init__(self, num_prompt: int, max_len: int) -> None:
        self.num_prompt = num_prompt
        self.max_len = max_len
        super().__init__(self.message(num_prompt, max_len))

    @staticmethod
    def message(num_prompt: int | str, max_len: int) -> str:
        """In the words by which LangChain and litellm know what went wrong."""
        return f"the prompt is too long: it has {num_prompt} tokens, this model's maximum context length is {max_len}"


class LogitsError(LockstepError, ValueError):
    """Logits no token can be drawn from: a NaN or an infinity among them, or every token forbidden."""


class CacheError(LockstepError, ValueError):
    """A write that does not fit the KV cache: wrong shape, gap, or overflow. Nothing was changed."""


class QueueFullError(LockstepError):
    """The waiting queue is at its limit; it will likely have room again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DrainingError(LockstepError):
    """The server is shutting down and admits nothing new."""


class GenerationError(LockstepError):
    """A request that failed while it ran, by a fault of ours: `__cause__` is what went wrong."""
