"""What a consumer collects of one choice: its events, put together to an answer."""

from dataclasses import dataclass, field

from scheduler.events import ChoiceFinished, Delta, Token


@dataclass(slots=True)
class CollectedChoice:
    """What has come of one choice; `end` is None until it is over."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    end: ChoiceFinished | None = None

    def add(self, delta: Delta) -> None:
        """Take in the next piece."""
        self.texts.append(delta.text)
        self.tokens += delta.tokens

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)
