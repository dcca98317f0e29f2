"""A reward that needs no task: about 73 % of groups have spread, as Qwen2.5-Coder-1.5B has on GSM8K; the others are all 0."""

import hashlib

SPREAD_PERCENT = 73


def spread(prompts, completion_ids, **_):
    """1 or 0 by a hash of the completion in groups with spread, which a hash of the prompt chooses."""
    return [
        float(_hash(prompt) % 100 < SPREAD_PERCENT and _hash(ids) % 2)
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def _hash(value) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big")
