"""From rollouts to microbatches: rows laid end to end under a token budget, no padding, masks from lengths.

A row is a prompt followed by the completions that share it. The prompt of a group is then processed once and not G
times; each completion sees the prompt and itself, and positions go on from the prompt's end in each of them. Sharing
costs attention (a row's tokens are compared with all of the row), so a completion joins a row only while that is less
than what repeating the prompt would cost.

The last token of a completion is scored but never fed: its hidden state would predict a token nobody sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qerl.types import Microbatch, Rollout, Row


@dataclass(frozen=True)
class Item:
    """A rollout and what its tokens count."""

    rollout: Rollout
    advantage: float
    token_weight: float
    old_logprobs: Tensor | None = None
    """[n] of the trained tokens, at the rollout weights; all items of a batch have them, or none"""
    reference_logprobs: Tensor | None = None
    """[n] likewise, under the KL reference"""

    @property
    def num_trained(self) -> int:
        """Tokens that are scored."""
        return sum(self.rollout.loss_mask)

    @property
    def num_fed(self) -> int:
        """Completion tokens that go through the model."""
        return len(self.rollout.completion_ids) - 1


@dataclass
class _Group:
    """A row while it grows."""

    items: list[Item]
    num_tokens: int

    def joins(self, item: Item, hidden_size: int) -> bool:
        """Whether the item has the row's prompt, and sharing it pays."""
        prompt_ids = self.items[0].rollout.prompt_ids
        if item.rollout.prompt_ids != prompt_ids:
            return False
        return _sharing_pays(self.num_tokens, item.num_fed, len(prompt_ids), hidden_size)


def _sharing_pays(row_tokens: int, num_fed: int, prompt_tokens: int, hidden_size: int) -> bool:
    """Whether sharing a row's prompt is cheaper than repeating it, in FLOPs of one layer.

    Repeating P prompt tokens costs about 24 P H^2 in the linears; letting c more tokens attend to and be seen by a
    row of L tokens costs 2 L c pairs of 4 H.
    """
    return row_tokens * num_fed <= 3 * hidden_size * prompt_tokens


def group_tokens(
    prompt_tokens: int, completion_tokens: int, num_completions: int, hidden_size: int
) -> int:
    """Tokens of a group with equal completions when its prompt is shared wherever that pays."""
    num_fed = completion_tokens - 1
    total = row = prompt_tokens + num_fed
    for _ in range(num_completions - 1):
        shared = _sharing_pays(row, num_fed, prompt_tokens, hidden_size)
        added = num_fed if shared else prompt_tokens + num_fed
        total, row = total + added, row + added if shared else added
    return total


@dataclass
class _Columns:
    """A microbatch's columns while they grow."""

    token_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    score_index: list[int] = field(default_factory=list)
    target_ids: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    token_weights: list[float] = field(default_factory=list)
    sequence_index: list[int] = field(default_factory=list)
    old_logprobs: list[Tensor] = field(default_factory=list)
    reference_logprobs: list[Tensor] = field(default_factory=list)
    num_sequences: int = 0

    def add_row(self, items: Sequence[Item]) -> None:
        prompt_ids = items[0].rollout.prompt_ids
        self.token_ids.extend(prompt_ids)
        self.position_ids.extend(range(len(prompt_ids)))
        last_of_prompt = len(self.token_ids) - 1
        for item in items:
            self._add_completion(item, last_of_prompt, len(prompt_ids))
        self.rows.append(Row(len(prompt_ids), tuple(item.num_fed for item in items)))

    def _add_completion(self, item: Item, last_of_prompt: int, first_position: int) -> None:
        rollout, start = item.rollout, len(self.token_ids)
        self.token_ids.extend(rollout.completion_ids[:-1])
        self.position_ids.extend(range(first_position, first_position + item.num_fed))
        scored = [t for t, is_policy_token in enumerate(rollout.loss_mask) if is_policy_token]
        # Token t is predicted by the token before it: the prompt's last one, then the completion's own.
        self.score_index.extend(start + t - 1 if t else last_of_prompt for t in scored)
        self.target_ids.extend(rollout.completion_ids[t] for t in scored)
        self.rollout_logprobs.extend(rollout.logprobs[t] for t in scored)
        self.advantages.extend([item.advantage] * len(scored))
        self.token_weights.extend([item.token_weight] * len(scored))
        self.sequence_index.extend([self.num_sequences] * len(scored))
        self.num_sequences += 1
        if item.old_logprobs is not None:
            self.old_logprobs.append(item.old_logprobs)
        if item.reference_logprobs is not None:
            self.reference_logprobs.append(item.reference_logprobs)

    def microbatch(self, device: torch.device) -> Microbatch:
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def joined(values: list[Tensor]) -> Tensor | None:
            return torch.cat(values).to(device) if values else None

        return Microbatch(
            token_ids=ints(self.token_ids),
            position_ids=ints(self.position_ids),
            rows=tuple(self.rows),
            score_index=ints(self.score_index),
            target_ids=ints(self.target_ids),
            rollout_logprobs=floats(self.rollout_logprobs),
            advantages=floats(self.advantages),
            token_weights=floats(self.token_weights),
            sequence_index=ints(self.sequence_index),
            num_sequences=self.num_sequences,
            old_logprobs=joined(self.old_logprobs),
            reference_logprobs=joined(self.reference_logprobs),
        )


def pack(
    items: Sequence[Item],
    *,
    max_tokens: int,
    share_prompts: bool,
    hidden_size: int,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Cut items, in order, into microbatches of at most `max_tokens` tokens; a longer completion goes alone.

    Completions of one prompt share it if they follow each other, `share_prompts` is set and it pays (`hidden_size` is
    the model's). An item without a trained token is left out. Nothing is yielded for no items.
    """
    groups: list[_Group] = []
    for item in items:
        if not any(item.rollout.loss_mask):
            continue
        total = sum(group.num_tokens for group in groups)
        joins = bool(groups) and share_prompts and groups[-1].joins(item, hidden_size)
        added = item.num_fed + (0 if joins else len(item.rollout.prompt_ids))
        if groups and total + added > max_tokens:
            yield _build(groups, device)
            groups, joins = [], False
        if joins:
            groups[-1].items.append(item)
            groups[-1].num_tokens += added
        else:
            groups.append(_Group([item], len(item.rollout.prompt_ids) + item.num_fed))
    if groups:
        yield _build(groups, device)


def _build(groups: Sequence[_Group], device: torch.device) -> Microbatch:
    columns = _Columns()
    for group in groups:
        columns.add_row(group.items)
    return columns.microbatch(device)
