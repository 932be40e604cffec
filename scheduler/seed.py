"""The seed of a request whose client gave none."""

import secrets

MAX_DRAWN_SEED = 2**53
"""Drawn seeds stay exact in clients that read JSON numbers as doubles."""


def draw_seed() -> int:
    """An unpredictable seed in [0, MAX_DRAWN_SEED), to be reported with the answer so that it can be had again."""
    return secrets.randbelow(MAX_DRAWN_SEED)
