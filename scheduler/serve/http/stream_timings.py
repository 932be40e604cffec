"""Where the time of a call goes while it goes on, as who streams its answer sees it."""

import time
from collections.abc import Callable

from scheduler.events import Timings, Usage
from scheduler.serve.wire.usage import WireTimings


class TimingsSoFar:
    """The clock of one stream, told of each event as it is passed on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue_s = 0.0
        self._t_started: float | None = None
        self._t_first_token: float | None = None

    def on_started(self, queue_s: float) -> None:
        """The first of the call's requests has its slot."""
        if self._t_started is None:
            self._queue_s, self._t_started = queue_s, self._clock()

    def on_tokens(self) -> None:
        """Tokens have come."""
        if self._t_first_token is None:
            self._t_first_token = self._clock()

    def wire(self, usage: Usage) -> WireTimings:
        """The timings as of now, if so much has come."""
        now = self._clock()
        t_started = now if self._t_started is None else self._t_started
        t_first_token = now if self._t_first_token is None else self._t_first_token
        prefill_s, decode_s = t_first_token - t_started, now - t_first_token
        return WireTimings.of(
            Timings(
                queue_s=self._queue_s,
                prefill_s=prefill_s,
                decode_s=decode_s,
                e2e_s=self._queue_s + prefill_s + decode_s,
                ttft_s=None if self._t_first_token is None else self._queue_s + prefill_s,
            ),
            usage,
        )
