"""A page about single runs: every metric as a chart, grouped by what it is about, and a browser of their completions."""

from collections.abc import Sequence
from html import escape

from qerl.reporting.charts import Line, bar_chart, color_of, line_chart, number
from qerl.reporting.page import completions_browser, has_points, legend, page, table
from qerl.reporting.runs import (
    ACCURACY,
    STEP_SECONDS,
    UPDATE_SPEED,
    RunRecord,
    metric_keys,
    minutes_until,
    phase_seconds,
    points,
    running_mean,
)

SMOOTHED_STEPS = 5
SMOOTHED = ("train/reward",)
GROUPS: dict[str, tuple[str, ...]] = {
    "Learning": ("train/reward", "eval/", "train/rewards/", "train/frac_reward", "train/entropy"),
    "Rollout and trainer": ("train/sampling/", "train/noise/", "train/kl", "train/clip_ratio/"),
    "Optimizer": ("train/loss", "train/grad_norm", "train/learning_rate", "train/"),
    "Completions": ("train/completions/",),
    "Speed": ("train/throughput/", UPDATE_SPEED, STEP_SECONDS, "train/time/", "eval/time/"),
    "Memory": ("train/memory/",),
}
"""Heading -> beginnings of the keys below it; the longest beginning that fits decides."""
TITLES = {
    ACCURACY: "held-out accuracy",
    "train/reward": f"training reward, and its mean of {SMOOTHED_STEPS} steps",
    "train/entropy": "entropy, nats a token",
    "train/noise/sigma": "noise sigma",
    "train/sampling/token_mult_prob_error": "mean exp|Δ log p|, rollout against trainer",
    UPDATE_SPEED: "update, trained tokens/s",
    STEP_SECONDS: "seconds a step",
}


def html(records: Sequence[RunRecord]) -> str:
    """The page of one or several runs, whose names must differ."""
    names = [record.name for record in records]
    body = [
        f"<h1>{escape(', '.join(names))}</h1>",
        table(
            ["run", "model", "task", "base", "steps", "minutes", "accuracy"],
            [_row(r) for r in records],
            (1, 2, 3),
        ),
    ]
    if len(records) > 1:
        body.append(legend(names))
    for heading, keys in _grouped(records).items():
        charts = [chart for key in keys if (chart := _chart(records, key))]
        if heading == "Speed" and (bars := _phase_bars(records)):
            charts.insert(0, bars)
        if charts:
            body += [f"<h2>{heading}</h2>", f'<div class="charts">{"".join(charts)}</div>']
    body.append(completions_browser(records, ("train", "eval")))
    body += ["<h2>Settings</h2>", *(_settings(record) for record in records)]
    return page(", ".join(names), body)


def _row(record: RunRecord) -> list[str]:
    config = record.config
    accuracy = points(record, ACCURACY)
    shown = f"{accuracy[0][1]:.3f} → {accuracy[-1][1]:.3f}" if accuracy else "–"
    noise = config["noise"]["scope"]
    return [
        record.name,
        config["model"],
        config["task"]["name"] or str(config["task"]["path"]),
        config["quant"] if noise == "off" else f"{config['quant']}, noise: {noise}",
        str(record.last_step),
        number(minutes_until(record, record.last_step)),
        shown,
    ]


def _grouped(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    keys = [*metric_keys(records), UPDATE_SPEED, STEP_SECONDS]
    grouped: dict[str, list[str]] = {heading: [] for heading in GROUPS}
    for key in keys:
        fitting = [
            (len(start), heading)
            for heading, starts in GROUPS.items()
            for start in starts
            if key.startswith(start)
        ]
        grouped[max(fitting)[1] if fitting else "Optimizer"].append(key)
    grouped["Learning"].sort(key=lambda key: key not in ("train/reward", ACCURACY))
    return grouped


def _chart(records: Sequence[RunRecord], key: str) -> str:
    """The chart of a key; none for what never changes, such as a count of held-out completions, or is one value."""
    lines = []
    for index, record in enumerate(records):
        values = points(record, key)
        smooth = running_mean(values, SMOOTHED_STEPS) if key in SMOOTHED else values
        faint = values if key in SMOOTHED else ()
        lines.append(Line(record.name, color_of(index), smooth, faint=faint))
    lines = [line for line in lines if line.points]
    values = {value for line in lines for _, value in line.points}
    if not has_points(lines) or (len(values) == 1 and key != ACCURACY):
        return ""
    last_step = max(record.last_step for record in records)
    title = TITLES.get(key, key.removeprefix("train/"))
    return line_chart(title, lines, last_step=last_step)


def _phase_bars(records: Sequence[RunRecord]) -> str:
    bars = [(record.name, phase_seconds(record)) for record in records]
    return (
        bar_chart("seconds a step by phase (medians)", bars, "s") if any(p for _, p in bars) else ""
    )


def _settings(record: RunRecord) -> str:
    rows = []
    for key, value in record.config.items():
        if isinstance(value, dict):
            rows += [f"{key}.{leaf} = {item!r}" for leaf, item in value.items()]
        else:
            rows.append(f"{key} = {value!r}")
    versions = ", ".join(f"{name} {v}" for name, v in record.stored["versions"].items() if v)
    return (
        f"<details><summary>{escape(record.name)}</summary><pre>{escape(chr(10).join(rows))}</pre>"
        f'<p class="soft small">{escape(versions)}; qerl at {escape(str(record.stored["git_revision"]))}; '
        f"{escape(str(record.run_dir))}</p></details>"
    )
