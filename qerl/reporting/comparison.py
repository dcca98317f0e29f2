"""The numbers of a comparison: each arm's summary, and what may be said about how arms differ from the baseline.

Differences and their intervals are made in `qerl.reporting.differences`. Only runs that finished are compared; curves show all. Nothing corrects for looking at several arms and quantities.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.comparison.runner import read_status
from qerl.errors import UserError
from qerl.evaluation.statistics import (
    difference_in_words,
)
from qerl.reporting.differences import (
    QUANTITIES,
    ArmRuns,
    Difference,
    differences_of,
    mean,
)
from qerl.reporting.runs import (
    ACCURACY,
    minutes_until,
    phase_seconds,
    points,
    problems_of_steps,
    read_record,
)

MAX_ORDER_STEPS = 200


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
            differences += differences_of(arm, baseline)
    targets = status["target_accuracy"] or _default_target(arms)
    return ComparisonReport(
        folder=folder,
        baseline=status["baseline"],
        arms=arms,
        status=status,
        summary={arm.name: _summary(arm) for arm in arms},
        differences=tuple(differences),
        times=tuple(_time_to(arm, target) for target in targets for arm in arms),
        sentences=(
            *_sentences(status["baseline"], arms, differences),
            *_about_speed(status.get("at_once", 1)),
        ),
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


def _summary(arm: ArmRuns) -> dict[str, float | None]:
    runs = arm.finished.values()
    values = {name: [value(run) for run in runs] for name, value in QUANTITIES.items()}
    means = {name: mean([v for v in found if v is not None]) for name, found in values.items()}
    return {"seeds finished": len(arm.finished), **means}


def _about_speed(at_once: int) -> tuple[str, ...]:
    if at_once == 1:
        return ()
    return (
        f"{at_once} runs shared the machine: their seconds, tokens/s and memory are not to be compared.",
    )


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


def phases_of(arm: ArmRuns) -> dict[str, float]:
    """Phase -> seconds a step: the mean over seeds of the medians over steps."""
    tables = [phase_seconds(run) for run in arm.records.values()]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: statistics.fmean(table.get(name, 0.0) for table in tables) for name in names}
