"""Why a run learns, or does not: figures of scored completions and of a run's metrics, and what they mean in words.

Three callers, so that they cannot disagree: `qerl.check` on a dry sample before the run, `qerl.diagnose` on a run folder,
and the loop's one line when the reward is flat. `figures.py` counts; here is what the counts mean.

A group teaches something only if its rewards differ. So most findings are about why they do not: every answer wrong (too
hard, cut off, given in a form the reward does not find), every answer right (too easy), or a term that never changes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qerl.config import Config
from qerl.diagnosis.figures import Figures, Row, figures_of, is_same, variance
from qerl.metrics import COMPLETIONS, read_completions, read_metrics, say

LOW_SPREAD = 0.2
"""Share of groups with spread below which most of a batch's work is for nothing."""
MANY_CUT = 0.2
MANY_WITHOUT_ANSWER = 0.3
RECENT_STEPS = 20
"""Steps that "now" means."""
RATIO_WARNING, RATIO_BAD = 1.02, 1.05
"""Bounds of mean exp|delta log p| between rollout and trainer."""


@dataclass(frozen=True)
class Finding:
    """One thing to know."""

    kind: Literal["stop", "warning", "fine"]
    """stop: nothing is learnt like this"""
    text: str
    """What is so, with numbers"""
    advice: str = ""
    """What to do about it"""

    def line(self) -> str:
        """One line for a terminal."""
        advice = f" -> {self.advice}" if self.advice else ""
        return f"[{self.kind}] {self.text}{advice}"


def findings_of_samples(figures: Figures, max_completion_length: int) -> list[Finding]:
    """What the figures of sampled completions mean for learning, gravest first."""
    findings = [*_spread_findings(figures, max_completion_length)]
    cut, lost = figures.share_cut, figures.share_without_answer
    if cut > MANY_CUT:
        findings.append(
            Finding(
                "warning",
                f"{cut:.0%} of the completions are cut at {max_completion_length} tokens",
                "raise max_completion_length, or ask for shorter answers: what would come after the cut is never seen",
            )
        )
    if lost is not None and lost > MANY_WITHOUT_ANSWER:
        findings.append(
            Finding(
                "warning",
                f"reward {figures.correctness} finds no answer in {lost:.0%} of the completions",
                "say in system_prompt how the answer is to be given, show it with num_shots, or take another "
                "task.answer_format",
            )
        )
    for name, term in figures.terms.items():
        if term.share_none == 1:
            findings.append(
                Finding(
                    "warning",
                    f"reward {name} had a value for no completion",
                    "it counts for nothing; see rewards.log",
                )
            )
        elif is_same(term.low, term.high) and len(figures.terms) > 1:
            findings.append(
                Finding(
                    "warning",
                    f"reward {name} is {term.low:g} for every completion",
                    "a constant term teaches nothing: does the prompt ask for what it wants?",
                )
            )
    return sorted(findings, key=lambda finding: ("stop", "warning", "fine").index(finding.kind))


def _spread_findings(figures: Figures, max_completion_length: int) -> list[Finding]:
    share = figures.share_with_spread
    g = figures.group_size
    if share == 0:
        return [
            Finding(
                "stop",
                f"not one of {figures.num_groups} groups of {g} completions has different rewards, so nothing would be learnt",
                likely_cause(figures, max_completion_length),
            )
        ]
    if share < LOW_SPREAD:
        return [
            Finding(
                "warning",
                f"only {share:.0%} of the groups have different rewards; the others teach nothing",
                likely_cause(figures, max_completion_length),
            )
        ]
    return [
        Finding(
            "fine",
            f"{share:.0%} of the groups have different rewards: about so much of each batch teaches something",
        )
    ]


def likely_cause(figures: Figures, max_completion_length: int) -> str:
    """Why groups have no spread, and what to change."""
    term = figures.terms[figures.correctness]
    lost = figures.share_without_answer or 0.0
    if figures.share_all_right > figures.share_all_wrong:
        return (
            f"{figures.share_all_right:.0%} are all right: too easy; take harder problems (task.levels, task.filter, "
            "task.params) or drop what is solved"
        )
    if figures.share_cut > 0.5:
        return (
            f"{figures.share_all_wrong:.0%} are all wrong and {figures.share_cut:.0%} of the completions are cut at "
            f"{max_completion_length} tokens: raise max_completion_length"
        )
    if lost > 0.5:
        return (
            f"in {lost:.0%} of the completions reward {figures.correctness} finds no answer: the prompt has to ask for the "
            "form (system_prompt, num_shots), or take another task.answer_format"
        )
    if term.share_none > 0.5:
        return f"reward {figures.correctness} gave no value to {term.share_none:.0%} of the completions: see rewards.log"
    return (
        f"{figures.share_all_wrong:.0%} are all wrong: too hard for this model; take easier problems, show examples "
        "(num_shots), sample more (num_generations), or start from a better model"
    )


def findings_of_metrics(lines: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What a run's metrics lines (train/...) say, beside its completions."""
    findings = []
    lines = [line for line in lines if "train/reward" in line]
    if not lines:
        return findings
    if trend := reward_trend(lines):
        findings.append(trend)
    last = lines[-RECENT_STEPS:]

    def mean(key: str) -> float | None:
        values = [line[f"train/{key}"] for line in last if line.get(f"train/{key}") is not None]
        return sum(values) / len(values) if values else None

    failures = mean("rewards/failures")
    if failures:
        findings.append(
            Finding(
                "warning",
                f"{failures:.1f} reward values a step are lost to failures",
                "see rewards.log",
            )
        )
    norm = mean("grad_norm")
    if norm == 0:
        findings.append(
            Finding(
                "stop",
                "the gradient norm is 0: no step changes anything",
                "see the groups' spread above",
            )
        )
    elif norm is not None:
        findings.append(Finding("fine", f"gradient norm {norm:.2g} on average"))
    norms = [line["train/adapter_norm"] for line in lines if "train/adapter_norm" in line]
    if len(norms) > 1:
        text = f"norm of the adapter {norms[0]:.4g} after the first step, {norms[-1]:.4g} now"
        moved = norms[0] != norms[-1]
        advice = "" if moved else "it does not move: see the gradient, and learning_rate"
        findings.append(Finding("fine" if moved else "stop", text, advice))
    ratio = mean("sampling/token_mult_prob_error")
    if ratio is not None:
        text = (
            f"rollout and trainer differ by a factor of {ratio:.4f} a token (mean exp|delta log p|)"
        )
        if ratio > RATIO_WARNING and mean("noise/sigma"):
            advice = "the noise is part of it; noise.scope off, or smaller sigmas, show how large"
            findings.append(Finding("warning" if ratio > RATIO_BAD else "fine", text, advice))
        elif ratio > RATIO_BAD:
            advice = (
                "they disagree: suspect the engine's adapter, or a dtype; see docs/objective.md"
            )
            findings.append(Finding("stop", text, advice))
        elif ratio > RATIO_WARNING:
            findings.append(Finding("warning", text, "more than rounding explains; watch it"))
        else:
            findings.append(Finding("fine", text))
    entropy = [line["train/entropy"] for line in lines if line.get("train/entropy") is not None]
    if len(entropy) >= 2 and entropy[-1] < 0.1 * entropy[0]:
        findings.append(
            Finding(
                "warning",
                f"entropy fell from {entropy[0]:.2f} to {entropy[-1]:.2f}: the model hardly tries other answers",
                "a lower learning_rate, a larger epsilon_high or temperature, or more noise keep it exploring",
            )
        )
    return findings


def reward_trend(lines: Sequence[Mapping[str, Any]]) -> Finding | None:
    """Whether the reward has risen: the last steps against the first, with the noise between steps as the yardstick."""
    rewards = [line["train/reward"] for line in lines if line.get("train/reward") is not None]
    half = min(RECENT_STEPS, len(rewards) // 2)
    if half < 3:
        return None
    before, now = rewards[:half], rewards[-half:]
    change = sum(now) / half - sum(before) / half
    error = math.sqrt((variance(before) + variance(now)) / half)
    text = f"reward {sum(before) / half:.3f} in the first {half} steps, {sum(now) / half:.3f} in the last {half}"
    if change > 2 * error and change > 0:
        return Finding("fine", f"{text}: it rises")
    if -change > 2 * error:
        return Finding(
            "warning", f"{text}: it falls", "a lower learning_rate; look at agreement and entropy"
        )
    return Finding(
        "warning",
        f"{text}: no change beyond the noise between steps",
        "more steps, a higher learning_rate, more groups with spread",
    )


def flat_reward_line(
    lines: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    num_steps: int,
    max_completion_length: int,
) -> str | None:
    """One line when the last `num_steps` steps taught nothing, with the likely cause; else None.

    Nothing is taught when no group had spread, or when the reward is where it was as many steps before.
    """
    lines = [line for line in lines if "train/reward" in line]
    last = lines[-num_steps:]
    if len(last) < num_steps or not rows:
        return None
    figures = figures_of(rows)
    spread = 1 - sum(line["train/frac_reward_zero_std"] for line in last) / num_steps
    cause = likely_cause(figures, max_completion_length)
    signs = vital_signs(figures, last)
    if spread < 0.05:
        return (
            f"nothing to learn from in {num_steps} steps: {spread:.0%} of the groups had different rewards; {cause}; "
            f"{signs}"
        )
    trend = reward_trend(lines[-2 * num_steps :]) if len(lines) >= 2 * num_steps else None
    if trend is None or trend.kind == "fine":
        return None
    doubt = f"; {cause}" if spread < LOW_SPREAD else ""
    return (
        f"the reward has been flat for {2 * num_steps} steps ({trend.text}), {spread:.0%} of the groups have spread{doubt}; "
        f"{signs}"
    )


def vital_signs(figures: Figures, lines: Sequence[Mapping[str, Any]]) -> str:
    """The other usual suspects in a few words: truncation, extraction, constant terms, gradient, adapter, agreement."""
    signs = [f"{figures.share_cut:.0%} cut"]
    if figures.share_without_answer is not None:
        signs.append(f"no answer found in {figures.share_without_answer:.0%}")
    constant = [name for name, term in figures.terms.items() if is_same(term.low, term.high)]
    if constant:
        signs.append(f"constant: {', '.join(constant)}")
    names = {
        "grad_norm": "gradient norm",
        "adapter_norm": "adapter norm",
        "sampling/token_mult_prob_error": "agreement",
    }
    for key, name in names.items():
        value = lines[-1].get(f"train/{key}")
        if value is not None:
            signs.append(f"{name} {value:.4g}")
    return ", ".join(signs)


def recent_rows(run_dir: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Training completions of these steps, as far as their tables are there."""
    rows = []
    for step in steps:
        path = run_dir / COMPLETIONS / f"{step}.parquet"
        if path.exists():
            rows += [row for row in read_completions(path).to_pylist() if row["kind"] == "train"]
    return rows


def say_if_flat(run_dir: Path, config: Config) -> None:
    """The loop's line when the last `flat_reward_steps` steps taught nothing; nothing while they did."""
    num_steps = config.reward.flat_reward_steps
    lines = [line for line in read_metrics(run_dir) if "train/reward" in line]
    rows = recent_rows(run_dir, [line["step"] for line in lines[-num_steps:]])
    text = flat_reward_line(lines, rows, num_steps, config.rollout.max_completion_length)
    if text is not None:
        say(f"warning: {text} (python -m qerl.diagnose {run_dir})")
