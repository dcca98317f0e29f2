"""From rows of data to problems: columns, splits by hash, subsets. No reading, no libraries.

A prompt's place in a split or a subset depends on nothing but its text: `prompt_hash` decides. So the choice is the
same on every machine and for every seed, adding rows moves no other row, and equal questions are never on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qerl.errors import UserError
from qerl.tasks.builtin import answer_text
from qerl.types import Message, Problem

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Problems to train on, problems held out, and what a completion is worth unless the user says otherwise."""

    name: str
    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    """No prompt of `train` is among them."""
    reward_funcs: tuple[str, ...]
    """Default reward names; empty where the data has no answers."""
    system_prompt: str | None = None
    notes: tuple[str, ...] = field(default=())
    """Lines to show at the start of a run: sizes, what was dropped."""
    answer_format: str | None = None
    """How completions are to give their answer (`answers.ANSWER_FORMATS`); None where the reward is lenient."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Those to train on, or the held-out ones of a task that is for evaluation only."""
        return self.train or self.test


def prompt_text(prompt: str | list[Message]) -> str:
    """A prompt's text; the contents of messages, one after the other."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def prompt_hash(prompt: str | list[Message]) -> int:
    """64-bit hash of a prompt's text; space around it does not count."""
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")


def is_held_out(prompt: str | list[Message], one_in: int) -> bool:
    """True for one prompt in `one_in`, by its hash."""
    return prompt_hash(prompt) % one_in == 0


def take(problems: Iterable[Problem], size: int | None, option: str) -> tuple[Problem, ...]:
    """The `size` problems with the lowest hashes (all for None), lowest first; rows of equal text in data order.

    Raises UserError, naming `option`, if there are fewer.
    """
    ordered = sorted(problems, key=lambda problem: prompt_hash(problem.prompt))
    if size is not None and size > len(ordered):
        raise UserError(
            f"{option} asks for {size} problems, the data has {len(ordered)}; ask for fewer"
        )
    return tuple(ordered[:size])


@dataclass(frozen=True)
class Columns:
    """Where a row keeps its prompt and its answer; dotted names reach into structs."""

    prompt: str
    answer: str | None


def find_columns(rows: Sequence[Row], prompt: str | None, answer: str | None) -> Columns:
    """The configured columns, or the first of the usual names that the data has. UserError lists what is there."""
    names = column_names(rows)
    found = _find(names, prompt, PROMPT_COLUMNS, "prompt_column")
    if found is None:
        raise UserError(
            f"no column {', '.join(PROMPT_COLUMNS)}; the data has {', '.join(names)}; set task.prompt_column"
        )
    return Columns(found, _find(names, answer, ANSWER_COLUMNS, "answer_column"))


def column_names(rows: Sequence[Row]) -> list[str]:
    """Every column, and the fields of structs with dots, in the order they appear."""
    names: dict[str, None] = {}

    def visit(value: Row, prefix: str) -> None:
        for key, inner in value.items():
            names[prefix + key] = None
            if isinstance(inner, dict):
                visit(inner, f"{prefix}{key}.")

    for row in rows[:100]:
        visit(row, "")
    return list(names)


def _find(
    names: Sequence[str], wanted: str | None, usual: Sequence[str], option: str
) -> str | None:
    if wanted is None:
        return next((name for name in usual if name in names), None)
    if wanted not in names:
        raise UserError(f"task.{option}: no column {wanted!r}; the data has {', '.join(names)}")
    return wanted


def read_column(row: Row, name: str) -> Any:
    """A column's value; None where a struct on the way is missing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def rows_to_problems(
    rows: Sequence[Row],
    split: str,
    columns: Columns,
    gold: Callable[[str, str], str | None] | None = None,
    numbers: Sequence[int] | None = None,
) -> tuple[list[Problem], int]:
    """Problems of the rows with these numbers (None: all), with ids SPLIT-ROW, and how many had no prompt.

    `gold(answer, id)` turns a row's answer into the gold one, the raw text going to the column `solution`; rows for
    which it is None are left out. Reward
    functions get all columns by name; the answer also as `answer`, and by the last part of a dotted name.
    """
    problems = []
    num_empty = 0
    numbers = range(len(rows)) if numbers is None else numbers
    for index in numbers:
        row = rows[index]
        id = f"{split}-{index}"
        prompt = check_prompt(read_column(row, columns.prompt), id)
        if not prompt:
            num_empty += 1
            continue
        raw = None if columns.answer is None else read_column(row, columns.answer)
        others = dict(row)
        if columns.answer is not None and columns.answer != "answer":
            others.pop("answer", None)
            others.setdefault(columns.answer.rpartition(".")[2], raw)
        answer = answer_text(raw)
        if gold is not None and answer is not None and (found := gold(answer, id)) != answer:
            if found is None:
                continue
            others.pop("answer", None)
            others.setdefault("solution", answer)
            answer = found
        problems.append(Problem(id, prompt, answer, others))
    return problems, num_empty


def check_prompt(prompt: Any, where: str) -> str | list[Message] | None:
    """A prompt as it is used: a string, or messages with text content that end before the assistant's turn."""
    if prompt is None:
        return None
    if isinstance(prompt, str):
        return prompt if prompt.strip() else None
    if not isinstance(prompt, list):
        raise UserError(
            f"{where}: a prompt is a string or a list of messages, not {type(prompt).__name__}"
        )
    messages = []
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(
                f'{where}: a message is {{"role": ..., "content": ...}}, not {message!r:.80}'
            )
        if not isinstance(message["content"], str):
            raise UserError(
                f"{where}: message content must be text, not {type(message['content']).__name__}"
            )
        messages.append({key: value for key, value in message.items() if isinstance(value, str)})
    if messages and messages[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the prompt ends with an assistant message; leave the answer out of it"
        )
    return messages
