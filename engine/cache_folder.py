"""Where Lockstep keeps what can be had again: fetched model files and compiled kernels."""

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """LOCKSTEP_CACHE, else the user's cache folder (XDG_CACHE_HOME is honoured)."""
    chosen = os.environ.get("LOCKSTEP_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("lockstep"))
