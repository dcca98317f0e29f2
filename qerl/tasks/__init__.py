"""Tasks: problems and what a completion is worth. The registry is the dictionary below; docs/tasks.md is the manual.

To add a task, write a function from `TaskConfig` to `Task` and enter it. Nothing here imports torch, datasets or
reasoning-gym until a task is loaded: every reward worker imports this package when it starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.tasks.catalog import DATASETS
from qerl.tasks.data import load_dataset_task
from qerl.tasks.problems import Task
from qerl.tasks.reasoning import load_reasoning_gym

if TYPE_CHECKING:
    from qerl.config import TaskConfig

__all__ = ["TASKS", "Task", "load_task"]

TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    **dict.fromkeys(DATASETS, load_dataset_task),
    "reasoning-gym": load_reasoning_gym,
    "dataset": load_dataset_task,
}
"""What stands before the first slash of a task's name, and how it is loaded."""

TAKES_FAMILY = frozenset({"reasoning-gym"})
"""Tasks whose name goes on after a slash."""


def load_task(config: TaskConfig) -> Task:
    """The task that a config names; `dataset` if it only has a path. Raises UserError for all that is wrong with it."""
    if not config.name and config.path is None:
        raise UserError(
            "no task: give task gsm8k (or another of docs/tasks.md), reasoning-gym/FAMILY, or task.path FILE"
        )
    name = config.name or "dataset"
    kind, _, family = name.partition("/")
    if kind not in TASKS or bool(family) != (kind in TAKES_FAMILY):
        raise UserError(_unknown(name))
    for option in ("params", "weights"):
        if getattr(config, option) and kind != "reasoning-gym":
            raise UserError(
                f"task.{option} means nothing to {name}; it is for reasoning-gym/FAMILY"
            )
    return TASKS[kind](config)


def _unknown(name: str) -> str:
    from reasoning_gym.factory import DATASETS  # slow, and needed only for this message

    if name in TAKES_FAMILY:
        return f"task {name} needs a family, such as {name}/chain_sum"
    names = [*(kind for kind in TASKS if kind not in TAKES_FAMILY)]
    names += [f"reasoning-gym/{family}" for family in DATASETS]
    if f"reasoning-gym/{name}" in names:
        return f"no task {name!r}; did you mean reasoning-gym/{name}?"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"there are {', '.join(kind for kind in TASKS if kind not in TAKES_FAMILY)}, reasoning-gym/FAMILY."
    )
    return f"no task {name!r}; {hint} A file or a data set of the hub goes into task.path"
