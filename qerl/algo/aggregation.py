"""What one token counts in the loss of an update (docs/objective.md, equations 12 to 15).

The weights are counted over all sequences of the update before it is cut into microbatches, so the gradient does not
depend on the cut.
"""

from collections.abc import Sequence


def sequence_weights(
    num_tokens: Sequence[int],
    loss_type: str,
    max_completion_length: int,
    *,
    tokens_per_update: float | None = None,
) -> list[float]:
    """The weight of each token of each sequence of one update.

    grpo, gspo    1 / (S * n_i)     mean over a sequence's tokens, then over the S sequences (arXiv 2402.03300, eq. 3)
    bnpo          1 / sum_j n_j     mean over the tokens of this update
    dapo, cispo   1 / N             mean over the tokens of the batch (arXiv 2503.14476, eq. 8)
    dr_grpo       1 / (S * L_max)   a constant length, so long answers are not favoured (arXiv 2503.20783)

    Args:
        num_tokens: the trained tokens of ALL sequences of the update, skipped ones too; 0 where all are masked.
        tokens_per_update: N: tokens of the whole batch over its number of minibatches; None: the batch is one update.

    Returns:
        One weight a sequence; 0 for a sequence without tokens.
    """
    num_sequences, total = len(num_tokens), sum(num_tokens)
    match loss_type:
        case "grpo" | "gspo":
            return [1 / (num_sequences * n) if n else 0.0 for n in num_tokens]
        case "bnpo":
            denominator = float(total)
        case "dapo" | "cispo":
            denominator = total if tokens_per_update is None else tokens_per_update
        case "dr_grpo":
            denominator = num_sequences * max_completion_length
        case _:
            raise ValueError(f"loss_type {loss_type!r} has no aggregation")
    return [1 / denominator if n else 0.0 for n in num_tokens]
