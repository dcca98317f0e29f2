"""Data sets as tasks: those of `catalog.DATASETS` by name, any other as task `dataset`.

Splits, rows and columns are chosen here; `reading.py` reads, `answers.py` knows the forms of answers. Without a held-out
split a tenth of the training rows is held out by a hash of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.tasks.answers import ANSWER_FORMATS, MARKED, format_asked_for, gold_answer
from qerl.tasks.catalog import DATASETS, Recipe
from qerl.tasks.filters import keep_levels, keep_rows
from qerl.tasks.grading import as_number
from qerl.tasks.problems import (
    Row,
    Task,
    column_names,
    find_columns,
    is_held_out,
    prompt_hash,
    prompt_text,
    rows_to_problems,
    take,
)
from qerl.tasks.reading import read_splits
from qerl.types import Problem

if TYPE_CHECKING:
    from qerl.config import TaskConfig

HELD_OUT_ONE_IN = 10
MOST_WITHOUT_GOLD = 0.02
"""Share of the rows that may lack the mark of a gold answer; more of them mean other data than the task's."""
PROMPTS_LOOKED_AT = 200
"""Prompts that are searched for the form of answer they ask for."""


def load_dataset_task(config: TaskConfig) -> Task:
    """The task of a data set. Raises UserError for whatever is wrong with the settings or the data."""
    name = config.name or "dataset"
    recipe = DATASETS.get(name, Recipe())
    path = config.path or recipe.hub_id
    if path is None:
        raise UserError(
            "task dataset needs task.path: a file, a folder or a Hugging Face data set id"
        )
    config, notes = _hub_settings(config, recipe)
    reader = _Reader(config, recipe, path)
    splits = read_splits(path, config)
    train, test = reader.divide(splits)
    notes += reader.notes
    if not train and recipe.train_split is not None:
        raise UserError(f"{path}: no training problems in split {config.train_split!r}")
    if recipe.train_split is None and config.train_size is not None:
        raise UserError(f"task.train_size means nothing to {name}, which is for evaluation only")
    train = take(train, config.train_size, "task.train_size")
    test = take(test, config.test_size, "task.test_size")
    title = name if config.name and config.name != "dataset" else f"dataset {path}"
    sizes = f"{len(train)} problems to train on, {len(test)} held out"
    if recipe.train_split is None:
        sizes = f"{len(test)} problems, for evaluation only"
    has_answers = any(problem.answer is not None for problem in (*train, *test))
    form, system_prompt = _answer_format(config, recipe, train or test)
    if form is None and all("####" in (problem.answer or "") for problem in train or test):
        notes.append("the answers hold '####': task.answer_format hashes takes what follows it")
    return Task(
        name=title,
        train=train,
        test=test,
        reward_funcs=(form or "math",) if has_answers else (),
        system_prompt=system_prompt,
        notes=(f"{title}: {sizes}", *notes),
        answer_format=form,
    )


def _hub_settings(config: TaskConfig, recipe: Recipe) -> tuple[TaskConfig, list[str]]:
    """The recipe's configuration of the hub data set where it is read from there; levels may choose it."""
    if config.path is not None or config.config is not None:
        return config, []
    if recipe.level_configs and config.levels:
        chosen = "level_" + "_".join(map(str, sorted(set(config.levels))))
        note = f"levels {config.levels} are the configuration {chosen} of {recipe.hub_id}"
        return config.model_copy(update={"config": chosen, "levels": ()}), [note]
    return config.model_copy(update={"config": recipe.config}), []


def _answer_format(
    config: TaskConfig, recipe: Recipe, problems: Sequence[Problem]
) -> tuple[str | None, str | None]:
    """How answers are to be given, and the system prompt that asks for it where the prompts themselves do not."""
    asked = format_asked_for([prompt_text(p.prompt) for p in problems[:PROMPTS_LOOKED_AT]])
    form = config.answer_format or recipe.answer_format
    if config.answer_format is None and form in MARKED and asked is not None:
        form = asked
    if form is None or form == asked:
        return form, None
    if form == recipe.answer_format and recipe.system_prompt is not None:
        return form, recipe.system_prompt
    return form, ANSWER_FORMATS[form].instruction


class _Reader:
    """State: what there is to say about the rows that were read."""

    def __init__(self, config: TaskConfig, recipe: Recipe, path: str):
        self._config, self._recipe, self._path = config, recipe, path
        self.notes: list[str] = []

    def divide(self, splits: dict[str, list[Row]]) -> tuple[list[Problem], list[Problem]]:
        """Training and held-out problems; no prompt is on both sides."""
        config = self._config
        if self._recipe.train_split is None:
            return [], self._problems(splits, self._evaluation_split(splits), "test_split")
        train = self._problems(splits, config.train_split, "train_split")
        test_split = config.test_split
        if test_split is None and "test" in splits and config.train_split != "test":
            test_split = "test"
        if test_split is None:
            self.notes.append(
                "no test split: a tenth of the problems is held out, by a hash of the text"
            )
            test = [p for p in train if is_held_out(p.prompt, HELD_OUT_ONE_IN)]
            return [p for p in train if not is_held_out(p.prompt, HELD_OUT_ONE_IN)], test
        test = self._problems(splits, test_split, "test_split")
        held_out = {prompt_hash(problem.prompt) for problem in test}
        kept = [problem for problem in train if prompt_hash(problem.prompt) not in held_out]
        if len(train) > len(kept):
            self.notes.append(
                f"{len(train) - len(kept)} training rows dropped: their prompt is held out too"
            )
        return kept, test

    def _evaluation_split(self, splits: dict[str, list[Row]]) -> str:
        wanted = (self._config.test_split, self._recipe.test_split, "test", *splits)
        if self._config.test_split is not None:
            return self._config.test_split
        return next(split for split in wanted if split in splits)

    def _problems(self, splits: dict[str, list[Row]], split: str, option: str) -> list[Problem]:
        config = self._config
        if split not in splits:
            raise UserError(
                f"task.{option}: {self._path} has no split {split!r}; there are {', '.join(splits)}"
            )
        rows = splits[split]
        if not rows:
            raise UserError(f"{self._path}: split {split!r} is empty")
        where = f"{self._path}, split {split!r}"
        numbers = keep_levels(rows, keep_rows(rows, config.filter, where), config.levels, where)
        if len(numbers) < len(rows):
            self.notes.append(
                f"{split}: {len(numbers)} of {len(rows)} rows kept by filter and levels"
            )
        names = column_names(rows)
        answer_column = config.answer_column or next(
            (name for name in self._recipe.answer_columns if name in names), None
        )
        columns = find_columns(rows, config.prompt_column, answer_column)
        without_gold: list[str] = []

        def gold(text: str, id: str) -> str | None:
            found = self._gold(text)
            if found is None:
                without_gold.append(id)
            return found

        problems, num_empty = rows_to_problems(rows, split, columns, gold, numbers)
        self._note_missing(split, without_gold, len(numbers))
        if num_empty:
            self.notes.append(f"{split}: {num_empty} rows dropped: their prompt is empty")
        if self._recipe.drop_repeats:
            first = {prompt_hash(problem.prompt): problem for problem in reversed(problems)}
            if len(first) < len(problems):
                self.notes.append(
                    f"{split}: {len(problems) - len(first)} rows dropped: their prompt is there already"
                )
            problems = list(reversed(first.values()))
        return problems

    def _gold(self, text: str) -> str | None:
        """The gold answer in a row's answer; None where the recipe's form is not found in it."""
        form = self._recipe.gold_format
        if form is None:
            return gold_answer(text, self._config.answer_format)
        found = ANSWER_FORMATS[form].find(text)
        if found is not None and as_number(found) is not None:
            return found.replace(",", "")
        return found

    def _note_missing(self, split: str, ids: Sequence[str], num_rows: int) -> None:
        """A few rows without the recipe's mark are dropped and said; many mean that this is other data."""
        if not ids:
            return
        mark = ANSWER_FORMATS[self._recipe.gold_format or "exact"].write("...")
        if len(ids) > MOST_WITHOUT_GOLD * num_rows:
            raise UserError(
                f"{ids[0]}: the answer has no '{mark}', as task {self._config.name} has it; "
                "for other data use task dataset"
            )
        self.notes.append(f"{split}: {len(ids)} rows dropped: their answer has no '{mark}'")
