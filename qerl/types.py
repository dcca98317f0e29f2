"""The data that flows through a training step: shapes, no behaviour.

Shape letters used in the whole package: P problems a step, G generations a problem, T tokens of a packed
microbatch, C completion tokens of it (the ones that are scored), V vocabulary, H hidden size, N x K a weight matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # reward workers import this module and must start without torch
    from torch import Tensor

Message = dict[str, str]
"""{"role": ..., "content": ...}, as chat templates take it."""


@dataclass(frozen=True)
class Problem:
    """One row of a task."""

    id: str
    """Stable across runs and machines: a hash of the text, or the row number of the data set."""
    prompt: str | list[Message]
    answer: str | None
    columns: dict[str, Any] = field(default_factory=dict)
    """Every other data column, handed to reward functions by name."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the seeds of its samples."""

    problem_id: str
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 63-bit seed a sample; `len(seeds)` completions are generated."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float
    max_completion_length: int
    eos_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class NoiseDraw:
    """One draw of adaptive quantization noise: everything that determines it."""

    sigma: float
    seed: int
    step: int
    norm_dtype: Literal["float32", "bfloat16"] = "float32"
    """What clean + noise is rounded to"""


@dataclass(frozen=True)
class Rollout:
    """One sampled completion, in tokens. What was sampled is what is trained on."""

    problem_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """Includes the end-of-sequence token when one was sampled."""
    logprobs: tuple[float, ...]
    """Log-probability of each completion token under the distribution it was really drawn from."""
    loss_mask: tuple[bool, ...]
    """False where a token was not sampled by the policy (tool output, later); such tokens are not trained on."""
    finish_reason: Literal["stop", "length"]
    version: int
    """Number of training steps in the weights that sampled it."""


@dataclass(frozen=True)
class Row:
    """Tokens that may see each other: a prefix, and branches that each see the prefix and themselves, causally."""

    prefix: int
    """Tokens of the prefix"""
    branches: tuple[int, ...] = ()
    """Tokens of each branch, which follow the prefix one after the other"""

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.branches)


@dataclass(frozen=True)
class Microbatch:
    """Rows laid end to end, without padding, and what the loss needs of each scored token."""

    token_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64: from 0 in each prefix, going on from its end in each branch"""
    rows: tuple[Row, ...]
    """What may see what; their tokens sum to T."""
    score_index: Tensor
    """[C] int64 into T: the position whose hidden state predicts the scored token."""
    target_ids: Tensor
    """[C] int64, the scored tokens"""
    rollout_logprobs: Tensor
    """[C] float32, behaviour log-probabilities"""
    advantages: Tensor
    """[C] float32, the sequence's advantage at each of its tokens"""
    token_weights: Tensor
    """[C] float32: what one token's loss counts in the mean. Counted over the whole update before it is cut, so the
    gradient does not depend on the cut."""
    sequence_index: Tensor
    """[C] int64: which of the microbatch's sequences the token belongs to; a sequence is never cut"""
    num_sequences: int
    old_logprobs: Tensor | None
    """[C] log-probabilities at the rollout weights; None: they are the ones that the update computes"""
    reference_logprobs: Tensor | None
    """[C] log-probabilities under the KL reference; None: there is no KL term"""


@dataclass(frozen=True)
class LossOutput:
    """A microbatch's share of the batch loss, and sums from which the batch metrics are made."""

    loss: Tensor
    """Scalar, with gradient"""
    sums: dict[str, float]
    maxima: dict[str, float]
