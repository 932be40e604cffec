"""Random numbers that depend on who asks and where, never on when: one draw per (seed, choice, position).

Philox4x64-10, a counter-based generator: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011.
"""

from dataclasses import dataclass

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 64-bit words, a pure function of counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (odd >> 64) ^ c1 ^ k0, odd & _MASK, (even >> 64) ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class RequestRng:
    """The draws of one choice of one request."""

    key: tuple[int, int]

    def uniform(self, position: int) -> float:
        """The number in [0, 1), a multiple of 2**-53, that decides the token at `position`."""
        return (philox4x64((position, 0, 0, 0), self.key)[0] >> 11) * 2.0**-53


def request_rng(seed: int, choice: int = 0) -> RequestRng:
    """The generator of choice number `choice` of a request; any integer is a seed, taken modulo 2**64."""
    return RequestRng((seed & _MASK, choice))
