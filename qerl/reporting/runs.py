"""What a run folder holds, read for a report: metrics as series, completions as rows. Nothing here is computed twice."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.errors import UserError
from qerl.metrics import COMPLETIONS, read_completions, read_metrics
from qerl.run_folder import read_run_config

Points = list[tuple[int, float]]
"""(step, value)"""

ACCURACY = "eval/accuracy"
UPDATE_SPEED = "derived/update_tokens_per_s"
STEP_SECONDS = "derived/step_s"


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it."""

    name: str
    run_dir: Path
    stored: dict[str, Any]
    """config.json: config, versions, git_revision, ..."""
    lines: list[dict[str, Any]]
    """metrics.jsonl"""

    @property
    def config(self) -> dict[str, Any]:
        return self.stored["config"]

    @property
    def last_step(self) -> int:
        """Training steps that have metrics."""
        return max((line["step"] for line in self.lines if "train/reward" in line), default=0)


def read_record(run_dir: Path, name: str | None = None) -> RunRecord:
    """Read a run folder. Raises UserError if it is none, or has no metrics yet."""
    stored = read_run_config(run_dir)
    lines = read_metrics(run_dir)
    if not lines:
        raise UserError(f"{run_dir} has no metrics yet")
    return RunRecord(name or run_dir.resolve().name, run_dir, stored, lines)


def metric_keys(records: Iterable[RunRecord]) -> list[str]:
    """Every numeric key of the runs' metrics, in the order in which they first appear."""
    keys: dict[str, None] = {}
    for record in records:
        for line in record.lines:
            keys |= {k: None for k, v in line.items() if "/" in k and isinstance(v, int | float)}
    return list(keys)


def points(record: RunRecord, key: str) -> Points:
    """A metric over the steps; `derived/` keys are made from others. Steps without a finite value are left out."""
    if key == STEP_SECONDS:
        return [
            (line["step"], seconds) for line in record.lines if (seconds := _step_seconds(line))
        ]
    if key == UPDATE_SPEED:
        return [
            (line["step"], line["train/num_tokens_trained"] / line["train/time/update_s"])
            for line in record.lines
            if line.get("train/num_tokens_trained") and line.get("train/time/update_s")
        ]
    return [(line["step"], line[key]) for line in record.lines if line.get(key) is not None]


def phase_seconds(record: RunRecord) -> dict[str, float]:
    """Phase -> median seconds a step."""
    phases: dict[str, list[float]] = {}
    for line in record.lines:
        for key, value in line.items():
            if key.startswith("train/time/") and key.endswith("_s") and value is not None:
                name = key.removeprefix("train/time/").removesuffix("_s")
                phases.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in phases.items()}


def minutes_until(record: RunRecord, step: int) -> float:
    """Minutes of training, without evaluations and starts, up to and with a step."""
    return sum(_step_seconds(line) for line in record.lines if line["step"] <= step) / 60


def problem_scores(record: RunRecord, step: int) -> dict[str, float | None]:
    """Problem id -> share of its held-out completions, after `step` updates, to which the first reward gave 1 or more.

    None for a problem of which no completion was graded: it has no part in the accuracy.
    """
    values: dict[str, list[float | None]] = {}
    for row in completion_rows(record, step, "eval"):
        first = next(key for key in row if key.startswith("reward/"))
        values.setdefault(row["problem_id"], []).append(row[first])
    return {
        id: None
        if all(value is None for value in found)
        else statistics.fmean(value is not None and value >= 1 for value in found)
        for id, found in values.items()
    }


def completion_rows(record: RunRecord, step: int, kind: str | None = None) -> list[dict[str, Any]]:
    """Rows of a step's completions table; none if there is no such table."""
    path = record.run_dir / COMPLETIONS / f"{step}.parquet"
    if not path.exists():
        return []
    rows = read_completions(path).to_pylist()
    return rows if kind is None else [row for row in rows if row["kind"] == kind]


def completion_steps(record: RunRecord) -> list[int]:
    """Steps that have a completions table, in order."""
    names = (path.stem for path in (record.run_dir / COMPLETIONS).glob("*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


def problems_of_steps(record: RunRecord, steps: Sequence[int]) -> list[tuple[str, ...]]:
    """The problems that were trained on in each step, in order."""
    return [
        tuple(dict.fromkeys(row["problem_id"] for row in completion_rows(record, step, "train")))
        for step in steps
    ]


def running_mean(values: Points, width: int) -> Points:
    """Mean of each value and the `width` - 1 before it."""
    return [
        (step, statistics.fmean(value for _, value in values[max(0, i + 1 - width) : i + 1]))
        for i, (step, _) in enumerate(values)
    ]


def _step_seconds(line: dict[str, Any]) -> float:
    return sum(v for k, v in line.items() if k.startswith("train/time/") and v is not None)
