"""The rollouts of a step: one round, or with dynamic sampling as many as it takes to find groups with spread.

A group whose rewards are all equal teaches nothing. With `max_resample_rounds` it is replaced by the next problem of
the data order, until the step has `prompts_per_step` groups with spread or the rounds are used up (DAPO, arXiv
2503.14476, section 3.2). So a step always ends. What was dropped stays in the metrics, the completions table and the
mean reward, which would otherwise be that of the problems that happen to be half solved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qerl.algo.advantages import group_spread, overlong_penalties
from qerl.config import Config
from qerl.data_order import Cursor, take
from qerl.metrics import PhaseTimer, say
from qerl.rollout import Batch, generate, join_batches, score
from qerl.run import Run
from qerl.tasks.calls import RewardResult
from qerl.tasks.rewards import total_rewards
from qerl.types import Rollout

PENALTY = "overlong_penalty"
"""Name of the penalty among the reward terms."""


@dataclass(frozen=True)
class Collected:
    """Scored rollouts of P problems; P is more than prompts_per_step after resampling."""

    batch: Batch
    results: list[RewardResult]
    rewards_PG: Tensor
    """[P, G] float64, with the overlong penalty; NaN where there is no reward"""
    is_kept_P: Tensor
    """[P] bool: the groups that are trained on"""
    num_rounds: int
    cursor: Cursor | None
    """Where the next step's problems begin; None: it follows from the step"""

    @property
    def trained_rewards_PG(self) -> Tensor:
        """The rewards, NaN in the groups that were dropped: to all that follows those are no part of the batch."""
        return self.rewards_PG.masked_fill(~self.is_kept_P[:, None], torch.nan)


def collect(run: Run, step: int, timer: PhaseTimer) -> Collected:
    """Sample and score the problems of a step; further ones in place of groups without spread, if that is on.

    A stop that is asked for ends it after the round that is running.
    """
    config = run.config
    wanted, max_rounds = config.rollout.prompts_per_step, 1 + config.rollout.max_resample_rounds
    cursor = run.cursor_at(step)
    num_spread = 0
    batches: list[Batch] = []
    results: list[RewardResult] = []
    rewards: list[Tensor] = []
    while (
        num_spread < wanted and len(batches) < max_rounds and not (batches and run.stop_requested)
    ):
        missing = wanted - num_spread
        indices, cursor = take(cursor, missing, len(run.data.train.problems), config.seed)
        again = ("round", len(batches)) if batches else ()
        with timer("rollout"):
            batch = generate(
                run.engine,
                run.tokenizer,
                run.data.train,
                indices,
                run.sampling,
                config.rollout.num_generations,
                ("rollout", config.seed, step, *again),
            )
        with timer("reward"):
            scored = with_penalties(score(run.pool, batch), batch.rollouts, config)
        batches.append(batch)
        results += scored
        rewards.append(step_rewards(run, scored))
        num_spread += int((group_spread(rewards[-1]) > 0).sum())
    rewards_PG = torch.cat(rewards)
    is_kept_P = kept_groups(rewards_PG, wanted) if max_rounds > 1 else torch.ones(wanted).bool()
    if max_rounds > 1 and num_spread < wanted and not run.stop_requested:
        say(
            f"step {step + 1}: {num_spread} of {wanted} groups have spread after {len(batches)} rounds; "
            f"{int((~is_kept_P).sum())} groups without were dropped"
        )
    return Collected(
        batch=join_batches(batches),
        results=results,
        rewards_PG=rewards_PG,
        is_kept_P=is_kept_P,
        num_rounds=len(batches),
        cursor=cursor if max_rounds > 1 else None,
    )


def kept_groups(rewards_PG: Tensor, wanted: int) -> Tensor:
    """[P] bool: the groups with spread; the first `wanted` groups if there is none, so that a step has a batch."""
    has_spread = group_spread(rewards_PG) > 0
    return has_spread if bool(has_spread.any()) else torch.arange(len(rewards_PG)) < wanted


def with_penalties(
    results: Sequence[RewardResult], rollouts: Sequence[Sequence[Rollout]], config: Config
) -> list[RewardResult]:
    """The results with the soft overlong penalty as one more term; as they are when it is off."""
    if config.algo.overlong_penalty == 0:
        return list(results)
    longest = config.rollout.max_completion_length
    penalties = overlong_penalties(
        torch.tensor([[len(rollout.completion_ids) for rollout in group] for group in rollouts]),
        longest,
        config.algo.overlong_buffer or max(1, longest // 5),
        config.algo.overlong_penalty,
    ).tolist()
    return [
        replace(result, values=result.values | {PENALTY: row})
        for result, row in zip(results, penalties, strict=True)
    ]


def step_rewards(run: Run, results: Sequence[RewardResult]) -> Tensor:
    """[P, G] float64: the weighted terms and the penalty."""
    rewards_PG = torch.tensor(total_rewards(results, run.data.rewards), dtype=torch.float64)
    if PENALTY in results[0].values:
        rewards_PG += torch.tensor([r.values[PENALTY] for r in results], dtype=torch.float64)
    return rewards_PG


def dynamic_sampling_metrics(collected: Collected, config: Config) -> dict[str, float]:
    """Rounds and dropped groups; empty when dynamic sampling is off."""
    if config.rollout.max_resample_rounds == 0:
        return {}
    return {
        "dynamic_sampling/num_rounds": collected.num_rounds,
        "dynamic_sampling/num_groups_dropped": int((~collected.is_kept_P).sum()),
    }
