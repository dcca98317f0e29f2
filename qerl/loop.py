"""THE loop: reinforcement learning of a LoRA adapter, one page.

One step: sample completions of a few problems from the (noisy) rollout policy, score them, turn scores into
advantages within each group, and take one optimizer step (or a few) on the clipped policy-gradient loss, corrected for
the rollout policy not being exactly the trained one. Design: ARCHITECTURE.md; equations: docs/objective.md.

Steps are numbered by the steps already done, each one batch of rollouts. All randomness is addressed by (seed, step,
what), so the only state of a run is the adapter, the optimizer, the step number and, with dynamic sampling, the place
in the data; a resumed run equals an uninterrupted one.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from qerl.algo.advantages import group_advantages, group_spread
from qerl.algo.noise import noise_at
from qerl.collect import collect, dynamic_sampling_metrics
from qerl.evaluation.policy import Evaluation, correctness_reward, evaluate_policy
from qerl.metrics import PhaseTimer
from qerl.rollout import Batch, completion_rows
from qerl.run import Run
from qerl.update import stop_if_stuck, update


def train(run: Run) -> None:
    """Run all steps that are left, with evaluations, checkpoints and metrics."""
    config = run.config
    if run.owes_evaluation():
        evaluate(run, step=run.first_step)
    for step in range(run.first_step, run.num_steps):
        timer = PhaseTimer()
        noise = noise_at(step, run.num_steps, config.seed, config.noise)

        with timer("sync"):
            run.engine.sync(step, noise)
        collected = collect(run, step, timer)
        if run.stop_requested:
            return run.save(step)
        batch, results, rewards_PG = collected.batch, collected.results, collected.rewards_PG
        with timer("update"):
            run.engine.release()
            trained_PG = collected.trained_rewards_PG
            advantages_PG = group_advantages(
                trained_PG, config.algo.scale_rewards, config.algo.advantage
            )
            update_metrics = update(run, step, batch, trained_PG, advantages_PG, noise)
            run.cursor = collected.cursor

        done = step + 1
        rows = completion_rows(
            batch, run.tokenizer, results, rewards_PG.tolist(), advantages_PG.tolist()
        )
        run.writer.write_completions(done, rows, "train")
        metrics = {
            **reward_metrics(rewards_PG, results),
            **completion_metrics(batch),
            **dynamic_sampling_metrics(collected, config),
            **update_metrics,
            "noise/sigma": noise.sigma if noise else 0.0,
            **timer.metrics(),
            **throughput_metrics(batch, timer),
        }
        run.log_step(done, metrics, [f for result in results for f in result.failures])
        stop_if_stuck(run, done)
        if run.is_due(done, config.log.eval_steps) or done == run.num_steps:
            evaluate(run, step=done)
        if run.should_save(done):
            run.save(done)
        if run.stop_requested:
            return None
    return None


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
            correctness=correctness_reward(run.data.rewards, run.data.task),
            num_generations=run.config.log.eval_num_generations,
            seed=run.config.seed,
            version=step,
        )
    run.log_evaluation(step, evaluation, timer.metrics())
    return evaluation


def reward_metrics(rewards_PG: Tensor, results: Sequence) -> dict[str, float]:
    """Mean and spread of the rewards, each term's mean, what functions logged, share of groups without spread."""
    valid = rewards_PG[~rewards_PG.isnan()]
    terms = {}
    for name in results[0].values:
        values = [v for result in results for v in result.values[name] if v is not None]
        terms[f"rewards/{name}/mean"] = sum(values) / len(values) if values else math.nan
    for name in sorted({name for result in results for name in result.metrics}):
        logged = [v for result in results for v in result.metrics.get(name, ())]
        terms[f"rewards/logged/{name}"] = sum(logged) / len(logged)
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
