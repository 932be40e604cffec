"""Server-sent events, the reading side (WHATWG HTML, 9.2.6). Sans-io: bytes in, the data of whole events out."""

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Fed with a response body in whatever pieces it arrives."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, piece: bytes) -> list[str]:
        """The `data` of each event that `piece` completes. Comments, event names, ids and retry times are dropped."""
        if not piece:
            return []
        if self._after_cr:
            piece = piece.removeprefix(b"\n")  # the other half of a line end that was cut in two
        self._after_cr = piece.endswith(b"\r")
        *lines, self._tail = _LINE_END.split(self._tail + piece)
        if self._at_start and lines:
            lines[0] = lines[0].removeprefix(_BOM)
            self._at_start = False
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data).decode("utf-8", errors="replace"))
                self._data.clear()
        return events

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
