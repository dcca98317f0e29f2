"""A comparison in Python: what its report says, as data frames. See `qerl.compare` and docs/compare.md."""

from pathlib import Path

import pandas as pd

from qerl.report_plot import ShownFigure
from qerl.reporting.charts import color_of
from qerl.reporting.comparison import read_comparison
from qerl.reporting.comparison_page import CURVES, curve_of, markdown

PLOTTED = ("eval/accuracy", "train/reward", "train/entropy", "train/sampling/token_mult_prob_error")


class ComparisonResult:
    """State: the folder, and its report as it was when this was made."""

    def __init__(self, folder: Path):
        """Read a comparison's folder. Raises UserError if it holds none, or no run of it has metrics yet."""
        self.folder = folder
        self.report = read_comparison(folder)

    @property
    def findings(self) -> tuple[str, ...]:
        """What may be said, in words; losses first."""
        return self.report.sentences

    @property
    def summary(self) -> pd.DataFrame:
        """Quantities down, arms across: means over finished seeds."""
        return pd.DataFrame(self.report.summary)

    @property
    def differences(self) -> pd.DataFrame:
        """Each arm against the baseline, with intervals."""
        rows = [
            {
                "arm": d.arm,
                "quantity": d.quantity,
                "mean": d.interval.mean,
                "low": d.interval.low,
                "high": d.interval.high,
                "unit": d.unit,
                "resampled": d.resampled,
            }
            for d in self.report.differences
        ]
        return pd.DataFrame(rows)

    def plot(self) -> ShownFigure:
        """Accuracy, reward, entropy and agreement: means over seeds, bands from the lowest to the highest."""
        titles = {key: (title, smooth) for title, key, smooth in CURVES}
        figure = ShownFigure(figsize=(9.2, 5.8), dpi=110, layout="constrained")
        for axis, key in zip(figure.subplots(2, 2).flatten(), PLOTTED, strict=True):
            title, smooth = titles[key]
            for index, arm in enumerate(self.report.arms):
                line = curve_of(arm, index, key, smooth)
                if not line.points:
                    continue
                color = color_of(index)
                axis.plot(*zip(*line.points, strict=True), color=color, label=arm.name, marker=".")
                if line.band:
                    steps, low, high = zip(*line.band, strict=True)
                    axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            axis.set_title(title, fontsize=10, loc="left")
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
        figure.axes[0].legend(frameon=False, fontsize=8)
        return figure

    def _repr_markdown_(self) -> str:
        return markdown(self.report)
