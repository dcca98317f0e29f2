"""A comparison as report.html, report.md and report.json in its folder."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from qerl.reporting.charts import Line, bar_chart, color_of, line_chart, number
from qerl.reporting.comparison import ComparisonReport, phases_of
from qerl.reporting.differences import EARLY_SHARE, QUANTITIES, ArmRuns, Difference
from qerl.reporting.page import completions_browser, has_points, legend, page, table, write_text
from qerl.reporting.runs import ACCURACY, UPDATE_SPEED, Points, points, running_mean

SMOOTHED_STEPS = 5
CURVES = (
    ("held-out accuracy", ACCURACY, False),
    (f"training reward (mean of {SMOOTHED_STEPS} steps)", "train/reward", True),
    ("entropy, nats a token", "train/entropy", False),
    ("rollout/trainer agreement: mean exp|Δ log p|", "train/sampling/token_mult_prob_error", False),
    ("noise sigma", "train/noise/sigma", False),
    ("completion length, tokens", "train/completions/mean_length", False),
    ("rollout, tokens/s", "train/throughput/rollout_tokens_per_s", False),
    ("update, trained tokens/s", UPDATE_SPEED, False),
)
FROM_ZERO = ("train/noise/sigma", "train/throughput/rollout_tokens_per_s", UPDATE_SPEED)


def write_comparison(report: ComparisonReport) -> Path:
    """Write the three files; returns the page's path."""
    write_text(report.folder / "report.json", json.dumps(as_json(report), indent=1) + "\n")
    write_text(report.folder / "report.md", markdown(report))
    return write_text(report.folder / "report.html", html(report))


def title_of(report: ComparisonReport) -> str:
    """The headline, with its baseline."""
    others = [arm.name for arm in report.arms if arm.name != report.baseline]
    return f"{' and '.join(others) or 'nothing yet'} against the baseline {report.baseline}"


def html(report: ComparisonReport) -> str:
    """The page."""
    return page(
        title_of(report),
        [
            f"<h1>{escape(title_of(report))}</h1>",
            f'<p class="soft">{escape(subtitle(report))}</p>',
            f'<ul class="findings">{"".join(f"<li>{escape(s)}</li>" for s in report.sentences)}</ul>',
            f'<p class="soft small">{escape(_reading(report))}</p>',
            "<h2>Curves</h2>",
            f'<p class="soft small">{escape(_bands(report))}</p>',
            legend([arm.name for arm in report.arms]),
            f'<div class="charts">{"".join(_charts(report))}</div>',
            "<h2>Arms</h2>",
            table(*_summary_table(report)),
            '<p class="soft small">Means over finished seeds of one number a run: speeds are medians over the steps, '
            "memory is the process' peak. Times are this machine's while each run had it.</p>",
            *_times_html(report),
            f"<h2>Differences from {escape(report.baseline)}</h2>",
            table(*_difference_table(report), text_columns=(1, 3, 4, 5)),
            f'<p class="soft small">{escape(" ".join(report.checks))}</p>',
            "<h2>Runs</h2>",
            table(*_run_table(report), text_columns=(1, 2, 3)),
            _settings(report),
            completions_browser(
                [run for arm in report.arms for run in list(arm.records.values())[:1]],
                ("eval",),
                title="Held-out completions of each arm's first seed",
            ),
        ],
    )


def subtitle(report: ComparisonReport) -> str:
    """What ran, in one line."""
    config = next(iter(report.arms[0].records.values())).config
    seeds = ", ".join(str(seed) for seed in report.status["seeds"])
    rollout, task = config["rollout"], config["task"]["name"] or config["task"]["path"]
    steps = max(run.last_step for arm in report.arms for run in arm.records.values())
    return (
        f"{config['model']}, {task}: {steps} steps of {rollout['prompts_per_step']} prompts x "
        f"{rollout['num_generations']} completions, seeds {seeds}; everything but the arm's settings is equal."
    )


def markdown(report: ComparisonReport) -> str:
    """The findings and tables for a document."""
    lines = [f"# {title_of(report)}", "", subtitle(report), ""]
    lines += [f"* {sentence}" for sentence in report.sentences]
    lines += ["", _reading(report), "", *_markdown_table(*_summary_table(report)), ""]
    if report.times:
        lines += [*_markdown_table(*_time_table(report)), ""]
    lines += [*_markdown_table(*_difference_table(report)), "", *report.checks, ""]
    return "\n".join(lines)


def as_json(report: ComparisonReport) -> dict:
    """Everything, raw: curves of every run too."""
    return {
        "title": title_of(report),
        "baseline": report.baseline,
        "findings": report.sentences,
        "checks": report.checks,
        "summary": report.summary,
        "differences": [_finite(asdict(difference)) for difference in report.differences],
        "times_to_accuracy": [asdict(time) for time in report.times],
        "runs": report.status["runs"],
        "arms": {
            arm.name: {
                "settings": arm.settings,
                "phase_seconds": phases_of(arm),
                "seeds": {
                    seed: {
                        "finished": seed in arm.finished,
                        "versions": run.stored["versions"],
                        "git_revision": run.stored["git_revision"],
                        "config": run.config,
                        "curves": {key: points(run, key) for _, key, _ in CURVES},
                    }
                    for seed, run in arm.records.items()
                },
            }
            for arm in report.arms
        },
    }


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _reading(report: ComparisonReport) -> str:
    level = f"{100 * report.differences[0].interval.level:g} %" if report.differences else "95 %"
    return (
        f"Intervals hold {level} of bootstrap resamples; for accuracies seeds and problems are both resampled. "
        "A direction is named only where an interval excludes 0. Several arms and quantities are looked at and nothing "
        "is corrected for that; few seeds say little about other seeds, other tasks or other models."
    )


def _bands(report: ComparisonReport) -> str:
    unfinished = [
        run.name
        for arm in report.arms
        for seed, run in arm.records.items()
        if seed not in arm.finished
    ]
    text = "Lines are means over an arm's seeds, bands run from the lowest to the highest seed."
    return text + (f" Not finished: {', '.join(unfinished)}." if unfinished else "")


def _charts(report: ComparisonReport) -> list[str]:
    charts = []
    last_step = max(run.last_step for arm in report.arms for run in arm.records.values())
    for title, key, smooth in CURVES:
        lines = [curve_of(arm, index, key, smooth) for index, arm in enumerate(report.arms)]
        if has_points(lines):
            drawn = [line for line in lines if line.points]
            from_zero = key in FROM_ZERO
            charts.append(line_chart(title, drawn, last_step=last_step, from_zero=from_zero))
    phases = [(arm.name, phases_of(arm)) for arm in report.arms]
    if any(parts for _, parts in phases):
        charts.append(bar_chart("seconds a step by phase", phases, "s"))
    peaks = [
        (arm.name, {"peak": peak})
        for arm in report.arms
        if (peak := report.summary[arm.name]["peak GiB"]) is not None
    ]
    if peaks:
        charts.append(bar_chart("peak memory", peaks, "GiB"))
    return charts


def curve_of(arm: ArmRuns, index: int, key: str, smooth: bool) -> Line:
    """An arm's mean over seeds at the steps that all of them have, and the band from the lowest to the highest."""
    curves: list[Points] = [points(run, key) for run in arm.records.values()]
    if smooth:
        curves = [running_mean(curve, SMOOTHED_STEPS) for curve in curves]
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve:
            by_step.setdefault(step, []).append(value)
    whole = {step: v for step, v in sorted(by_step.items()) if len(v) == len(curves)} or by_step
    mean = [(step, statistics.fmean(values)) for step, values in whole.items()]
    band = [(step, min(v), max(v)) for step, v in whole.items()] if len(curves) > 1 else []
    return Line(arm.name, color_of(index), mean, band)


def _summary_table(report: ComparisonReport) -> tuple[list[str], list[list[str]]]:
    names = ["seeds finished", *QUANTITIES]
    head = ["", *(arm.name for arm in report.arms)]
    rows = []
    for name in names:
        values = [report.summary[arm.name][name] for arm in report.arms]
        shown = (
            name
            if name != "accuracy early"
            else f"accuracy early (about {EARLY_SHARE:.0%} of the run)"
        )
        rows.append([shown, *("–" if v is None else _cell(name, v) for v in values)])
    return head, rows


def _cell(name: str, value: float) -> str:
    if name.startswith(("accuracy", "reward", "entropy", "mean exp")):
        return f"{value:.3f}"
    return number(value)


def _times_html(report: ComparisonReport) -> list[str]:
    if not report.times:
        return []
    head, rows = _time_table(report)
    return [
        "<h2>Steps and minutes to an accuracy</h2>",
        table(head, rows, text_columns=(2, 3)),
        '<p class="soft small">The first evaluation at or above it, seed by seed, so no finer than the evaluations. '
        "Minutes are training steps only, without starts and evaluations.</p>",
    ]


def _time_table(report: ComparisonReport) -> tuple[list[str], list[list[str]]]:
    rows = [
        [time.arm, f"{time.target:g}", _each(time.steps, "{:d}"), _each(time.minutes, "{:.1f}")]
        for time in report.times
    ]
    return ["arm", "accuracy", "steps, each seed", "minutes, each seed"], rows


def _each(values: dict, form: str) -> str:
    return ", ".join("not reached" if v is None else form.format(v) for v in values.values())


def _difference_table(report: ComparisonReport) -> tuple[list[str], list[list[str]]]:
    head = ["arm", "quantity", "mean", "interval", "each seed", "resampled"]
    return head, [_difference_row(difference) for difference in report.differences]


def _difference_row(difference: Difference) -> list[str]:
    form = "{:+.1f} %" if difference.unit == "percent" else "{:+.3f}"
    interval = difference.interval
    span = (
        "one value"
        if math.isnan(interval.low)
        else f"{form.format(interval.low)} to {form.format(interval.high)}"
    )
    each = ", ".join(form.format(value) for value in difference.per_seed.values())
    resampled = difference.resampled if not math.isnan(interval.low) else ""
    return [difference.arm, difference.quantity, form.format(interval.mean), span, each, resampled]


def _run_table(report: ComparisonReport) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            name,
            run["state"],
            run["message"],
            str(run["sessions"]),
            f"{run['seconds'] / 60:.1f}",
        ]
        for name, run in report.status["runs"].items()
    ]
    return ["run", "state", "message", "sessions", "minutes in all"], rows


def _settings(report: ComparisonReport) -> str:
    run = next(iter(report.arms[0].records.values()))
    versions = ", ".join(f"{name} {v}" for name, v in run.stored["versions"].items() if v)
    arms = "\n".join(f"{arm.name:<16}{json.dumps(arm.settings)}" for arm in report.arms)
    commands = "\n".join(info["command"] for info in report.status["runs"].values())
    return (
        f"<h3>What makes each arm</h3><pre>{escape(arms)}</pre><h3>Commands</h3><pre>{escape(commands)}</pre>"
        f'<p class="soft small">{escape(versions)}; qerl at {escape(str(run.stored["git_revision"]))}.</p>'
    )


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]
