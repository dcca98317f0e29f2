"""The numbers of a comparison: each arm's summary, and what may be said about how arms differ from the baseline.

Arms are paired: the same seed means the same problems in the same order, and all are evaluated on the same held-out
problems. Intervals of accuracies resample seeds and problems (`statistics.seeds_and_problems_interval`); quantities that
exist once a run (reward, speed, memory) have one difference a seed, and with so few values their interval is the range.
Only runs that finished are compared; curves show all. Nothing corrects for looking at several arms and quantities.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.compare_runner import read_status
from qerl.errors import UserError
from qerl.reporting.runs import (
    ACCURACY,
    STEP_SECONDS,
    UPDATE_SPEED,
    RunRecord,
    minutes_until,
    phase_seconds,
    points,
    problem_scores,
    problems_of_steps,
    read_record,
)
from qerl.statistics import (
    Interval,
    bootstrap_interval,
    difference_in_words,
    seeds_and_problems_interval,
)

LAST_SHARE = 0.2
"""Training reward and entropy "at the end" are means of this share of the steps."""
EARLY_SHARE = 0.4
"""Accuracy "early" is that of the evaluation nearest to this share of the run."""
MAX_ORDER_STEPS = 200
RANGE_BELOW = 8
"""With fewer values a bootstrap interval is their range (see `qerl.statistics`)."""


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


@dataclass(frozen=True)
class TimeTo:
    """Steps and minutes until the first evaluation that reaches an accuracy; None where a run never does."""

    arm: str
    target: float
    steps: dict[int, int | None]
    minutes: dict[int, float | None]


@dataclass(frozen=True)
class ComparisonReport:
    """Everything the page, the table and the JSON say."""

    folder: Path
    baseline: str
    arms: tuple[ArmRuns, ...]
    status: dict[str, Any]
    """compare.json"""
    summary: dict[str, dict[str, float | None]]
    """Arm -> quantity -> mean over its finished seeds"""
    differences: tuple[Difference, ...]
    times: tuple[TimeTo, ...]
    sentences: tuple[str, ...]
    """The findings in words: losses first, then gains, then what cannot be told"""
    checks: tuple[str, ...]


def read_comparison(folder: Path) -> ComparisonReport:
    """Read a comparison's folder. Raises UserError if it holds none, or no run of it has metrics."""
    status = read_status(folder)
    if not status:
        raise UserError(f"{folder} holds no comparison: it has no compare.json")
    arms = tuple(_arm_runs(folder, name, status) for name in status["arms"])
    arms = tuple(arm for arm in arms if arm.records)
    if not arms:
        raise UserError(f"{folder}: no run of this comparison has metrics yet")
    baseline = next((arm for arm in arms if arm.name == status["baseline"]), None)
    differences: list[Difference] = []
    for arm in arms:
        if baseline is not None and arm is not baseline:
            differences += _differences(arm, baseline)
    targets = status["target_accuracy"] or _default_target(arms)
    return ComparisonReport(
        folder=folder,
        baseline=status["baseline"],
        arms=arms,
        status=status,
        summary={arm.name: _summary(arm) for arm in arms},
        differences=tuple(differences),
        times=tuple(_time_to(arm, target) for target in targets for arm in arms),
        sentences=_sentences(status["baseline"], arms, differences),
        checks=_checks(arms, baseline),
    )


def _arm_runs(folder: Path, name: str, status: dict[str, Any]) -> ArmRuns:
    records, finished = {}, {}
    for seed in status["seeds"]:
        run_dir = folder / name / f"seed-{seed}"
        if not (run_dir / "metrics.jsonl").exists():
            continue
        try:
            records[seed] = read_record(run_dir, f"{name}/seed-{seed}")
        except UserError:  # it has begun and has no metrics yet
            continue
        if status["runs"].get(f"{name}/seed-{seed}", {}).get("state") == "finished":
            finished[seed] = records[seed]
    return ArmRuns(name, records, finished, status["arms"][name])


QUANTITIES: dict[str, Callable[[RunRecord], float | None]] = {
    "accuracy before": lambda run: _at(points(run, ACCURACY), 0),
    "accuracy early": lambda run: _early(run)[1],
    "accuracy after": lambda run: _at(points(run, ACCURACY), -1),
    "accuracy, mean of the curve": lambda run: _mean([v for s, v in points(run, ACCURACY) if s]),
    "reward, last fifth": lambda run: _mean(_last(run, "train/reward")),
    "entropy, first step": lambda run: _at(points(run, "train/entropy"), 0),
    "entropy, last fifth": lambda run: _mean(_last(run, "train/entropy")),
    "mean exp|Δ log p|": lambda run: _mean(
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


def _summary(arm: ArmRuns) -> dict[str, float | None]:
    runs = arm.finished.values()
    values = {name: [value(run) for run in runs] for name, value in QUANTITIES.items()}
    means = {name: _mean([v for v in found if v is not None]) for name, found in values.items()}
    return {"seeds finished": len(arm.finished), **means}


def _differences(arm: ArmRuns, baseline: ArmRuns) -> list[Difference]:
    seeds = [seed for seed in arm.finished if seed in baseline.finished]
    if not seeds:
        return []
    found = []
    pairs = {seed: (arm.finished[seed], baseline.finished[seed]) for seed in seeds}
    for quantity, steps_of in (
        ("accuracy after", lambda run: [points(run, ACCURACY)[-1][0]]),
        ("accuracy early", lambda run: [_early(run)[0]]),
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
    values = {}
    for seed, (ours, theirs) in pairs.items():
        first, second = _scores(ours, steps_of(ours)), _scores(theirs, steps_of(theirs))
        if first.keys() != second.keys():
            raise UserError(f"{ours.name} and {theirs.name} were evaluated on different problems")
        values[seed] = [first[id] - second[id] for id in sorted(first)]
    per_seed = {seed: statistics.fmean(row) for seed, row in values.items()}
    interval = seeds_and_problems_interval(list(values.values()), seed=0)
    resampled = "seeds and problems" if len(values) > 1 else "problems of one seed"
    return Difference(arm, quantity, per_seed, interval, resampled, "accuracy")


def _scores(run: RunRecord, steps: list[int]) -> dict[str, float]:
    tables = [problem_scores(run, step) for step in steps]
    return {id: statistics.fmean(table[id] for table in tables) for id in tables[0]}


def _sentences(
    baseline: str, arms: tuple[ArmRuns, ...], differences: list[Difference]
) -> tuple[str, ...]:
    found = [d for d in differences if d.quantity == "accuracy after"]
    found.sort(key=lambda d: (not d.interval.is_below_zero, not d.interval.is_above_zero))
    sentences = []
    of = {arm.name: arm for arm in arms}
    for difference in found:
        seeds = list(difference.per_seed)
        step = of[difference.arm].finished[seeds[0]].last_step
        words = difference_in_words(difference.interval, "held-out accuracy")
        each = ", ".join(f"{value:+.3f}" for value in difference.per_seed.values())
        basis = (
            f"seeds {', '.join(map(str, seeds))}: {each}"
            if len(seeds) > 1
            else f"one seed ({seeds[0]}): nothing follows for other seeds"
        )
        sentences.append(
            f"{difference.arm} against {baseline} after {step} steps: {words}; {basis}."
        )
    compared = {difference.arm for difference in found}
    sentences += [
        f"{arm.name} is not compared with {baseline}: no seed of both has finished with evaluations."
        for arm in arms
        if arm.name not in compared and arm.name != baseline
    ]
    if baseline not in of:
        sentences.append(f"No run of the baseline {baseline} has metrics: nothing is compared.")
    return tuple(sentences)


def _time_to(arm: ArmRuns, target: float) -> TimeTo:
    steps = {
        seed: next((step for step, value in points(run, ACCURACY) if value >= target), None)
        for seed, run in arm.records.items()
    }
    minutes = {
        seed: None if step is None else minutes_until(arm.records[seed], step)
        for seed, step in steps.items()
    }
    return TimeTo(arm.name, target, steps, minutes)


def _default_target(arms: tuple[ArmRuns, ...]) -> list[float]:
    """Halfway from where the arms start to the best arm's end, to two digits."""
    summaries = [_summary(arm) for arm in arms]
    starts = [s["accuracy before"] for s in summaries if s["accuracy before"] is not None]
    ends = [s["accuracy after"] for s in summaries if s["accuracy after"] is not None]
    if not starts or max(ends) <= statistics.fmean(starts):
        return []
    return [round((statistics.fmean(starts) + max(ends)) / 2, 2)]


def _checks(arms: tuple[ArmRuns, ...], baseline: ArmRuns | None) -> tuple[str, ...]:
    """What makes the pairing true, looked up in what the runs wrote."""
    if baseline is None:
        return ()
    same = compared = 0
    for arm in arms:
        for seed in arm.records.keys() & baseline.records.keys():
            ours, theirs = arm.records[seed], baseline.records[seed]
            if arm is baseline:
                continue
            steps = list(range(1, min(ours.last_step, theirs.last_step, MAX_ORDER_STEPS) + 1))
            compared += 1
            same += problems_of_steps(ours, steps) == problems_of_steps(theirs, steps)
    return (
        f"Training problems and their order equal the baseline's in {same} of {compared} pairs of runs "
        f"(the first {MAX_ORDER_STEPS} steps at most).",
    )


def _early(run: RunRecord) -> tuple[int, float | None]:
    evaluations = [point for point in points(run, ACCURACY) if point[0]]
    if not evaluations:
        return 0, None
    return min(evaluations, key=lambda point: abs(point[0] - EARLY_SHARE * run.last_step))


def _last(run: RunRecord, key: str) -> list[float]:
    return [v for step, v in points(run, key) if step > (1 - LAST_SHARE) * run.last_step]


def _median(run: RunRecord, key: str) -> float | None:
    values = [value for _, value in points(run, key)]
    return statistics.median(values) if values else None


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def _at(values: list[tuple[int, float]], index: int) -> float | None:
    return values[index][1] if values else None


def phases_of(arm: ArmRuns) -> dict[str, float]:
    """Phase -> seconds a step: the mean over seeds of the medians over steps."""
    tables = [phase_seconds(run) for run in arm.records.values()]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: statistics.fmean(table.get(name, 0.0) for table in tables) for name in names}
