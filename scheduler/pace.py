"""How soon slots become free, from how long they were held lately."""

RECENT = 16
"""About as many of the last choices decide."""


class Pace:
    """A running mean of how long a choice holds its slot, one of `n_slots`."""

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._num_released = 0
        self._mean_held_s = 0.0

    def on_release(self, held_s: float) -> None:
        """A slot has become free that was held for so long."""
        self._num_released += 1
        self._mean_held_s += (held_s - self._mean_held_s) / min(self._num_released, RECENT)

    def seconds_until(self, num_releases: int) -> float:
        """The time in which, with all slots taken, so many will likely become free; 0 until one has been."""
        return num_releases * self._mean_held_s / self._n_slots
