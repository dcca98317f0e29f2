"""Metrics of a step from the sums of its microbatches, under CONVENTIONS' keys."""

from collections.abc import Sequence

from qerl.types import LossOutput


def loss_metrics(outputs: Sequence[LossOutput], num_updates: int = 1) -> dict[str, float]:
    """Means over all trained tokens of all updates of a step; empty when nothing was trained on.

    `loss` is the mean of the updates' losses. sampling/ratio_raw/* are statistics of p_trainer / p_rollout before any
    bound is applied: ess is Kish's effective sample size as a share of the tokens, frac_truncated the share above
    clip_max and frac_below the share under clip_min, whatever the mode does with them. sequence_* are those of whole
    sequences, for the modes that use them. token_mult_prob_error is mean exp|log p_trainer - log p_rollout|.
    """
    if not outputs:
        return {}
    total = {key: sum(output.sums[key] for output in outputs) for key in outputs[0].sums}
    largest = {key: max(output.maxima[key] for output in outputs) for key in outputs[0].maxima}
    n = total["tokens"]
    metrics = {
        "loss": total["loss"] / num_updates,
        "entropy": total["entropy"] / n,
        "clip_ratio/region_mean": total["clipped"] / n,
        "sampling/sampling_logp_difference/mean": total["logp_difference"] / n,
        "sampling/sampling_logp_difference/max": largest["logp_difference"],
        "sampling/importance_sampling_ratio/mean": total["weight"] / n,
        "sampling/importance_sampling_ratio/max": largest["weight"],
        "sampling/ratio_raw/mean": total["raw"] / n,
        "sampling/ratio_raw/max": largest["raw"],
        "sampling/ratio_raw/ess": total["raw"] ** 2 / (n * total["raw_squared"]),
        "sampling/ratio_raw/frac_truncated": total["above"] / n,
        "sampling/ratio_raw/frac_below": total["below"] / n,
        "sampling/token_mult_prob_error": total["mult_prob_error"] / n,
    }
    if "kl" in total:
        metrics["kl"] = total["kl"] / n
    if "sequences" in total:
        num_sequences = total["sequences"]
        metrics |= {
            "sampling/ratio_raw/sequence_mean": total["sequence_raw"] / num_sequences,
            "sampling/ratio_raw/sequence_max": largest["sequence_raw"],
            "sampling/ratio_raw/sequence_frac_truncated": total["sequences_above"] / num_sequences,
            "sampling/ratio_raw/sequence_frac_below": total["sequences_below"] / num_sequences,
        }
    return metrics
