"""How one arm differs from another: numbers of a run, and paired differences with intervals.

Arms are paired: the same seed means the same problems in the same order, and all are evaluated on the same held-out
problems. Intervals of accuracies resample seeds and problems (`statistics.seeds_and_problems_interval`); quantities that
exist once a run (reward, speed, memory) have one difference a seed, and with so few values their interval is the range.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qerl.errors import UserError
from qerl.evaluation.statistics import Interval, bootstrap_interval, seeds_and_problems_interval
from qerl.reporting.runs import (
    ACCURACY,
    STEP_SECONDS,
    UPDATE_SPEED,
    RunRecord,
    points,
    problem_scores,
)

LAST_SHARE = 0.2
"""Training reward and entropy "at the end" are means of this share of the steps."""
EARLY_SHARE = 0.4
"""Accuracy "early" is that of the evaluation nearest to this share of the run."""
RANGE_BELOW = 8
"""With fewer values a bootstrap interval is their range (see `qerl.evaluation.statistics`)."""


@dataclass(frozen=True)
class ArmRuns:
    """An arm's runs by seed."""

    name: str
    records: dict[int, RunRecord]
    """All that have metrics"""
    finished: dict[int, RunRecord]
    settings: dict[str, Any]
    """What makes the arm"""


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline in one quantity."""

    arm: str
    quantity: str
    per_seed: dict[int, float]
    interval: Interval
    """Of the mean over seeds"""
    resampled: str
    """What the interval accounts for, in words"""
    unit: str
    """"accuracy", "reward" (absolute) or "percent" of the baseline"""


QUANTITIES: dict[str, Callable[[RunRecord], float | None]] = {
    "accuracy before": lambda run: _at(points(run, ACCURACY), 0),
    "accuracy early": lambda run: early(run)[1],
    "accuracy after": lambda run: _at(points(run, ACCURACY), -1),
    "accuracy, mean of the curve": lambda run: mean([v for s, v in points(run, ACCURACY) if s]),
    "reward, last fifth": lambda run: mean(_last(run, "train/reward")),
    "entropy, first step": lambda run: _at(points(run, "train/entropy"), 0),
    "entropy, last fifth": lambda run: mean(_last(run, "train/entropy")),
    "mean exp|Δ log p|": lambda run: mean(
        [v for _, v in points(run, "train/sampling/token_mult_prob_error")]
    ),
    "rollout tokens/s": lambda run: _median(run, "train/throughput/rollout_tokens_per_s"),
    "update tokens/s": lambda run: _median(run, UPDATE_SPEED),
    "seconds a step": lambda run: _median(run, STEP_SECONDS),
    "peak GiB": lambda run: max((v for _, v in points(run, "train/memory/peak_gib")), default=None),
}
"""One number a run. Speeds are medians over the steps, so the first step's compilation does not count."""

COMPARED_BY_SEED = {
    "reward, last fifth": "reward",
    "entropy, last fifth": "nats",
    "rollout tokens/s": "percent",
    "update tokens/s": "percent",
    "seconds a step": "percent",
    "peak GiB": "percent",
}


def differences_of(arm: ArmRuns, baseline: ArmRuns) -> list[Difference]:
    """Every quantity in which the arm can be compared, over the seeds that both have finished."""
    seeds = [seed for seed in arm.finished if seed in baseline.finished]
    if not seeds:
        return []
    found = []
    pairs = {seed: (arm.finished[seed], baseline.finished[seed]) for seed in seeds}
    for quantity, steps_of in (
        ("accuracy after", lambda run: [points(run, ACCURACY)[-1][0]]),
        ("accuracy early", lambda run: [early(run)[0]]),
        ("accuracy, mean of the curve", lambda run: [s for s, _ in points(run, ACCURACY) if s]),
    ):
        if all(len(points(run, ACCURACY)) > 1 for pair in pairs.values() for run in pair):
            found.append(_accuracy_difference(arm.name, quantity, pairs, steps_of))
    for quantity, unit in COMPARED_BY_SEED.items():
        value = QUANTITIES[quantity]
        both = {seed: (value(ours), value(theirs)) for seed, (ours, theirs) in pairs.items()}
        per_seed = {
            seed: 100 * (ours / theirs - 1) if unit == "percent" else ours - theirs
            for seed, (ours, theirs) in both.items()
            if ours is not None and theirs is not None and (unit != "percent" or theirs)
        }
        if per_seed:
            interval = bootstrap_interval(list(per_seed.values()), seed=0)
            basis = "seeds" if len(per_seed) >= RANGE_BELOW else "range of the seeds"
            found.append(Difference(arm.name, quantity, per_seed, interval, basis, unit))
    return found


def _accuracy_difference(
    arm: str,
    quantity: str,
    pairs: dict[int, tuple[RunRecord, RunRecord]],
    steps_of: Callable[[RunRecord], list[int]],
) -> Difference:
    """Seeds x problems, each the arm's score less the baseline's on the same problem with the same seed."""
    values: dict[int, dict[str, float | None]] = {}
    for seed, (ours, theirs) in pairs.items():
        first, second = _scores(ours, steps_of(ours)), _scores(theirs, steps_of(theirs))
        if first.keys() != second.keys():
            raise UserError(f"{ours.name} and {theirs.name} were evaluated on different problems")
        values[seed] = {id: _less(first[id], second[id]) for id in first}
    ids = next(iter(values.values()))
    graded = [id for id in ids if all(row.get(id) is not None for row in values.values())]
    rows = {
        seed: [value for id in graded if (value := row[id]) is not None]
        for seed, row in values.items()
    }
    per_seed = {seed: statistics.fmean(row) for seed, row in rows.items()}
    interval = seeds_and_problems_interval(list(rows.values()), seed=0)
    resampled = "seeds and problems" if len(rows) > 1 else "problems of one seed"
    return Difference(arm, quantity, per_seed, interval, resampled, "accuracy")


def _scores(run: RunRecord, steps: list[int]) -> dict[str, float | None]:
    """Problem id -> mean over the evaluations of `steps`; None where one of them did not grade it."""
    tables = [problem_scores(run, step) for step in steps]
    scores = {}
    for id in tables[0]:
        found = [table.get(id) for table in tables]
        graded = [value for value in found if value is not None]
        scores[id] = statistics.fmean(graded) if len(graded) == len(found) else None
    return scores


def _less(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs


def early(run: RunRecord) -> tuple[int, float | None]:
    """(step, accuracy) of the evaluation nearest to EARLY_SHARE of the run; (0, None) without evaluations."""
    evaluations = [point for point in points(run, ACCURACY) if point[0]]
    if not evaluations:
        return 0, None
    return min(evaluations, key=lambda point: abs(point[0] - EARLY_SHARE * run.last_step))


def _last(run: RunRecord, key: str) -> list[float]:
    return [v for step, v in points(run, key) if step > (1 - LAST_SHARE) * run.last_step]


def _median(run: RunRecord, key: str) -> float | None:
    values = [value for _, value in points(run, key)]
    return statistics.median(values) if values else None


def mean(values: list[float]) -> float | None:
    """Of the finite ones; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def _at(values: list[tuple[int, float]], index: int) -> float | None:
    return values[index][1] if values else None
