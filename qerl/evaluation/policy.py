"""Held-out evaluation: the same engine, task and graders as training, without noise.

What is right is decided by ONE reward function, the correctness reward: the task's own grader where it is among the
rewards, otherwise the first of them. A completion is right when that function gives it at least 1; part credit is not.
A completion that the grader failed on (it hung, or raised) counts as wrong. A problem for which it has nothing to say
(None for every completion: no answer is known) is left out and counted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qerl.engine.base import Engine
from qerl.errors import UserError
from qerl.rollout import completion_rows, generate, score
from qerl.tasks.calls import BuiltinFunction, RewardResult
from qerl.tasks.grading import voted_answer
from qerl.tasks.pool import RewardPool
from qerl.tasks.problems import Task
from qerl.tasks.prompts import EncodedProblems
from qerl.tasks.rewards import RewardSpec, resolve_rewards, total_rewards
from qerl.types import Sampling


@dataclass(frozen=True)
class ProblemScore:
    """One problem's completions, graded; all tuples have one entry a sample."""

    problem_id: str
    correct: tuple[float, ...]
    """1 where the correctness reward gave at least 1, else 0"""
    answers: tuple[str | None, ...]
    """The answers as they vote (`grading.voted_answer`); None: no answer found"""
    rewards: tuple[float, ...]
    """Weighted sum of all rewards; NaN where there is none"""
    num_tokens: tuple[int, ...]
    num_cut: int
    """Completions that reached the length limit"""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one policy version on held-out problems."""

    accuracy: float
    """Share of completions to which the correctness reward gave at least 1"""
    metrics: dict[str, float]
    rows: list[dict[str, object]]
    """The completions table"""
    problems: tuple[ProblemScore, ...] = ()
    """In the order they were asked, without those that could not be graded"""
    num_ungraded: int = 0
    """Problems left out: the correctness reward gave None for every completion"""
    num_failures: int = 0
    """Completions on which a reward function failed"""


def correctness_reward(rewards: Sequence[RewardSpec], task: Task) -> str:
    """Name of the reward that decides what is right: the task's own grader if it is there, else the first."""
    own = task.reward_funcs[:1]
    for spec in rewards:
        if isinstance(spec.source, BuiltinFunction) and (spec.source.name,) == own:
            return spec.name
    return rewards[0].name


def accuracy_note(rewards: Sequence[RewardSpec], task: Task) -> str | None:
    """What to say at the start of a run whose accuracy is not the task's own; None where it is."""
    name = correctness_reward(rewards, task)
    if not task.reward_funcs or with_own_grader(rewards, task) == tuple(rewards):
        return None
    return (
        f"eval/accuracy is the share of completions to which {name} gives at least 1: {task.reward_funcs[0]}, the "
        f"task's own, is not among the rewards (python -m qerl.evaluate RUN grades by it)"
    )


def with_own_grader(rewards: Sequence[RewardSpec], task: Task) -> tuple[RewardSpec, ...]:
    """The rewards, and the task's own grader with weight 0 where it is not among them."""
    if not task.reward_funcs:
        return tuple(rewards)
    own = resolve_rewards(task.reward_funcs[:1], (0.0,), task)
    there = {spec.source for spec in rewards if isinstance(spec.source, BuiltinFunction)}
    return (*rewards, *(spec for spec in own if spec.source not in there))


def evaluate_policy(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: EncodedProblems,
    pool: RewardPool,
    rewards: Sequence[RewardSpec],
    sampling: Sampling,
    *,
    correctness: str,
    num_generations: int,
    seed: int,
    version: int,
    problems_at_once: int | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> Evaluation:
    """Sample every problem `num_generations` times from the clean policy and score the completions.

    Seeds depend on the run's seed and the problem, not on the version: two versions are compared on the same draws.

    Args:
        correctness: name of the reward that decides what is right.
        problems_at_once: problems in one call of the engine; None: all.
        on_progress: told after each call how many problems are done, and the accuracy so far.

    Raises:
        UserError: not one problem could be graded.
    """
    engine.sync(version, None)
    num_problems = len(problems.problems)
    scores: list[ProblemScore] = []
    rows: list[dict[str, object]] = []
    num_failures = 0
    at_once = problems_at_once or num_problems
    for start in range(0, num_problems, at_once):
        indices = range(start, min(start + at_once, num_problems))
        batch = generate(
            engine, tokenizer, problems, indices, sampling, num_generations, ("eval", seed)
        )
        results = score(pool, batch)
        totals = total_rewards(results, rewards)
        rows += completion_rows(batch, tokenizer, results, totals, None)
        for place, result in enumerate(results):
            num_failures += len({failure.sample_index for failure in result.failures})
            if not _is_graded(result, correctness):
                continue
            problem = problems.problems[indices[place]]
            group, texts = batch.rollouts[place], batch.texts[place]
            scores.append(
                ProblemScore(
                    problem_id=problem.id,
                    correct=tuple(
                        float(value is not None and value >= 1)
                        for value in result.values[correctness]
                    ),
                    answers=tuple(voted_answer(text, problem.answer) for text in texts),
                    rewards=tuple(totals[place]),
                    num_tokens=tuple(len(rollout.completion_ids) for rollout in group),
                    num_cut=sum(rollout.finish_reason == "length" for rollout in group),
                )
            )
        if on_progress is not None and scores:
            on_progress(indices[-1] + 1, _mean([c for s in scores for c in s.correct]))
    if not scores:
        raise UserError(
            f"{correctness} graded none of the {num_problems} held-out problems: has the data answers?"
        )
    metrics = _metrics(scores)
    return Evaluation(
        metrics["accuracy"],
        metrics,
        rows,
        tuple(scores),
        num_ungraded=num_problems - len(scores),
        num_failures=num_failures,
    )


def _is_graded(result: RewardResult, correctness: str) -> bool:
    failed = any(failure.function == correctness for failure in result.failures)
    return failed or any(value is not None for value in result.values[correctness])


def _metrics(scores: Sequence[ProblemScore]) -> dict[str, float]:
    correct = [value for score in scores for value in score.correct]
    lengths = [length for score in scores for length in score.num_tokens]
    rewards = [value for score in scores for value in score.rewards if not math.isnan(value)]
    return {
        "accuracy": _mean(correct),
        "reward": _mean(rewards),
        "completions/mean_length": _mean(lengths),
        "completions/clipped_ratio": sum(score.num_cut for score in scores) / len(lengths),
        "num_completions": float(len(correct)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
