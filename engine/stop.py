"""Stop strings in text that arrives in pieces."""

from bisect import bisect_left
from collections.abc import Sequence

from engine.errors import ParamError


class StopChecker:
    """Releases text up to the first stop string that completes, and holds back what may still become one.

    Held back is the longest tail of the text that begins some stop string, which is the state of an Aho-Corasick
    automaton (Aho & Corasick 1975). The trie of the stop strings is never built: their sorted list answers whether a
    tail begins one, so that many long stop strings cost nothing before the first token. When several stop strings
    complete at the same character the longest counts, so the order of the list never matters.

    `matched` is the stop string that ended the text, or None. Raises `ParamError` if a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if "" in stops:
            raise ParamError("stop", "stop must not contain an empty string")
        self.matched: str | None = None
        self._stops = tuple(sorted(set(stops)))
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now certain to come before any stop string; nothing once `matched` is set."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        released = []
        for character in text:
            tail = self._held + character
            cut = 0
            while not self._begins_a_stop(tail[cut:]):
                cut += 1
            released.append(tail[:cut])
            self._held = tail[cut:]
            if self._held.endswith(self._stops):
                released.append(self._end_text())
                break
        return "".join(released)

    def flush(self) -> str:
        """What was held back, when generation ends without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _begins_a_stop(self, tail: str) -> bool:
        """Whether some stop string starts with `tail`: if one does, so does the first that sorts no lower."""
        index = bisect_left(self._stops, tail)
        return index < len(self._stops) and self._stops[index].startswith(tail)

    def _end_text(self) -> str:
        """Set `matched`; returns what of the held text belongs to the output."""
        self.matched = max(filter(self._held.endswith, self._stops), key=len)
        held = self.flush()
        return held if self._include_stop else held.removesuffix(self.matched)
