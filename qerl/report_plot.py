"""The learning curve of a run as a picture: what a reader looks at first, from metrics.jsonl alone.

Four panels over the training step: reward (mean of the step, and its running mean), held-out accuracy, entropy, and
the noise's sigma. A panel whose numbers a run does not have is left out.
"""

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl.errors import UserError
from qerl.metrics import read_metrics

CURVE = "curve.png"
SMOOTHING_STEPS = 5
"""Steps in the running mean of the reward."""
BLUE, ORANGE, GREY = "#1f5fa8", "#c8561b", "#5b6570"

Points = list[tuple[int, float]]


class ShownFigure(Figure):
    """A figure that a notebook shows as it is, without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def plot_learning_curve(run_dir: Path) -> Path:
    """Draw `run_dir`/curve.png and return its path. Raises UserError if the run has logged no step yet."""
    learning_curve(run_dir).savefig(run_dir / CURVE)
    return run_dir / CURVE


def learning_curve(run_dir: Path) -> Figure:
    """The figure. Raises UserError if the run has logged no step yet."""
    lines = read_metrics(run_dir)
    panels = [
        (title, points, draw)
        for title, key, draw in (
            ("reward", "train/reward", _draw_reward),
            ("held-out accuracy", "eval/accuracy", _draw_accuracy),
            ("entropy (nats per token)", "train/entropy", _draw_line),
            ("noise sigma", "train/noise/sigma", _draw_sigma),
        )
        if (points := _points(lines, key))
    ]
    if not panels:
        raise UserError(f"{run_dir} has no metrics to draw yet")
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = ShownFigure(figsize=(4.6 * num_columns, 2.9 * num_rows), dpi=150, layout="constrained")
    figure.suptitle(run_dir.resolve().name, fontsize=11, color=GREY)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    last_step = max(line["step"] for line in lines)
    for axis, (title, points, draw) in zip(axes, panels, strict=False):
        draw(axis, points)
        _finish(axis, title, last_step)
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def _points(lines: list[dict[str, Any]], key: str) -> Points:
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def _draw_line(axis: Axes, points: Points) -> None:
    marker = "." if len(points) == 1 else None
    axis.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.6, marker=marker)


def _draw_reward(axis: Axes, points: Points) -> None:
    steps, rewards = zip(*points, strict=True)
    axis.plot(steps, rewards, color=BLUE, alpha=0.35, linewidth=1, label="each step")
    windows = [rewards[max(0, i + 1 - SMOOTHING_STEPS) : i + 1] for i in range(len(rewards))]
    means = [sum(window) / len(window) for window in windows]
    axis.plot(steps, means, color=BLUE, linewidth=2, label=f"mean of {SMOOTHING_STEPS} steps")
    axis.legend(frameon=False, fontsize=8)


def _draw_accuracy(axis: Axes, points: Points) -> None:
    axis.plot(*zip(*points, strict=True), color=ORANGE, linewidth=2, marker="o", markersize=4)
    axis.set_ylim(0, 1)
    axis.set_title(
        f"{points[0][1]:.2f} → {points[-1][1]:.2f}", fontsize=10, loc="right", color=ORANGE
    )


def _draw_sigma(axis: Axes, points: Points) -> None:
    axis.step(*zip(*points, strict=True), where="post", color=GREY, linewidth=1.6)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:.3g}")


def _finish(axis: Axes, title: str, last_step: int) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("step", fontsize=9, color=GREY)
    axis.set_xlim(-0.03 * last_step, 1.03 * max(1, last_step))
    axis.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#b8bec5")
    axis.tick_params(labelsize=8, colors=GREY)
