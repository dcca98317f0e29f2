"""Figures of scored completions: spread of groups, shares right, cut and without an answer, each reward term.

Rows are those of the completions table (`metrics.COLUMN_TYPES`). Pure Python: the command line needs it without torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from qerl.tasks.answers import ANSWER_FORMATS, find_boxed, find_last_number

Row = Mapping[str, Any]

TERM = "reward/"


@dataclass(frozen=True)
class Term:
    """The values of one reward function."""

    mean: float
    std: float
    low: float
    high: float
    share_none: float


@dataclass(frozen=True)
class Figures:
    """What scored completions come to. Shares are of groups (a problem's samples of one step) or of completions."""

    num_groups: int
    group_size: int
    share_with_spread: float
    share_all_right: float
    share_all_wrong: float
    pass_at_1: float
    pass_at_g: float
    share_cut: float
    share_without_answer: float | None
    """None where no reward says what an answer looks like."""
    mean_tokens: float
    terms: dict[str, Term]
    correctness: str
    """The term that says what is right: at least `right_at`."""


def figures_of(
    rows: Sequence[Row], correctness: str | None = None, right_at: float = 1.0
) -> Figures:
    """Figures of completions rows, at least one. `correctness`: a reward's name; None: the first one that is built in."""
    names = [key.removeprefix(TERM) for key in rows[0] if key.startswith(TERM)]
    correctness = correctness or next((n for n in names if _is_grader(n)), names[0])
    groups = [
        list(group)
        for _, group in groupby(rows, key=lambda row: (row["version"], row["problem_id"]))
    ]
    right = [[(row[TERM + correctness] or 0.0) >= right_at for row in group] for group in groups]
    texts = [(row["completion"], row["answer"]) for row in rows]
    found = [has_answer(correctness, text, answer) for text, answer in texts]
    return Figures(
        num_groups=len(groups),
        group_size=max(map(len, groups)),
        share_with_spread=_share(_has_spread([row["reward"] for row in group]) for group in groups),
        share_all_right=_share(map(all, right)),
        share_all_wrong=_share(not any(group) for group in right),
        pass_at_1=_share(value for group in right for value in group),
        pass_at_g=_share(map(any, right)),
        share_cut=_share(row["finish_reason"] == "length" for row in rows),
        share_without_answer=None if None in found else _share(not one for one in found),
        mean_tokens=sum(row["num_tokens"] for row in rows) / len(rows),
        terms={name: _term([row[TERM + name] for row in rows]) for name in names},
        correctness=correctness,
    )


def has_answer(reward: str, completion: str, answer: str | None) -> bool | None:
    """True if a built-in reward finds something to compare in the completion; None where that cannot be said."""
    if reward in ANSWER_FORMATS:
        return ANSWER_FORMATS[reward].find(completion) is not None
    if reward == "math":
        return find_boxed(completion) is not None or find_last_number(completion) is not None
    return None


def describe_figures(figures: Figures) -> list[str]:
    """Figures as lines for a terminal."""
    width = max(len(name) for name in figures.terms)
    lines = [f"  {'reward term':<{max(width, 11)}}    mean     std     min     max"]
    for name, term in figures.terms.items():
        numbers = "".join(f"{value:8.3f}" for value in (term.mean, term.std, term.low, term.high))
        none = f"   no value for {term.share_none:.0%}" if term.share_none else ""
        lines.append(f"  {name:<{max(width, 11)}}{numbers}{none}")
    lost = figures.share_without_answer
    lines += [
        f"  right ({figures.correctness}): pass@1 {figures.pass_at_1:.3f}, pass@{figures.group_size} {figures.pass_at_g:.3f}",
        f"  groups: {figures.share_with_spread:.0%} with spread, {figures.share_all_right:.0%} all right, "
        f"{figures.share_all_wrong:.0%} all wrong",
        f"  length: {figures.mean_tokens:.0f} tokens on average, {figures.share_cut:.0%} cut"
        + ("" if lost is None else f"; without an answer: {lost:.0%}"),
    ]
    return lines


def is_same(low: float, high: float) -> bool:
    """True for rewards that differ by rounding only, as `algo.advantages` has it."""
    return high - low <= 1e-8 + 1e-6 * max(abs(low), abs(high))


def variance(values: Sequence[float]) -> float:
    """Unbiased; 0 for a single value."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)


def _is_grader(name: str) -> bool:
    return name in ANSWER_FORMATS or name in ("math", "reasoning_gym")


def _has_spread(rewards: Sequence[float | None]) -> bool:
    known = [value for value in rewards if value is not None and not math.isnan(value)]
    return len(known) > 1 and not is_same(min(known), max(known))


def _term(values: Sequence[float | None]) -> Term:
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return Term(math.nan, math.nan, math.nan, math.nan, 1.0)
    return Term(
        sum(known) / len(known),
        math.sqrt(variance(known)),
        min(known),
        max(known),
        1 - len(known) / len(values),
    )


def _share(values: Iterable[Any]) -> float:
    flags = [bool(value) for value in values]
    return sum(flags) / len(flags) if flags else 0.0
