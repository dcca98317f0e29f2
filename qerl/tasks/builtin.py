"""The built-in rewards, by name: ordinary reward functions with the signature a user's own have.

`completions` are strings, or message lists when the data's prompts are; `answer` is the gold answer of each sample. A
sample without one gives None, which leaves the term out.
"""

import functools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qerl.tasks import grading
from qerl.tasks.answers import ANSWER_FORMATS, MARKED, is_right


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """The text of a completion: the string itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def answer_text(answer: Any) -> str | None:
    """A gold answer as text: numbers as Python prints them, lists and structs as JSON, None as None."""
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, list | dict):
        return json.dumps(answer, ensure_ascii=False)
    return str(answer)


def _graded(grade: Callable[[str, str], bool]) -> Callable[..., list[float | None]]:
    """A reward function that is 1 where `grade(completion, answer)` holds and 0 elsewhere."""

    def reward(completions: Sequence, answer: Sequence, **columns: Any) -> list[float | None]:
        golds = [answer_text(one) for one in answer]
        return [
            None if gold is None else float(grade(completion_text(completion), gold))
            for completion, gold in zip(completions, golds, strict=True)
        ]

    return reward


def boxed_format(completions: Sequence, **columns: Any) -> list[float | None]:
    """1 where the completion has a \\boxed{} that is not empty."""
    contents = [grading.last_boxed(completion_text(completion)) for completion in completions]
    return [float(content is not None and content.strip() != "") for content in contents]


def reasoning_gym(
    completions: Sequence,
    entry: Sequence,
    family: Sequence,
    params: Sequence,
    answer_format: Sequence[str | None],
    **columns: Any,
) -> list[float | None]:
    """The family's own score of the answer found in the completion; some families give part credit."""
    scores: list[float | None] = []
    rows = zip(completions, entry, family, params, answer_format, strict=True)
    for completion, item, name, settings, form in rows:
        text = completion_text(completion)
        if form is None:
            answer = grading.extract_answer(text, item["answer"])
        else:
            answer = ANSWER_FORMATS[form].find(text) or ""
        scores.append(float(_scorer(name, json.dumps(settings))(answer, item)))
    return scores


@functools.cache
def _scorer(family: str, params: str) -> Callable[[str, dict], float]:
    """`score_answer` of a family; some compare with a tolerance that is one of its parameters."""
    import reasoning_gym as library  # over a second: only in processes that need it

    return library.create_dataset(family, size=1, seed=0, **json.loads(params)).score_answer


BUILTIN_REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "math": _graded(grading.math_equal),
    **{name: _graded(partial(is_right, name)) for name in ANSWER_FORMATS},
    "reasoning_gym": reasoning_gym,
    "boxed_format": boxed_format,
}

BUILTIN_LIBRARIES = {
    **dict.fromkeys(("math", *MARKED), "math_verify"),
    "reasoning_gym": "reasoning_gym",
}
"""What a reward imports; workers do it before their first call, whose time limit it would use up."""
