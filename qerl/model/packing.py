"""From rollouts to microbatches: sequences laid end to end under a token budget, no padding, masks from lengths.

The last token of a sequence is scored but never fed: its hidden state would predict a token nobody sampled.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qerl.types import Microbatch, Rollout


def pack(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    token_weights: Sequence[float],
    max_tokens: int,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Cut sequences, in order, into microbatches of at most `max_tokens` tokens; a longer one goes alone.

    `advantages` and `token_weights` have one value a rollout. A rollout without a trained token is left out.
    """
    chosen: list[int] = []
    num_tokens = 0
    for index, rollout in enumerate(rollouts):
        if not any(rollout.loss_mask):
            continue
        length = len(rollout.prompt_ids) + len(rollout.completion_ids) - 1
        if chosen and num_tokens + length > max_tokens:
            yield _microbatch([(rollouts[i], advantages[i], token_weights[i]) for i in chosen], device)
            chosen, num_tokens = [], 0
        chosen.append(index)
        num_tokens += length
    if chosen:
        yield _microbatch([(rollouts[i], advantages[i], token_weights[i]) for i in chosen], device)


def _microbatch(items: list[tuple[Rollout, float, float]], device: torch.device) -> Microbatch:
    tokens, positions, lengths = [], [], []
    score, targets, sequence, behaviour, advantage, weight = [], [], [], [], [], []
    start = 0
    for index, (rollout, rollout_advantage, token_weight) in enumerate(items):
        ids = rollout.prompt_ids + rollout.completion_ids
        first = len(rollout.prompt_ids) - 1
        scored = [t for t, is_policy_token in enumerate(rollout.loss_mask) if is_policy_token]
        tokens.extend(ids[:-1])
        positions.extend(range(len(ids) - 1))
        lengths.append(len(ids) - 1)
        score.extend(start + first + t for t in scored)
        targets.extend(rollout.completion_ids[t] for t in scored)
        sequence.extend([index] * len(scored))
        behaviour.extend(rollout.logprobs[t] for t in scored)
        advantage.extend([rollout_advantage] * len(scored))
        weight.extend([token_weight] * len(scored))
        start += len(ids) - 1

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return Microbatch(
        token_ids=ints(tokens),
        position_ids=ints(positions),
        sequence_lengths=tuple(lengths),
        score_index=ints(score),
        target_ids=ints(targets),
        sequence_index=ints(sequence),
        rollout_logprobs=floats(behaviour),
        advantages=floats(advantage),
        token_weights=floats(weight),
    )
