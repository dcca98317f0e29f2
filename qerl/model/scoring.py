"""What the trainer thinks of completions, outside of training: for checks and measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.model.packing import Item, pack
from qerl.model.policy import Policy
from qerl.types import Rollout

MAX_TOKENS = 2048
"""In one forward pass: next to an engine there may be little room"""


class Scores(NamedTuple):
    """Of all sampled tokens, completion after completion: [C] each."""

    logprobs: Tensor
    """By the trainer"""
    entropies: Tensor
    """Of the trainer's distributions there, in nats"""
    recorded: Tensor
    """Log-probabilities as the engine recorded them"""


@torch.no_grad()
def score(policy: Policy, rollouts: Sequence[Rollout], temperature: float) -> Scores:
    """Run the completions through the policy as its weights are now, no prompt shared."""
    parts = [
        Scores(*policy.logprobs(batch, temperature), batch.rollout_logprobs)
        for batch in pack(
            [Item(rollout, 1.0, 1.0) for rollout in rollouts],
            max_tokens=MAX_TOKENS,
            share_prompts=False,
            hidden_size=policy.base.config.hidden_size,
            device=policy.device,
        )
    ]
    return Scores(*(torch.cat(values) for values in zip(*parts, strict=True)))
