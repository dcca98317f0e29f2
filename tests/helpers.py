"""Small builders that several tests share."""

import torch

from qerl.types import Rollout


def make_rollout(prompt: int, completion: int, *, seed: int = 0, vocab: int = 50, **changes) -> Rollout:
    """A rollout of random tokens with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (prompt + completion,), generator=generator).tolist()
    logprobs = (-3 * torch.rand(completion, generator=generator)).tolist()
    values = {
        "problem_id": f"p{seed}",
        "sample_index": 0,
        "prompt_ids": tuple(ids[:prompt]),
        "completion_ids": tuple(ids[prompt:]),
        "logprobs": tuple(logprobs),
        "loss_mask": (True,) * completion,
        "finish_reason": "stop",
        "version": 0,
    }
    return Rollout(**(values | changes))
