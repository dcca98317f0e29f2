"""Tasks `reasoning-gym/FAMILY`: problems made by a program, as many as wanted, with a program to score answers.

reasoning-gym makes item i of seed s from s + i, so the items of two seeds are mostly the same. Hence one pool from one
seed (`task.pool_seed`, not the run's), without duplicates, in which a hash of a question's text says whether it is
held out: a question is on the same side whatever sizes are asked. Small families run dry (one-digit sums of two terms:
200 questions); then what there is is divided by the order of the hashes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from qerl.errors import UserError
from qerl.tasks.answers import ANSWER_FORMATS
from qerl.tasks.problems import Task, is_held_out, prompt_hash
from qerl.types import Problem

if TYPE_CHECKING:
    from qerl.config import TaskConfig

DEFAULT_TRAIN_SIZE = 1000
DEFAULT_TEST_SIZE = 200
HELD_OUT_ONE_IN = 5

Entry = dict[str, Any]


class Items(Protocol):
    """A list of entries, or one of the library's data sets, which make an entry when it is asked for."""

    def __getitem__(self, index: int, /) -> Entry: ...


def load_reasoning_gym(config: TaskConfig) -> Task:
    """Problems of one family, or of several. Raises UserError for a wrong name or parameter and too small a pool."""
    for option in (
        *("path", "config", "revision", "test_split", "prompt_column", "answer_column"),
        *("filter", "levels"),
    ):
        if getattr(config, option) not in (None, {}, ()):
            raise UserError(
                f"task.{option} means nothing to {config.name}, whose problems are generated"
            )
    families = config.name.partition("/")[2].split("+")
    if len(families) == 1:
        if config.weights:
            raise UserError(f"task.weights are for several families, as {config.name}+products")
        return _load_family(config)
    return _load_mix(config, families)


def _load_mix(config: TaskConfig, families: Sequence[str]) -> Task:
    """Families in the proportions of task.weights, each with its own part of task.params."""
    for option, table in (("weights", config.weights), ("params", config.params)):
        for name in table:
            if name not in families:
                raise UserError(
                    f"task.{option}: {name!r} is no family of {config.name}; for several families it is a table with "
                    f"an entry a family, of {', '.join(families)}"
                )
    if len(set(families)) < len(families):
        raise UserError(f"{config.name} names a family twice; task.weights gives it more weight")
    weights = [config.weights.get(family, 1.0) for family in families]
    if min(weights) <= 0:
        raise UserError("task.weights must be above 0; leave a family out of the name instead")
    tasks = []
    for family, weight in zip(families, weights, strict=True):
        share = weight / sum(weights)
        sizes = {
            "train_size": max(1, round(share * (config.train_size or DEFAULT_TRAIN_SIZE))),
            "test_size": max(1, round(share * (config.test_size or DEFAULT_TEST_SIZE))),
        }
        params = config.params.get(family, {})
        if not isinstance(params, dict):
            raise UserError(f"task.params: {family} takes a table, not {params!r}")
        one = {"name": f"reasoning-gym/{family}", "params": params, "weights": {}, **sizes}
        tasks.append(_load_family(config.model_copy(update=one)))
    test = {p.prompt: p for task in tasks for p in task.test}
    train = {p.prompt: p for task in tasks for p in task.train if p.prompt not in test}
    first = tasks[0]
    counts = ", ".join(
        f"{f} {len(t.train)}+{len(t.test)}" for f, t in zip(families, tasks, strict=True)
    )
    return replace(
        first,
        name=config.name,
        train=tuple(train.values()),
        test=tuple(test.values()),
        notes=(
            f"{config.name}: {len(train)} problems to train on, {len(test)} held out ({counts})",
            *(note for task in tasks for note in task.notes[1:]),
        ),
    )


def _load_family(config: TaskConfig) -> Task:
    family = config.name.partition("/")[2]
    create = _factory(family, config.params, config.pool_seed)
    pool = fill_pool(
        create, config.train_size or DEFAULT_TRAIN_SIZE, config.test_size or DEFAULT_TEST_SIZE
    )
    train, test = divide(pool, config.train_size, config.test_size, config.name)
    notes = [
        f"{config.name}: {len(train)} problems to train on, {len(test)} held out, "
        f"pool seed {config.pool_seed}, no question twice"
    ]
    if pool.is_exhausted:
        notes.append(
            f"{config.name} has about {len(pool.entries)} distinct questions with these parameters"
        )

    def problem(entry: Entry) -> Problem:
        columns = {
            "question": entry["question"],
            "metadata": entry["metadata"],
            "entry": entry,
            "family": family,
            "params": config.params,
            "answer_format": config.answer_format,
        }
        id = f"{prompt_hash(entry['question']):016x}"
        return Problem(id, entry["question"], entry["answer"], columns)

    return Task(
        config.name,
        tuple(map(problem, train)),
        tuple(map(problem, test)),
        ("reasoning_gym",),
        system_prompt=ANSWER_FORMATS[config.answer_format].instruction
        if config.answer_format
        else None,
        notes=tuple(notes),
        answer_format=config.answer_format,
    )


@dataclass(frozen=True)
class Pool:
    """Distinct entries in the order they were made."""

    entries: Sequence[Entry]
    is_exhausted: bool
    """True when no new questions came any more, before both sides were full."""


def fill_pool(create: Callable[[int], Items], num_train: int, num_test: int) -> Pool:
    """Generate until both sides have what is wanted, or until the family has run dry.

    `create(size)` gives the first `size` items. Dry is: five times as many repeats in a row as there are questions, and
    200; a family with D questions shows its last one after about D ln D items.
    """
    entries: dict[str, Entry] = {}
    missing = {True: num_test, False: num_train}
    size = start = 0
    repeats = 0
    while True:
        size = 2 * size or 2 * (num_train + num_test)
        try:
            items = create(size)
        except UserError:
            if not entries:
                raise
            # Some families refuse sizes beyond what they can make.
            return Pool(tuple(entries.values()), True)
        for index in range(start, size):
            entry = _make_entry(items, index)
            text = entry["question"].strip()
            repeats = repeats + 1 if text in entries else 0
            if text not in entries:
                entries[text] = entry
                missing[is_held_out(text, HELD_OUT_ONE_IN)] -= 1
            if max(missing.values()) <= 0:
                return Pool(tuple(entries.values()), False)
            if repeats > 5 * len(entries) + 200:
                return Pool(tuple(entries.values()), True)
        start = size


def _make_entry(items: Items, index: int) -> Entry:
    try:
        return items[index]
    except Exception as error:  # what a family raises when its parameters do not fit is not said
        raise UserError(
            f"reasoning-gym could not make item {index} with these parameters: {error}"
        ) from error


def divide(
    pool: Pool, train_size: int | None, test_size: int | None, name: str
) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Training and held-out entries, never the same question. None: the default size, or less if the pool is small."""
    if not pool.is_exhausted:
        test = [entry for entry in pool.entries if is_held_out(entry["question"], HELD_OUT_ONE_IN)]
        train = [
            entry for entry in pool.entries if not is_held_out(entry["question"], HELD_OUT_ONE_IN)
        ]
        return train[: train_size or DEFAULT_TRAIN_SIZE], test[: test_size or DEFAULT_TEST_SIZE]
    num_distinct = len(pool.entries)
    if (train_size or 0) + (test_size or 0) > num_distinct:
        asked = " and ".join(
            f"task.{option}={size}"
            for option, size in (("train_size", train_size), ("test_size", test_size))
            if size is not None
        )
        raise UserError(
            f"{name} with these parameters has {num_distinct} distinct questions, too few for {asked}; "
            "ask for fewer or widen task.params"
        )
    if test_size is None:
        most = num_distinct - (train_size or 0)
        test_size = min(DEFAULT_TEST_SIZE, num_distinct // HELD_OUT_ONE_IN, most)
    if train_size is None:
        train_size = min(DEFAULT_TRAIN_SIZE, num_distinct - test_size)
    ordered = sorted(pool.entries, key=lambda entry: prompt_hash(entry["question"]))
    return ordered[num_distinct - train_size :], ordered[:test_size]


def _factory(family: str, params: dict[str, Any], seed: int) -> Callable[[int], Items]:
    """`create(size)` for a family; raises UserError at once if the family or a parameter's name is wrong."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=3, cutoff=0.5)
        hint = (
            f"; near: {', '.join(near)}" if near else f"; there are {', '.join(sorted(DATASETS))}"
        )
        raise UserError(f"no reasoning-gym family {family!r}{hint}")
    known = [field.name for field in fields(DATASETS[family][1])]
    for name in params:
        if name in ("size", "seed"):
            raise UserError(
                f"task.params: {name} is set by task.train_size, test_size and pool_seed"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            there = ", ".join(known)
            raise UserError(
                f"task.params: reasoning-gym/{family} has no {name!r}{hint} It has {there}"
            )

    def create(size: int) -> Items:
        try:
            return create_dataset(family, size=size, seed=seed, **params)
        except (AssertionError, ValueError, TypeError) as error:  # its configs validate with assert
            raise UserError(f"task.params: reasoning-gym/{family}: {error}") from error

    return create
