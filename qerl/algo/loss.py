"""The policy-gradient loss (docs/objective.md, equations 4 to 7), made of ratio, advantage, correction and KL.

Everything is per scored token (C of a microbatch). The loss of a microbatch is already its share of the update's mean:
`token_weights` are counted over the whole update before it is cut, so summing the microbatches' gradients gives the
same gradient however it was cut.

While the policy that is differentiated is the one at the rollout weights, `old_logprobs` is None and stands for its own
log-probabilities, detached: the ratio is 1 and the gradient is A * w * grad log p.
"""

import torch
from torch import Tensor

from qerl.algo.correction import correction_weights, sequence_sum
from qerl.algo.kl import kl_estimate
from qerl.config import AlgoConfig, CorrectionConfig
from qerl.types import LossOutput, Microbatch


def importance_ratio(log_ratio_C: Tensor, batch: Microbatch, level: str) -> Tensor:
    """[C] pi / pi_old of the token, or of its sequence: the geometric mean of its tokens' (GSPO, arXiv 2507.18071, eq. 7)."""
    if level == "token":
        return log_ratio_C.exp()
    lengths = sequence_sum(torch.ones_like(log_ratio_C), batch)
    return (sequence_sum(log_ratio_C, batch) / lengths)[batch.sequence_index].exp()


def surrogate(
    ratio_C: Tensor, logprobs_C: Tensor, advantages_C: Tensor, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    """[C] objective of each token, and [C] bool: whether clipping took effect.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with DAPO's separate upper range and the dual clip (arXiv
    1912.09729, eq. 5); or CISPO (arXiv 2506.13585, eq. 4), which clips the ratio as a constant and keeps every token's
    gradient.
    """
    if algo.loss_type == "cispo":
        constant_C = ratio_C.detach().clamp(max=1 + algo.epsilon_high)
        return constant_C * advantages_C * logprobs_C, ratio_C > 1 + algo.epsilon_high
    clipped_C = ratio_C.clamp(1 - algo.epsilon, 1 + algo.epsilon_high) * advantages_C
    is_clipped_C = ratio_C * advantages_C > clipped_C
    bounded_C = ratio_C if algo.delta is None else ratio_C.clamp(max=algo.delta)
    return torch.minimum(bounded_C * advantages_C, clipped_C), is_clipped_C


def policy_loss(
    logprobs_C: Tensor,
    entropy_C: Tensor,
    batch: Microbatch,
    algo: AlgoConfig,
    correction: CorrectionConfig,
) -> LossOutput:
    """A microbatch's share of the loss.

    Args:
        logprobs_C: [C] log-probabilities under the policy being trained, with gradient.
        entropy_C: [C] entropies of the next-token distributions, for the metrics only.
    """
    old_C = logprobs_C.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio_C = importance_ratio(logprobs_C - old_C, batch, algo.importance_sampling_level)
    objective_C, is_clipped_C = surrogate(ratio_C, logprobs_C, batch.advantages, algo)
    raw_log_ratio_C = old_C - batch.rollout_logprobs
    weight_C = correction_weights(raw_log_ratio_C, batch, correction)
    token_loss_C = -objective_C * weight_C
    sums = {}
    if batch.reference_logprobs is not None:
        kl_C = kl_estimate(logprobs_C, batch.reference_logprobs, algo.kl_estimator)
        token_loss_C = token_loss_C + algo.beta * kl_C
        sums["kl"] = kl_C
    weighted_C = token_loss_C * batch.token_weights
    loss = weighted_C.sum()
    with torch.no_grad():
        raw_C = raw_log_ratio_C.exp()
        sums |= {
            "loss": weighted_C,
            "tokens": torch.ones_like(raw_C),
            "entropy": entropy_C,
            "clipped": is_clipped_C,
            "logp_difference": raw_log_ratio_C.abs(),
            "mult_prob_error": raw_log_ratio_C.abs().exp(),
            "raw": raw_C,
            "raw_squared": raw_C**2,
            "above": raw_C > correction.clip_max,
            "below": raw_C < (correction.clip_min or 0.0),
            "weight": weight_C,
        }
        maxima = {"raw": raw_C, "logp_difference": raw_log_ratio_C.abs(), "weight": weight_C}
        if correction.is_sequence_level:
            sequence_B = sequence_sum(raw_log_ratio_C, batch).exp()
            sums |= {
                "sequences": torch.ones_like(sequence_B),
                "sequence_raw": sequence_B,
                "sequences_above": sequence_B > correction.clip_max,
                "sequences_below": sequence_B < (correction.clip_min or 0.0),
            }
            maxima["sequence_raw"] = sequence_B
        return LossOutput(
            loss=loss,
            sums=_numbers({name: value.double().sum() for name, value in sums.items()}),
            maxima=_numbers({name: value.double().max() for name, value in maxima.items()}),
        )


def _numbers(values: dict[str, Tensor]) -> dict[str, float]:
    """Scalars as floats, in one transfer from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
