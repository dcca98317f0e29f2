"""Rollout correction: what a token counts because it was drawn from mu and not from pi_old (docs/objective.md, eq. 8).

mu is the rollout policy: noisy, and computed with other kernels. The weight is a constant of the loss.

    token_truncate     w_t = clip(r_t, clip_min, clip_max)       r_t = pi_old(y_t) / mu(y_t)
    token_mask         w_t = r_t, 0 outside [clip_min, clip_max]
    sequence_truncate  w_t = clip(r, clip_min, clip_max)         r = product of r_t over the sequence
    sequence_mask      w_t = r, 0 outside [clip_min, clip_max]

Token truncation: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". The names
and the arithmetic are TRL's `vllm_importance_sampling_mode`. A sequence's ratio spreads with its length: at 512 tokens
a mean difference of 0.01 a token already moves it by e^5, so its statistics are logged where it is used.
"""

import torch
from torch import Tensor

from qerl.config import CorrectionConfig
from qerl.types import Microbatch


def sequence_sum(values_C: Tensor, batch: Microbatch) -> Tensor:
    """[B] sums over the scored tokens of each of the microbatch's B sequences; differentiable."""
    zeros = torch.zeros(batch.num_sequences, dtype=values_C.dtype, device=values_C.device)
    return zeros.index_add(0, batch.sequence_index, values_C)


def correction_weights(log_ratio_C: Tensor, batch: Microbatch, config: CorrectionConfig) -> Tensor:
    """[C] weights from the detached log p_trainer - log p_rollout; ones when the correction is off."""
    if config.mode == "off":
        return torch.ones_like(log_ratio_C)
    if config.is_sequence_level:
        log_ratio_C = sequence_sum(log_ratio_C, batch)[batch.sequence_index]
    ratio_C = log_ratio_C.exp()
    low, high = config.clip_min or 0.0, config.clip_max
    if config.mode.endswith("truncate"):
        return ratio_C.clamp(low, high)
    return torch.where((ratio_C >= low) & (ratio_C <= high), ratio_C, 0.0)
