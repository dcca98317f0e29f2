r"""Answer formats: where a completion's answer stands, how a prompt asks for it, how an answer is written.

One table serves the instruction of a prompt, the reward, the demonstrations of few-shot prompts, the check that gold
answers score, and the count of completions without an answer; so they cannot disagree.

    boxed         \boxed{18}                     hashes        #### 18
    tags          <answer>18</answer>            answer_line   Answer: 18
    last_number   the last number of the text    exact         the whole text

The data's own answers may be written in any of these forms too (`gold_answer`): MATH has worked solutions with a
\boxed{}, GSM8K has `#### 18`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from qerl.tasks import grading
from qerl.tasks.numerals import number_text

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[\s*_]*answer[\s*_]*:[\s*_]*(.+?)[\s*_]*$", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True)
class AnswerFormat:
    """One way to give an answer."""

    instruction: str | None
    """What a prompt says to get it; None where any text has an answer."""
    mark: str | None
    """What a prompt that asks for it contains."""
    find: Callable[[str], str | None]
    """The answer in a completion, or None."""
    write: Callable[[str], str]
    """An answer, as a completion would give it."""


def find_hashes(text: str) -> str | None:
    """What follows the last `####`, on its line."""
    _, mark, rest = text.rpartition("####")
    line = rest.strip().partition("\n")[0].strip()
    return line if mark and line else None


def find_tags(text: str) -> str | None:
    """What the last <answer>...</answer> encloses."""
    contents = _TAGS.findall(text)
    return (contents[-1].strip() or None) if contents else None


def find_answer_line(text: str) -> str | None:
    """What follows the last `Answer:` that begins a line."""
    lines = _ANSWER_LINE.findall(text)
    return lines[-1].strip().strip("$").strip() or None if lines else None


def find_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{}."""
    content = grading.last_boxed(text)
    return (content.strip() or None) if content is not None else None


def find_last_number(text: str) -> str | None:
    """The last number, as plain digits."""
    value = grading.last_number(text)
    return None if value is None else number_text(value)


ANSWER_FORMATS: dict[str, AnswerFormat] = {
    "boxed": AnswerFormat(
        r"Think step by step, and put the final answer within \boxed{}.",
        r"\boxed",
        find_boxed,
        lambda answer: rf"\boxed{{{answer}}}",
    ),
    "hashes": AnswerFormat(
        "Think step by step, then give the final answer on the last line as #### ANSWER.",
        "####",
        find_hashes,
        lambda answer: f"#### {answer}",
    ),
    "tags": AnswerFormat(
        "Think step by step, then give the final answer as <answer>ANSWER</answer>.",
        "<answer>",
        find_tags,
        lambda answer: f"<answer>{answer}</answer>",
    ),
    "answer_line": AnswerFormat(
        "Think step by step, then give the final answer on the last line as Answer: ANSWER.",
        "Answer:",
        find_answer_line,
        lambda answer: f"Answer: {answer}",
    ),
    "last_number": AnswerFormat(None, None, find_last_number, lambda answer: answer),
    "exact": AnswerFormat(None, None, lambda text: text.strip() or None, lambda answer: answer),
}

MARKED = tuple(name for name, form in ANSWER_FORMATS.items() if form.mark is not None)
"""Formats that a model has to be asked for."""


def is_right(name: str, completion: str, answer: str) -> bool:
    """True if the completion's answer, found where the format says, is the gold one.

    last_number and exact compare as `grading` says; the others take equal texts, or what math-verify finds equal.
    """
    if name == "exact":
        return grading.exactly_equals(completion, answer)
    if name == "last_number":
        return grading.last_number_equals(completion, answer)
    found = ANSWER_FORMATS[name].find(completion)
    if found is None:
        return False
    if grading.exactly_equals(found, answer):
        return True
    return grading.math_equal(rf"\boxed{{{found}}}", answer)


def gold_answer(text: str, name: str | None) -> str:
    """The gold answer in a data set's answer: what the format finds where its mark is there, else the whole text."""
    form = ANSWER_FORMATS.get(name or "")
    if form is None or form.mark is None or form.mark not in text:
        return text.strip()
    return form.find(text) or text.strip()


def format_asked_for(prompts: list[str]) -> str | None:
    """The format whose mark nine of ten prompts contain; None if there is none, or no prompt."""
    for name in MARKED:
        num = sum(ANSWER_FORMATS[name].mark in prompt for prompt in prompts)  # pyright: ignore[reportOperatorIssue]
        if prompts and num >= 0.9 * len(prompts):
            return name
    return None
