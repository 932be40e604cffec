"""How large an engine is unless told otherwise."""

SLOTS = 16
PREFILL_CHUNK = 256
KV_DTYPE = "float16"
MAX_CONTEXT = 4096
"""Positions per slot at most where nobody says how many: beyond it a cache costs memory few have use for."""
