"""Randomness is addressed, not ambient: every draw has a seed derived from what it is for.

A seed is a hash of its address, for example ("rollout", run seed, step, problem id, sample index), so a resumed
run, another batch size or another order of calls draws the same numbers, and the global generators stay untouched.
"""

import hashlib


def derive_seed(*address: str | int) -> int:
    """63-bit seed of an address; different addresses never share a stream in practice."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in address)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
