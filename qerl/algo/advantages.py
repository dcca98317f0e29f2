"""Advantages: how much better a completion is than its group (docs/objective.md, equations 1 to 3).

P problems, G generations a problem. A reward that is NaN (a reward function failed or returned None) leaves its
sample out of the baseline and gives it advantage 0.

Rewards of a group count as equal when they differ by no more than 1e-8 + 1e-6 * |largest|. Sums of reward terms are
rounded (0.1 + 0.2 is not 0.3), and dividing such a difference by its own deviation would make a full-sized advantage
out of nothing; 1e-6 is above what fp32 reward models round to, and below any difference that was meant.
"""

from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL, so that tiny spreads do not explode."""
EQUAL_ATOL, EQUAL_RTOL = 1e-8, 1e-6
"""Rewards that differ by less are equal."""


def group_spread(rewards_PG: Tensor) -> Tensor:
    """[P] largest minus smallest valid reward of each group; exactly 0 where all are equal or fewer than two are valid."""
    low = rewards_PG.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amin(dim=1)
    high = rewards_PG.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(dim=1)
    spread = (high - low).clamp(min=0)
    tolerance = EQUAL_ATOL + EQUAL_RTOL * torch.maximum(high.abs(), low.abs())
    num_valid = (~rewards_PG.isnan()).sum(1)
    return torch.where((num_valid > 1) & (spread > tolerance), spread, 0.0)


def overlong_penalties(lengths_PG: Tensor, max_length: int, buffer: int, penalty: float) -> Tensor:
    """[P, G] what is added to the rewards: 0 up to max_length - buffer tokens, then falling linearly to -penalty.

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), times `penalty`; TRL's get_soft_overlong_punishment.
    """
    into_buffer = (lengths_PG - (max_length - buffer)).clamp(0, buffer)
    return -penalty * into_buffer / buffer


def _std(values: Tensor, valid: Tensor, mean: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Unbiased standard deviation over `dim` of the valid entries; 0 where there are fewer than two."""
    squares = torch.where(valid, (values - mean) ** 2, 0.0).sum(dim, keepdim=True)
    return (squares / (valid.sum(dim, keepdim=True) - 1).clamp(min=1)).sqrt()


def group_advantages(
    rewards_PG: Tensor,
    scale_rewards: Literal["group", "batch", "none"],
    advantage: Literal["grpo", "rloo"] = "grpo",
) -> Tensor:
    """Reward minus a baseline, divided by the chosen standard deviation.

    The baseline is the group's mean, or with advantage="rloo" the mean of the group's other completions (Ahmadian et
    al., arXiv 2402.14740), which is the same difference times n / (n - 1). scale_rewards="group" is GRPO (arXiv
    2402.03300, section 4.1.2); "none" is Dr.GRPO (arXiv 2503.20783, section 3.2); "batch" divides by the standard
    deviation of all rewards of the step.

    Args:
        rewards_PG: [P, G] float, NaN where there is no reward.

    Returns:
        [P, G] float32; exactly 0 in groups without spread and for samples without a reward.
    """
    rewards = rewards_PG.double()
    valid = ~rewards.isnan()
    num_valid = valid.sum(1, keepdim=True)
    values = rewards.nan_to_num(nan=0.0)
    mean = values.sum(1, keepdim=True) / num_valid.clamp(min=1)
    advantages = values - mean
    if advantage == "rloo":
        advantages = advantages * num_valid / (num_valid - 1).clamp(min=1)
    if scale_rewards == "group":
        advantages = advantages / (_std(values, valid, mean, (1,)) + STD_EPSILON)
    elif scale_rewards == "batch":
        batch_mean = values.sum() / valid.sum().clamp(min=1)
        advantages = advantages / (_std(values, valid, batch_mean, (0, 1)) + STD_EPSILON)
    has_spread = (group_spread(rewards) > 0)[:, None]
    return torch.where(valid & has_spread, advantages, 0.0).float()
