"""Do the rewards like right answers, and only those? Gold, empty and exchanged answers through the reward functions.

A gold completion is the worked solution or the answer in the form the task asks for, inside the tags that user functions
look for. An exchanged one answers another problem. A term that likes gold answers better than exchanged ones looks at
the answer; the others (format, length) are only reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from qerl.diagnosis.figures import is_same
from qerl.diagnosis.findings import Finding
from qerl.rollout import reward_call
from qerl.tasks.board import describe_failure
from qerl.tasks.calls import BuiltinFunction, RewardFailure, RewardSpec
from qerl.tasks.pool import RewardPool
from qerl.tasks.prompts import EncodedProblems
from qerl.tasks.shots import demonstrate
from qerl.types import Problem

KINDS = ("gold", "empty", "exchanged")


@dataclass(frozen=True)
class GoldScores:
    """What each term gave: [n] for each kind of completion, None where it gave nothing."""

    values: dict[str, dict[str, list[float | None]]]
    """By term, then by kind."""
    problems: tuple[Problem, ...]
    failures: tuple[RewardFailure, ...]

    def mean(self, term: str, kind: str) -> float | None:
        """Mean of the values there are."""
        known = [value for value in self.values[term][kind] if value is not None]
        return sum(known) / len(known) if known else None

    def looks_at_answer(self, term: str) -> bool:
        """True if gold answers do better than those of other problems."""
        gold, exchanged = self.mean(term, "gold"), self.mean(term, "exchanged")
        return gold is not None and (exchanged is None or gold > exchanged)


def score_gold(
    encoded: EncodedProblems,
    indices: Sequence[int],
    rewards: Sequence[RewardSpec],
    answer_format: str | None,
    pool: RewardPool,
    end_id: int,
) -> GoldScores | None:
    """Score the chosen problems' gold, empty and exchanged answers; None where the data have no answers."""
    indices = [index for index in indices if encoded.problems[index].answer is not None]
    if not indices:
        return None
    problems = tuple(encoded.problems[index] for index in indices)
    marks = tuple(dict.fromkeys(mark for spec in rewards for mark in spec.marks))
    gold = [gold_completion(problem, answer_format, marks) for problem in problems]
    calls = []
    for place, index in enumerate(indices):
        texts = [gold[place], "", _exchanged(problems, gold, place)]
        calls.append(reward_call(encoded, index, texts, [[end_id]] * len(texts)))
    results = pool.score(calls)
    values = {
        spec.name: {
            kind: [result.values[spec.name][place] for result in results]
            for place, kind in enumerate(KINDS)
        }
        for spec in rewards
    }
    failures = tuple(failure for result in results for failure in result.failures)
    return GoldScores(values, problems, failures)


def gold_completion(problem: Problem, answer_format: str | None, marks: Sequence[str]) -> str:
    """A right completion of a problem; other tags than the answer's are put before it, with a word inside."""
    form = "tags" if answer_format is None and "<answer>" in marks else answer_format
    tags = [mark for mark in marks if mark.startswith("<") and mark != "<answer>"]
    before = "".join(f"{tag}\nwork\n</{tag[1:]}\n" for tag in tags)
    return before + demonstrate(problem, form)


def describe_gold(scores: GoldScores) -> list[str]:
    """A table for a terminal."""
    width = max(11, *(len(name) for name in scores.values))
    lines = [f"  {'reward term':<{width}}" + "".join(f"{kind:>11}" for kind in KINDS)]
    for name in scores.values:
        means = (scores.mean(name, kind) for kind in KINDS)
        row = "".join(f"{'none' if mean is None else f'{mean:.3f}':>11}" for mean in means)
        lines.append(f"  {name:<{width}}{row}")
    return lines


def findings_of_gold(scores: GoldScores, rewards: Sequence[RewardSpec]) -> list[Finding]:
    """What the table means."""
    findings = []
    if scores.failures:
        findings.append(
            Finding(
                "warning",
                f"{len(scores.failures)} reward calls failed; {describe_failure(scores.failures[0])}",
                "a reward has to return a number, or None, for any text",
            )
        )
    answering = [spec for spec in rewards if scores.looks_at_answer(spec.name)]
    if not answering:
        findings.append(
            Finding(
                "stop",
                "no reward term likes gold answers better than the answers of other problems",
                "the reward does not look at the answer, or does not find it: check answer_column, task.answer_format and "
                "the reward function",
            )
        )
    for spec in answering:
        findings += _judge(scores, spec)
    return findings


def _judge(scores: GoldScores, spec: RewardSpec) -> list[Finding]:
    """One term that looks at the answer: gold scores the maximum, empty and exchanged do not."""
    values = scores.values[spec.name]
    known = [value for kind in KINDS for value in values[kind] if value is not None]
    top = max(1.0, *known) if isinstance(spec.source, BuiltinFunction) else max(known)
    lost = [
        problem
        for problem, value in zip(scores.problems, values["gold"], strict=True)
        if value is not None and value < top and not is_same(value, top)
    ]
    findings = []
    if lost:
        share = len(lost) / len(scores.problems)
        findings.append(
            Finding(
                "stop" if share > 0.5 else "warning",
                f"reward {spec.name}: {len(lost)} of {len(scores.problems)} gold answers do not score {top:g}, the most; "
                f"for example {lost[0].id}, {lost[0].answer!r:.60}",
                "such problems can never be right: another reward or task.answer_format, or leave them out (task.filter)",
            )
        )
    else:
        findings.append(
            Finding("fine", f"reward {spec.name}: every gold answer scores {top:g}, the most")
        )
    for kind, what in (("empty", "an empty completion"), ("exchanged", "another problem's answer")):
        given = [value for value in values[kind] if value is not None]
        num = sum(value >= top or is_same(value, top) for value in given)
        if given and num > 0.05 * len(given):
            findings.append(
                Finding(
                    "stop" if num > 0.5 * len(given) else "warning",
                    f"reward {spec.name} gives {what} the most in {num} of {len(given)} cases",
                    "it can be had without solving the problem",
                )
            )
    return findings


def _exchanged(problems: Sequence[Problem], gold: Sequence[str], place: int) -> str:
    """The gold completion of the next problem with another answer; a text that is nobody's answer if there is none."""
    for step in range(1, len(problems)):
        other = (place + step) % len(problems)
        if problems[other].answer != problems[place].answer:
            return gold[other]
    return "I do not know."
