"""The clipped policy-gradient loss, its aggregation and the rollout correction (docs/objective.md, equations 3 to 6).

Everything is per scored token (C of a microbatch). The loss of a microbatch is already its share of the batch mean:
`token_weights` are counted over the whole batch before it is cut, so summing the microbatches' gradients gives the
batch gradient however the batch was cut.

With one update per batch the policy that is differentiated is the policy at the rollout weights, so the old
log-probabilities are the current ones, detached: the ratio is 1 and the gradient is A * w * grad log p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.config import AlgoConfig, CorrectionConfig
from qerl.types import LossOutput, Microbatch


def sequence_weights(
    num_tokens: Sequence[int], loss_type: str, max_completion_length: int
) -> list[float]:
    """What one token of each sequence counts in the batch loss; `num_tokens` are the scored tokens of ALL sequences.

    grpo     1 / (S * n_i)     mean over a sequence's tokens, then over the S sequences (arXiv 2402.03300, eq. 3)
    dapo     1 / sum_j n_j     mean over all tokens of the batch (arXiv 2503.14476, eq. 8)
    dr_grpo  1 / (S * L_max)   a constant length, so long answers are not favoured (arXiv 2503.20783)
    """
    num_sequences, total = len(num_tokens), sum(num_tokens)
    if loss_type == "grpo":
        return [1 / (num_sequences * n) if n else 0.0 for n in num_tokens]
    if loss_type == "dapo":
        return [1 / total if total else 0.0] * num_sequences
    if loss_type == "dr_grpo":
        return [1 / (num_sequences * max_completion_length)] * num_sequences
    raise ValueError(f"loss_type {loss_type!r} has no aggregation")


def correction_weights(log_ratio_C: Tensor, config: CorrectionConfig) -> Tensor:
    """[C] weights w = min(exp(log p_trainer - log p_rollout), C); ones when the correction is off.

    Truncated importance sampling per token (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). `log_ratio_C` is detached: the weight is a constant of the loss.
    """
    if config.mode == "off":
        return torch.ones_like(log_ratio_C)
    return log_ratio_C.exp().clamp(max=config.clip_max)


def policy_loss(
    logprobs_C: Tensor,
    entropy_C: Tensor,
    batch: Microbatch,
    algo: AlgoConfig,
    correction: CorrectionConfig,
    old_logprobs_C: Tensor | None = None,
) -> LossOutput:
    """Clipped surrogate (PPO, arXiv 1707.06347, eq. 7, with DAPO's separate upper range), weighted for the rollout.

    Args:
        logprobs_C: [C] log-probabilities under the policy being trained, with gradient.
        entropy_C: [C] entropies of the next-token distributions, for the metrics only.
        old_logprobs_C: [C] log-probabilities at the rollout weights; None means they are the current ones.
    """
    old_logprobs_C = logprobs_C.detach() if old_logprobs_C is None else old_logprobs_C
    ratio_C = (logprobs_C - old_logprobs_C).exp()
    clipped_C = ratio_C.clamp(1 - algo.epsilon, 1 + algo.epsilon_high)
    surrogate_C = torch.minimum(ratio_C * batch.advantages, clipped_C * batch.advantages)
    raw_log_ratio_C = old_logprobs_C - batch.rollout_logprobs
    weight_C = correction_weights(raw_log_ratio_C, correction)
    loss = -(surrogate_C * weight_C * batch.token_weights).sum()
    with torch.no_grad():
        raw_C = raw_log_ratio_C.exp()
        is_clipped_C = ratio_C * batch.advantages > clipped_C * batch.advantages
        sums = {
            "loss": -surrogate_C * weight_C * batch.token_weights,
            "tokens": torch.ones_like(raw_C),
            "entropy": entropy_C,
            "clipped": is_clipped_C,
            "logp_difference": raw_log_ratio_C.abs(),
            "mult_prob_error": raw_log_ratio_C.abs().exp(),
            "raw": raw_C,
            "raw_squared": raw_C**2,
            "truncated": raw_C > correction.clip_max,
            "weight": weight_C,
        }
        maxima = {"raw": raw_C, "logp_difference": raw_log_ratio_C.abs(), "weight": weight_C}
        return LossOutput(
            loss=loss,
            sums={name: value.double().sum().item() for name, value in sums.items()},
            maxima={name: value.double().max().item() for name, value in maxima.items()},
        )


def loss_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Batch metrics from the microbatches' sums, under CONVENTIONS' keys; empty when nothing was trained on.

    ratio_raw/* are statistics of p_trainer / p_rollout before any truncation; ess is Kish's effective sample size as
    a share of the tokens; token_mult_prob_error is mean exp|log p_trainer - log p_rollout|.
    """
    if not outputs:
        return {}
    total = {key: sum(output.sums[key] for output in outputs) for key in outputs[0].sums}
    largest = {key: max(output.maxima[key] for output in outputs) for key in outputs[0].maxima}
    n = total["tokens"]
    return {
        "loss": total["loss"],
        "entropy": total["entropy"] / n,
        "clip_ratio/region_mean": total["clipped"] / n,
        "sampling/sampling_logp_difference/mean": total["logp_difference"] / n,
        "sampling/sampling_logp_difference/max": largest["logp_difference"],
        "sampling/importance_sampling_ratio/mean": total["weight"] / n,
        "sampling/importance_sampling_ratio/max": largest["weight"],
        "sampling/ratio_raw/mean": total["raw"] / n,
        "sampling/ratio_raw/max": largest["raw"],
        "sampling/ratio_raw/ess": total["raw"] ** 2 / (n * total["raw_squared"]),
        "sampling/ratio_raw/frac_truncated": total["truncated"] / n,
        "sampling/token_mult_prob_error": total["mult_prob_error"] / n,
    }
