"""What a step learns from its rollouts: minibatches, log-probabilities that are needed once, optimizer steps.

The batch's groups are cut into `num_minibatches` updates, and these are made `num_iterations` times. All updates of a
step have one learning rate, since schedule and noise are addressed by the step; AdamW counts its updates itself. An
update whose loss or gradient is not finite is skipped: adapter and optimizer stay as they were.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from qerl.algo.aggregation import sequence_weights
from qerl.algo.loss import policy_loss
from qerl.algo.loss_metrics import loss_metrics
from qerl.config import Config
from qerl.errors import RunError
from qerl.heartbeat import beat
from qerl.metrics import say
from qerl.model.packing import Item, pack
from qerl.model.policy import Policy
from qerl.optim import clip_gradients, learning_rate_at, set_learning_rate
from qerl.rollout import Batch
from qerl.run import Run
from qerl.types import LossOutput, Microbatch, NoiseDraw


@dataclass
class Outcome:
    """What the updates of a step came to. State: grows while they are made."""

    outputs: list[LossOutput] = field(default_factory=list)
    """Of the updates that were made, as are the gradient norms"""
    grad_norms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why updates were skipped"""


def update(
    run: Run,
    step: int,
    batch: Batch,
    rewards_PG: Tensor,
    advantages_PG: Tensor,
    noise: NoiseDraw | None,
) -> dict[str, float]:
    """The optimizer steps on a batch; returns their metrics.

    Samples without a reward are not part of the batch. Sequences whose advantage is 0 count in the denominators and,
    where their gradient is 0 too, are otherwise left out; if all are, the optimizer still steps, as it would have with
    them.
    """
    config, outcome = run.config, Outcome()
    noise = noise if config.noise.scope == "both" else None
    learning_rate = learning_rate_at(step, run.num_steps, config.train)
    set_learning_rate(run.optimizer, learning_rate)
    minibatches: list[list[Item]] = []
    if problem := unusable(rewards_PG):
        outcome.problems.append(problem)
    else:
        groups = trained_groups(step, batch, rewards_PG, advantages_PG)
        minibatches = with_logprobs(run, cut_into_minibatches(groups, config), noise)
    for _ in range(config.algo.num_iterations):
        for items in minibatches:
            update_once(run, items, noise, outcome)
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if outcome.problems else 0
    if outcome.problems:
        say(f"warning: step {step + 1}: an update was skipped: {outcome.problems[-1]}")
    chosen = [item for items in minibatches for item in items]
    return {
        **loss_metrics(outcome.outputs, len(outcome.grad_norms)),
        "grad_norm": _mean(outcome.grad_norms),
        "adapter_norm": adapter_norm(run.policy),
        "learning_rate": learning_rate,
        "num_updates": len(outcome.grad_norms),
        "num_updates_skipped": len(outcome.problems),
        "frac_sequences_trained": len(chosen) / advantages_PG.numel(),
        "num_tokens_trained": sum(item.num_trained for item in chosen),
    }


@torch.no_grad()
def adapter_norm(policy: Policy) -> float:
    """Euclidean norm of all adapter matrices: it moves as long as something is learnt."""
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    return torch.nn.utils.get_total_norm(parameters).item()


def stop_if_stuck(run: Run, done: int) -> None:
    """Raise RunError when the last `max_skipped_steps` of the `done` steps each had an update skipped."""
    count = run.skipped_in_a_row
    if count >= run.config.train.max_skipped_steps:
        raise RunError(
            "update",
            f"the last {count} steps each had an update skipped because loss, gradient or rewards were not finite; "
            f"it began at step {done - count + 1}: look at metrics.jsonl and completions/{done - count + 1}.parquet, "
            "or lower the learning rate in a new --run-dir",
        )


def unusable(rewards_PG: Tensor) -> str | None:
    """Why a step's rewards teach nothing; None if they can be used. NaN is a sample without a reward."""
    if bool(rewards_PG.isinf().any()):
        return "a reward is infinite"
    if bool(rewards_PG.isnan().all()):
        return "no completion has a reward"
    return None


def trained_groups(
    step: int, batch: Batch, rewards_PG: Tensor, advantages_PG: Tensor
) -> list[list[Item]]:
    """The samples that have a reward, group by group, not yet weighted. Raises RunError for stale rollouts."""
    groups = [
        [
            Item(rollout, advantage, token_weight=0.0)
            for rollout, reward, advantage in zip(*row, strict=True)
            if not math.isnan(reward)
        ]
        for row in zip(batch.rollouts, rewards_PG.tolist(), advantages_PG.tolist(), strict=True)
    ]
    if stale := {item.rollout.version for group in groups for item in group} - {step}:
        raise RunError("update", f"rollouts of versions {sorted(stale)} in step {step}")
    return [group for group in groups if group]


def cut_into_minibatches(groups: Sequence[list[Item]], config: Config) -> list[list[Item]]:
    """The groups as at most `num_minibatches` parts, in order, as equal as can be; their items weighted.

    Weights count all of a part's sequences; what cannot contribute to the gradient is then left out.
    """
    algo = config.algo
    size = math.ceil(len(groups) / algo.num_minibatches)
    parts = [
        [item for group in groups[start : start + size] for item in group]
        for start in range(0, len(groups), size)
    ]
    lengths = [[_num_tokens(item, config) for item in part] for part in parts]
    minibatches = []
    for part, num_tokens in zip(parts, lengths, strict=True):
        weights = sequence_weights(
            num_tokens,
            algo.loss_type,
            config.rollout.max_completion_length,
            tokens_per_update=sum(map(sum, lengths)) / len(parts),
        )
        minibatches.append(
            [
                replace(item, token_weight=weight)
                for item, weight in zip(part, weights, strict=True)
                if weight and (item.advantage or not algo.skips_zero_advantage)
            ]
        )
    return minibatches


def with_logprobs(
    run: Run, minibatches: Sequence[list[Item]], noise: NoiseDraw | None
) -> list[list[Item]]:
    """The items with what is computed once a batch: log-probabilities at the rollout weights and under the reference.

    Neither is computed unless it is needed: with a single update the former are the ones that it computes itself, and
    without a KL term there is no reference. The reference is read under the same noise as the policy, so that the
    divergence is that of the adapters alone.
    """
    needs_old = run.config.algo.num_iterations * len(minibatches) > 1
    needs_reference = run.config.algo.beta > 0
    items = [item for part in minibatches for item in part]
    if needs_old:
        values = token_logprobs(run, items, noise, nullcontext())
        items = [replace(i, old_logprobs=v) for i, v in zip(items, values, strict=True)]
    if needs_reference:
        values = token_logprobs(run, items, noise, run.policy.reference())
        items = [replace(i, reference_logprobs=v) for i, v in zip(items, values, strict=True)]
    remaining = iter(items)
    return [[next(remaining) for _ in part] for part in minibatches]


@torch.no_grad()
def token_logprobs(
    run: Run,
    items: Sequence[Item],
    noise: NoiseDraw | None,
    weights: AbstractContextManager[None],
) -> list[Tensor]:
    """Log-probabilities of each item's trained tokens, [n] each, with the policy's weights as the context makes them."""
    temperature = run.config.rollout.temperature
    with weights, run.policy.noise(noise):
        parts = [run.policy.logprobs(batch, temperature)[0] for batch in microbatches(run, items)]
    lengths = [item.num_trained for item in items]
    return list(torch.cat(parts).split(lengths)) if parts else []


def update_once(run: Run, items: Sequence[Item], noise: NoiseDraw | None, outcome: Outcome) -> None:
    """One optimizer step, unless its loss or gradient is not finite."""
    outputs = accumulate_gradients(run, items, noise)
    parameters = [parameter for _, parameter in run.policy.trainable_parameters()]
    grad_norm = clip_gradients(parameters, run.config.train.max_grad_norm)
    loss = sum(output.sums["loss"] for output in outputs)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        outcome.problems.append(f"loss {loss:g}, gradient norm {grad_norm:g}")
        return
    run.optimizer.step()
    outcome.outputs += outputs
    outcome.grad_norms.append(grad_norm)


def accumulate_gradients(
    run: Run, items: Sequence[Item], noise: NoiseDraw | None
) -> list[LossOutput]:
    """Forward and backward over the items in packed microbatches; gradients start from zero."""
    config, policy = run.config, run.policy
    for _, parameter in policy.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    outputs = []
    with policy.noise(noise):
        for batch in microbatches(run, items):
            beat()
            logprobs, entropy = policy.logprobs(batch, config.rollout.temperature)
            output = policy_loss(logprobs, entropy, batch, config.algo, config.correction)
            output.loss.backward()
            outputs.append(replace(output, loss=output.loss.detach()))
    return outputs


def microbatches(run: Run, items: Sequence[Item]) -> Iterator[Microbatch]:
    """The items cut to the token budget of a forward pass."""
    return pack(
        items,
        max_tokens=run.memory.sizes.max_tokens_per_microbatch,
        share_prompts=run.config.train.share_prompts,
        hidden_size=run.policy.base.config.hidden_size,
        device=run.policy.device,
    )


def _num_tokens(item: Item, config: Config) -> int:
    """Tokens that count; none of a completion that was cut, if those are masked."""
    is_cut = item.rollout.finish_reason == "length"
    return 0 if is_cut and config.algo.mask_truncated_completions else item.num_trained


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
