"""THE loop: reinforcement learning of a LoRA adapter, one page.

One step: sample completions of a few problems from the (noisy) rollout policy, score them, turn scores into
advantages within each group, and take one optimizer step on the clipped policy-gradient loss, corrected for the
rollout policy not being exactly the trained one. Design: ARCHITECTURE.md; equations: docs/objective.md.

Steps are numbered by the optimizer steps already taken. All randomness is addressed by (seed, step, what), so the only
state of a run is the adapter, the optimizer and the step number, and a resumed run equals an uninterrupted one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qerl.algo.advantages import group_advantages, group_spread
from qerl.algo.loss import loss_metrics, policy_loss, sequence_weights
from qerl.algo.noise import noise_at
from qerl.errors import RunError
from qerl.evaluation import Evaluation, evaluate_policy
from qerl.metrics import PhaseTimer
from qerl.model.packing import Item, pack
from qerl.optim import clip_gradients, learning_rate_at, set_learning_rate
from qerl.rollout import Batch, completion_rows, generate, score
from qerl.run import Run
from qerl.tasks.rewards import total_rewards
from qerl.types import LossOutput, NoiseDraw


def train(run: Run) -> None:
    """Run all steps that are left, with evaluations, checkpoints and metrics."""
    config = run.config
    if run.first_step == 0:
        evaluate(run, step=0)
    for step in range(run.first_step, run.num_steps):
        timer = PhaseTimer()
        noise = noise_at(step, run.num_steps, config.seed, config.noise)

        with timer("sync"):
            run.engine.sync(step, noise)
        with timer("rollout"):
            batch = generate(
                run.engine,
                run.tokenizer,
                run.data.train,
                run.problems_of(step),
                run.sampling,
                config.rollout.num_generations,
                ("rollout", config.seed, step),
            )
        with timer("reward"):
            results = score(run.pool, batch)
            rewards = total_rewards(results, run.data.rewards)
        if run.stop_requested:
            return run.save(step)
        with timer("update"):
            rewards_PG = torch.tensor(rewards, dtype=torch.float64)
            advantages_PG = group_advantages(rewards_PG, config.algo.scale_rewards)
            update_metrics = update(run, step, batch, rewards_PG, advantages_PG, noise)

        done = step + 1
        rows = completion_rows(batch, run.tokenizer, results, rewards, advantages_PG.tolist())
        run.writer.write_completions(done, rows, "train")
        metrics = {
            **reward_metrics(rewards_PG, results),
            **completion_metrics(batch),
            **update_metrics,
            "noise/sigma": noise.sigma if noise else 0.0,
            **timer.metrics(),
            **throughput_metrics(batch, timer),
        }
        run.log_step(done, metrics, num_failures=sum(len(result.failures) for result in results))
        if run.is_due(done, config.log.eval_steps) or done == run.num_steps:
            evaluate(run, step=done)
        if run.is_due(done, config.log.save_steps) or done == run.num_steps or run.stop_requested:
            run.save(done)
        if run.stop_requested:
            return None
    return None


def update(
    run: Run,
    step: int,
    batch: Batch,
    rewards_PG: Tensor,
    advantages_PG: Tensor,
    noise: NoiseDraw | None,
) -> dict[str, float]:
    """One optimizer step on the batch; returns its metrics.

    Samples without a reward are not part of the batch. Sequences whose advantage is 0 have a zero gradient: they count
    in the denominators and are otherwise left out. If all are, the optimizer still steps, as it would have with them.
    """
    config = run.config
    has_reward = (~rewards_PG.isnan()).flatten().tolist()
    pairs = [
        (rollout, advantage)
        for rollout, advantage, valid in zip(
            (rollout for group in batch.rollouts for rollout in group),
            advantages_PG.flatten().tolist(),
            has_reward,
            strict=True,
        )
        if valid
    ]
    stale = {rollout.version for rollout, _ in pairs} - {step}
    if stale:
        raise RunError("update", f"rollouts of versions {sorted(stale)} in step {step}")
    weights = sequence_weights(
        [sum(rollout.loss_mask) for rollout, _ in pairs],
        config.algo.loss_type,
        config.rollout.max_completion_length,
    )
    chosen = [
        Item(rollout, advantage, weight)
        for (rollout, advantage), weight in zip(pairs, weights, strict=True)
        if advantage != 0 or not config.algo.skip_zero_advantage
    ]
    outputs = accumulate_gradients(run, chosen, noise if config.noise.scope == "both" else None)
    parameters = [parameter for _, parameter in run.policy.trainable_parameters()]
    grad_norm = clip_gradients(parameters, config.train.max_grad_norm)
    if not math.isfinite(grad_norm):
        raise RunError(
            "update", f"the gradient norm of step {step} is {grad_norm}; lower the learning rate"
        )
    learning_rate = learning_rate_at(step, run.num_steps, config.train)
    set_learning_rate(run.optimizer, learning_rate)
    run.optimizer.step()
    return {
        **loss_metrics(outputs),
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "frac_sequences_trained": len(chosen) / advantages_PG.numel(),
        "num_tokens_trained": sum(sum(item.rollout.loss_mask) for item in chosen),
    }


def accumulate_gradients(
    run: Run, items: Sequence[Item], noise: NoiseDraw | None
) -> list[LossOutput]:
    """Forward and backward over the items in packed microbatches; gradients start from zero."""
    config, policy = run.config, run.policy
    for _, parameter in policy.trainable_parameters():
        parameter.grad = torch.zeros_like(parameter)
    outputs = []
    microbatches = pack(
        items,
        max_tokens=config.train.max_tokens_per_microbatch,
        share_prompts=config.train.share_prompts,
        hidden_size=policy.base.config.hidden_size,
        device=policy.device,
    )
    with policy.noise(noise):
        for microbatch in microbatches:
            logprobs, entropy = policy.logprobs(microbatch, config.rollout.temperature)
            output = policy_loss(logprobs, entropy, microbatch, config.algo, config.correction)
            output.loss.backward()
            outputs.append(replace(output, loss=output.loss.detach()))
    return outputs


def evaluate(run: Run, step: int) -> Evaluation | None:
    """Held-out accuracy of the clean policy after `step` updates; None when nothing is held out."""
    if run.data.test is None:
        return None
    timer = PhaseTimer()
    with timer("eval"):
        evaluation = evaluate_policy(
            run.engine,
            run.tokenizer,
            run.data.test,
            run.pool,
            run.data.rewards,
            run.sampling,
            num_generations=run.config.log.eval_num_generations,
            seed=run.config.seed,
            version=step,
        )
    run.log_evaluation(step, evaluation, timer.metrics())
    return evaluation


def reward_metrics(rewards_PG: Tensor, results: Sequence) -> dict[str, float]:
    """Mean and spread of the rewards, each term's mean, share of groups without spread."""
    valid = rewards_PG[~rewards_PG.isnan()]
    terms = {}
    for name in results[0].values:
        values = [v for result in results for v in result.values[name] if v is not None]
        terms[f"rewards/{name}/mean"] = sum(values) / len(values) if values else math.nan
    return {
        "reward": valid.mean().item() if len(valid) else math.nan,
        "reward_std": valid.std().item() if len(valid) > 1 else 0.0,
        "frac_reward_zero_std": (group_spread(rewards_PG) == 0).double().mean().item(),
        **terms,
    }


def completion_metrics(batch: Batch) -> dict[str, float]:
    """Lengths and how many completions were cut."""
    flat = [rollout for group in batch.rollouts for rollout in group]
    lengths = [len(rollout.completion_ids) for rollout in flat]
    return {
        "completions/mean_length": sum(lengths) / len(flat),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(r.finish_reason == "length" for r in flat) / len(flat),
    }


def throughput_metrics(batch: Batch, timer: PhaseTimer) -> dict[str, float]:
    """Tokens a second: generated ones in the rollout, all of the batch's over the whole step."""
    flat = [rollout for group in batch.rollouts for rollout in group]
    generated = sum(len(rollout.completion_ids) for rollout in flat)
    total = generated + sum(len(rollout.prompt_ids) for rollout in flat)
    return {
        "throughput/rollout_tokens_per_s": generated / timer.seconds["rollout"],
        "throughput/step_tokens_per_s": total / sum(timer.seconds.values()),
    }
