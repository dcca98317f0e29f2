"""An evaluation in numbers that carry their uncertainty, in words that claim no more, and in files.

Every metric is first one value a problem (its mean, its pass@k, its vote); means and intervals are over problems. Base
and adapter are compared on the same problems with the same seeds, problem by problem.

    summary.json          settings, every metric with its interval, the changes, the verdict
    problems.jsonl        a line a problem: what each arm scored on each metric
    completions.parquet   every completion with its rewards; `arm` says whose it is
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qerl.errors import UserError
from qerl.evaluation.policy import Evaluation, ProblemScore
from qerl.evaluation.statistics import (
    Interval,
    bootstrap_interval,
    difference_in_words,
    majority_score,
    paired_difference,
    pass_at_k,
)

FEW_PROBLEMS = 20
NUMBER_OF_COLUMNS = 24


def problem_metrics(score: ProblemScore) -> dict[str, float]:
    """The metrics of one problem of n samples: avg@n, pass@k for k = 2, 4, ... up to n, maj@n, reward."""
    n = len(score.correct)
    right = int(sum(score.correct))
    metrics = {f"avg@{n}": right / n}
    ks = [2**power for power in range(1, n.bit_length()) if 2**power <= n]
    metrics |= {f"pass@{k}": pass_at_k(n, right, k) for k in dict.fromkeys([*ks, n]) if k > 1}
    if n > 2:  # two votes that differ are a tie, whose expected score is the average
        metrics[f"maj@{n}"] = majority_score(score.answers, score.correct)
    rewards = [value for value in score.rewards if not math.isnan(value)]
    return metrics | {"reward": sum(rewards) / len(rewards) if rewards else math.nan}


@dataclass(frozen=True)
class Comparison:
    """What one evaluation says, or two of the same problems."""

    base: dict[str, Interval]
    adapter: dict[str, Interval] | None
    change: dict[str, Interval] | None
    """adapter less base, paired by problem"""
    per_problem: list[dict[str, Any]]
    headline: str
    """Name of the metric that the verdict is about: avg@n"""

    @property
    def outcomes(self) -> tuple[int, int, int]:
        """Problems on which the adapter's headline metric is better, worse and equal."""
        pairs = [
            (row["base"][self.headline], row["adapter"][self.headline]) for row in self.per_problem
        ]
        better, worse = (sum(b > a for a, b in pairs), sum(b < a for a, b in pairs))
        return better, worse, len(pairs) - better - worse


def compare(base: Evaluation, adapter: Evaluation | None, *, seed: int) -> Comparison:
    """Intervals of one evaluation, or of two and of their differences, over the problems that both graded.

    `seed` is the resampling's; every metric meets the same resamples.
    """
    rows = _pair(base, adapter)
    names = list(rows[0]["base"])
    columns = {
        arm: {name: [row[arm][name] for row in rows] for name in names}
        for arm in ("base", "adapter")
        if arm in rows[0]
    }

    def intervals(arm: str) -> dict[str, Interval]:
        values = {name: _finite(column) for name, column in columns[arm].items()}
        return {n: bootstrap_interval(v, seed=seed) for n, v in values.items() if v}

    if adapter is None:
        return Comparison(intervals("base"), None, None, rows, names[0])
    change = {}
    for name in names:
        pairs = zip(columns["base"][name], columns["adapter"][name], strict=True)
        if both := [pair for pair in pairs if all(map(math.isfinite, pair))]:
            change[name] = paired_difference(*zip(*both, strict=True), seed=seed)
    return Comparison(intervals("base"), intervals("adapter"), change, rows, names[0])


def _pair(base: Evaluation, adapter: Evaluation | None) -> list[dict[str, Any]]:
    arms = {"base": base} | ({} if adapter is None else {"adapter": adapter})
    scores = {
        arm: {score.problem_id: score for score in evaluation.problems}
        for arm, evaluation in arms.items()
    }
    shared = [id for id in scores["base"] if all(id in found for found in scores.values())]
    if not shared:
        raise UserError("no problem was graded for both base and adapter")
    return [
        {
            "problem_id": id,
            **{arm: problem_metrics(found[id]) for arm, found in scores.items()},
            **{f"{arm}_answers": list(found[id].answers) for arm, found in scores.items()},
            **{f"{arm}_correct": list(found[id].correct) for arm, found in scores.items()},
        }
        for id in shared
    ]


def table(comparison: Comparison) -> str:
    """The metrics side by side, means with their intervals."""
    columns: list[tuple[str, dict[str, Interval], str]] = [("base", comparison.base, ".3f")]
    if comparison.adapter is not None and comparison.change is not None:
        columns += [("adapter", comparison.adapter, ".3f"), ("change", comparison.change, "+.3f")]
    header = "".join(f"{title:<{NUMBER_OF_COLUMNS}}" for title, _, _ in columns)
    lines = [f"{'':10}{header}".rstrip()]
    for name in comparison.base:
        cells = (
            f"{_cell(found.get(name), style):<{NUMBER_OF_COLUMNS}}" for _, found, style in columns
        )
        lines.append(f"{name:<10}{''.join(cells)}".rstrip())
    return "\n".join(lines)


def _cell(interval: Interval | None, style: str) -> str:
    if interval is None:
        return "-"
    mean, low, high = (format(x, style) for x in (interval.mean, interval.low, interval.high))
    return f"{mean}  ?" if math.isnan(interval.low) else f"{mean} [{low}, {high}]"


def verdict(comparison: Comparison) -> list[str]:
    """What may be said, in sentences: the change of avg@n, on how many problems, and why not to trust it further."""
    lines = []
    count = len(comparison.per_problem)
    if comparison.change is not None:
        better, worse, same = comparison.outcomes
        lines.append(
            f"{difference_in_words(comparison.change[comparison.headline], comparison.headline)}: "
            f"better on {better}, worse on {worse}, equal on {same} of {count} problems"
        )
    if count < FEW_PROBLEMS:
        lines.append(
            f"{count} problems are few: the intervals are narrower than what is not known; raise --eval-size"
        )
    flat = [
        arm
        for arm, found in (("base", comparison.base), ("adapter", comparison.adapter))
        if found and found[comparison.headline].low == found[comparison.headline].high
    ]
    if flat and count > 1:
        lines.append(
            f"every problem gives the {' and the '.join(flat)} the same {comparison.headline}: "
            f"resampling cannot show how far {'it' if len(flat) == 1 else 'they'} could be off"
        )
    return lines


def write_report(
    folder: Path,
    settings: dict[str, Any],
    comparison: Comparison,
    evaluations: dict[str, Evaluation],
    sentences: Sequence[str],
) -> None:
    """Write summary.json, problems.jsonl and completions.parquet into `folder`, which must be there."""
    arms = {"base": comparison.base, "adapter": comparison.adapter, "change": comparison.change}
    summary = {
        **settings,
        "headline": comparison.headline,
        "num_problems": len(comparison.per_problem),
        "metrics": {
            arm: {name: _interval_json(interval) for name, interval in found.items()}
            for arm, found in arms.items()
            if found is not None
        },
        "other": {
            arm: {
                **{k: v for k, v in found.metrics.items() if k.startswith("completions/")},
                "num_completions": int(found.metrics["num_completions"]),
                "problems_left_out": found.num_ungraded,
                "completions_with_failed_rewards": found.num_failures,
            }
            for arm, found in evaluations.items()
        },
        "verdict": list(sentences),
    }
    if comparison.change is not None:
        summary["problems"] = dict(
            zip(("better", "worse", "equal"), comparison.outcomes, strict=True)
        )
    write = (folder / "summary.json").write_text
    write(json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    lines = [json.dumps(_plain(row), allow_nan=False) for row in comparison.per_problem]
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [{"arm": arm, **row} for arm, found in evaluations.items() for row in found.rows]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns), folder / "completions.parquet")


def _interval_json(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
