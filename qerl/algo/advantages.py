"""Advantages: how much better a completion is than its group (docs/objective.md, equations 1 and 2).

P problems, G generations a problem. A reward that is NaN (a reward function failed or returned None) leaves its
sample out of the baseline and gives it advantage 0.
"""

from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL, so that tiny spreads do not explode."""


def group_spread(rewards_PG: Tensor) -> Tensor:
    """[P] largest minus smallest valid reward of each group; 0 for a group with fewer than two valid rewards."""
    low = rewards_PG.nan_to_num(nan=torch.inf).amin(dim=1)
    high = rewards_PG.nan_to_num(nan=-torch.inf).amax(dim=1)
    return (high - low).clamp(min=0).nan_to_num(nan=0.0, neginf=0.0)


def _std(values: Tensor, valid: Tensor, mean: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Unbiased standard deviation over `dim` of the valid entries; 0 where there are fewer than two."""
    squares = torch.where(valid, (values - mean) ** 2, 0.0).sum(dim, keepdim=True)
    return (squares / (valid.sum(dim, keepdim=True) - 1).clamp(min=1)).sqrt()


def group_advantages(
    rewards_PG: Tensor, scale_rewards: Literal["group", "batch", "none"]
) -> Tensor:
    """Reward minus the group's mean, divided by the chosen standard deviation.

    scale_rewards="group" is GRPO (arXiv 2402.03300, section 4.1.2); "none" is Dr.GRPO (arXiv 2503.20783, section
    3.2), whose baseline is the plain mean; "batch" divides by the standard deviation of all rewards of the step.

    Args:
        rewards_PG: [P, G] float, NaN where there is no reward.

    Returns:
        [P, G] float32; exactly 0 in groups without spread and for samples without a reward.
    """
    rewards = rewards_PG.double()
    valid = ~rewards.isnan()
    values = rewards.nan_to_num(nan=0.0)
    mean = values.sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
    advantages = values - mean
    if scale_rewards == "group":
        advantages = advantages / (_std(values, valid, mean, (1,)) + STD_EPSILON)
    elif scale_rewards == "batch":
        batch_mean = values.sum() / valid.sum().clamp(min=1)
        advantages = advantages / (_std(values, valid, batch_mean, (0, 1)) + STD_EPSILON)
    has_spread = (group_spread(rewards) > 0)[:, None]
    return torch.where(valid & has_spread, advantages, 0.0).float()
