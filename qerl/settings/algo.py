"""Settings of the objective: advantages, loss, KL, correction, and which of them contradict each other.

A contradiction is refused with its reason before any work; the equations are in docs/objective.md. Imports no torch.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qerl.settings.base import Positive, Section, aliases


class AlgoConfig(Section):
    """Advantages and loss (docs/objective.md has the equations)."""

    advantage: Literal["grpo", "rloo"] = "grpo"
    """Baseline of a reward: the mean of its group (grpo), or of the group's other completions (rloo)."""
    scale_rewards: Annotated[
        Literal["group", "batch", "none"], aliases(true="group", false="none")
    ] = "group"
    """Standard deviation that advantages are divided by: the group's (GRPO), the batch's, or none (Dr.GRPO). rloo: none."""
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "gspo"] = "dapo"
    """How token losses are averaged, and for cispo and gspo the loss itself (docs/objective.md)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or one a sequence: the mean of its log-ratios (GSPO). gspo: sequence."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip range of the probability ratio; cispo has no lower bound."""
    epsilon_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip range (DAPO's clip-higher): ratios above 1 + epsilon_high are clipped. (TRL's cispo: without the 1 +.)"""
    delta: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: largest ratio that a negative advantage is multiplied with. Default: no bound."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the policy that training started from; 0: no reference is computed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence and of its gradient (docs/objective.md); k3 is TRL's."""
    skip_zero_advantage: bool | None = None
    """Leave out sequences whose advantage is 0. Default: on where that is exact, which it is while beta is 0."""
    mask_truncated_completions: bool = False
    """Do not train on completions cut by max_completion_length; their rewards still count in the baseline."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Largest penalty on the reward of a long completion, rising over the last overlong_buffer tokens (DAPO: 1); 0: none."""
    overlong_buffer: Positive | None = None
    """Tokens before max_completion_length over which the penalty rises. Default: a fifth of it."""
    num_iterations: Positive = 1
    """Passes over each batch of rollouts."""
    num_minibatches: Positive = 1
    """Updates in a pass: the batch's groups are cut into so many equal parts, an optimizer step each."""

    @model_validator(mode="before")
    @classmethod
    def _follow(cls, values: Any) -> Any:
        """Defaults that are part of a named method."""
        if not isinstance(values, dict):
            return values
        implied = {}
        if values.get("advantage") == "rloo":
            implied["scale_rewards"] = "none"
        if values.get("loss_type") == "gspo":
            implied["importance_sampling_level"] = "sequence"
        return implied | values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        reasons = (
            (
                self.advantage == "rloo" and self.scale_rewards == "group",
                "advantage=rloo with scale_rewards=group is grpo times a constant: set scale_rewards to none or batch",
            ),
            (
                self.loss_type == "gspo" and self.importance_sampling_level == "token",
                "loss_type=gspo is the sequence-level ratio: leave importance_sampling_level out, or set "
                "loss_type=grpo for the ratio of each token",
            ),
            (
                self.loss_type == "cispo" and self.importance_sampling_level == "sequence",
                "loss_type=cispo weights each token with its own ratio: importance_sampling_level=sequence has no "
                "meaning there",
            ),
            (
                self.loss_type == "cispo" and self.delta is not None,
                "delta bounds the clipped surrogate, and loss_type=cispo has none: its ratio is bounded by epsilon_high",
            ),
            (
                self.delta is not None and self.delta <= 1 + self.epsilon_high,
                f"delta={self.delta} must be above 1 + epsilon_high = {1 + self.epsilon_high:g}: it is the outer bound",
            ),
            (
                self.beta > 0 and self.skip_zero_advantage is True,
                f"beta={self.beta:g} with skip_zero_advantage: a sequence of advantage 0 still has a KL gradient, so "
                "it cannot be left out; drop one of the two",
            ),
            (
                self.beta == 0 and self.kl_estimator != "k3",
                f"kl_estimator={self.kl_estimator} has no effect while beta is 0: set beta too",
            ),
            (
                self.overlong_buffer is not None and self.overlong_penalty == 0,
                "overlong_buffer has no effect while overlong_penalty is 0: set it too (DAPO: 1)",
            ),
        )
        for contradicts, reason in reasons:
            if contradicts:
                raise ValueError(reason)
        return self

    def check_sizes(self, prompts_per_step: int, max_completion_length: int) -> None:
        """Raise ValueError where a setting does not fit the batch that it is about."""
        if prompts_per_step % self.num_minibatches:
            raise ValueError(
                f"num_minibatches={self.num_minibatches} must divide prompts_per_step={prompts_per_step}: a minibatch "
                "is a whole number of groups"
            )
        if self.overlong_buffer is not None and self.overlong_buffer > max_completion_length:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is longer than max_completion_length={max_completion_length}"
            )

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether sequences of advantage 0 are left out of the update."""
        return self.beta == 0 if self.skip_zero_advantage is None else self.skip_zero_advantage

    @property
    def num_updates(self) -> int:
        """Optimizer steps a batch of rollouts."""
        return self.num_iterations * self.num_minibatches


class CorrectionConfig(Section):
    """Importance correction for the rollout policy not being exactly the trained one."""

    mode: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """What a loss is multiplied with: p_trainer / p_rollout of the token or sequence, cut to the bounds (truncate) or 0 outside them (mask). (TRL's default: sequence_mask with clip_max 3.)"""
    clip_max: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the ratio."""
    clip_min: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower bound of the ratio. Default: none."""

    @model_validator(mode="after")
    def _bounds_mean_something(self) -> Self:
        if self.mode == "off" and self.clip_min is not None:
            raise ValueError("correction.clip_min has no effect with correction.mode=off")
        if self.clip_min is not None and self.clip_min >= self.clip_max:
            raise ValueError(
                f"correction.clip_min={self.clip_min:g} must be below clip_max={self.clip_max:g}"
            )
        return self

    @property
    def is_sequence_level(self) -> bool:
        """Whether the ratio is the sequence's, the product over its tokens."""
        return self.mode.startswith("sequence")
