"""Held-out evaluation: the same engine, task and graders as training, without noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qerl.engine.base import Engine
from qerl.rollout import completion_rows, generate, score
from qerl.tasks.pool import RewardPool
from qerl.tasks.prompts import EncodedProblems
from qerl.tasks.rewards import RewardSpec, total_rewards
from qerl.types import Sampling


@dataclass(frozen=True)
class Evaluation:
    """Scores of one policy version on held-out problems."""

    accuracy: float
    """Share of completions to which the first reward function gave at least 1."""
    metrics: dict[str, float]
    rows: list[dict[str, object]]


def evaluate_policy(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: EncodedProblems,
    pool: RewardPool,
    rewards: Sequence[RewardSpec],
    sampling: Sampling,
    *,
    num_generations: int,
    seed: int,
    version: int,
) -> Evaluation:
    """Sample every problem `num_generations` times from the clean policy and score the completions.

    Seeds depend on the run's seed and the problem, not on the version: two versions are compared on the same draws.
    """
    engine.sync(version, None)
    indices = range(len(problems.problems))
    batch = generate(
        engine, tokenizer, problems, indices, sampling, num_generations, ("eval", seed)
    )
    results = score(pool, batch)
    totals = total_rewards(results, rewards)
    flat = [value for group in totals for value in group if not math.isnan(value)]
    first = rewards[0].name
    scores = [value for result in results for value in result.values[first]]
    correct = sum(value is not None and value >= 1 for value in scores)
    lengths = [len(r.completion_ids) for group in batch.rollouts for r in group]
    cut = [r.finish_reason == "length" for group in batch.rollouts for r in group]
    metrics = {
        "accuracy": correct / len(scores),
        "reward": sum(flat) / len(flat) if flat else math.nan,
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/clipped_ratio": sum(cut) / len(cut),
        "num_completions": float(len(scores)),
    }
    rows = completion_rows(batch, tokenizer, results, totals, None)
    return Evaluation(metrics["accuracy"], metrics, rows)
