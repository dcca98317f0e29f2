"""Few-shot prompts: solved examples before each problem, from the training split and never from the held-out one.

The same examples stand before every problem. They are no longer trained on, so no problem is shown with its own answer.
An example's answer is the data's worked solution where that gives its answer in the form that the task asks for, else the
answer alone in this form: what is shown is what the reward wants.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.tasks.answers import ANSWER_FORMATS
from qerl.tasks.problems import Task, prompt_text

if TYPE_CHECKING:
    from qerl.types import Problem

CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's notes for a calculator, <<48/2=24>>, which are no part of the text."""


@dataclass(frozen=True)
class Shot:
    """A solved example."""

    prompt: str
    answer: str


def take_shots(task: Task, num_shots: int) -> tuple[Task, tuple[Shot, ...]]:
    """`num_shots` examples, the same for everyone, and the task without them. UserError if there are too few."""
    if num_shots == 0:
        return task, ()
    candidates = [p for p in task.train if isinstance(p.prompt, str) and p.answer is not None]
    if len(candidates) <= num_shots:
        raise UserError(
            f"num_shots={num_shots}: {task.name} has {len(candidates)} training problems with a text prompt and an answer "
            "to show; examples come from the training split only"
        )
    chosen = sorted(candidates, key=lambda problem: _order(problem.prompt))[:num_shots]
    taken = {problem.id for problem in chosen}
    rest = replace(
        task,
        train=tuple(problem for problem in task.train if problem.id not in taken),
        notes=(*task.notes, f"{num_shots} training problems are examples and not trained on"),
    )
    return rest, tuple(
        Shot(prompt_text(p.prompt), demonstrate(p, task.answer_format)) for p in chosen
    )


def demonstrate(problem: Problem, answer_format: str | None) -> str:
    """A completion that solves the problem: worked where the data allow it."""
    answer = problem.answer or ""
    solution = problem.columns.get("solution")
    solution = CALCULATOR.sub("", solution) if isinstance(solution, str) else ""
    if answer_format is None:
        return solution or answer
    form = ANSWER_FORMATS[answer_format]
    found = form.find(solution)
    if found is not None and found.replace(",", "") == answer:
        return solution
    return form.write(answer)


def _order(prompt: object) -> bytes:
    """Another order than that of `prompt_hash`, which decides about splits and subsets."""
    return hashlib.sha256(f"shot:{prompt}".encode(errors="surrogatepass")).digest()
