"""Which reward functions a run uses: names, files or callables become specs that worker processes can load.

A user's file is checked here without running it: it exists, it parses, the function is in it, and the columns that the
function asks for are in the data. Running it is left to the workers; the trainer's process never does.
"""

import ast
import difflib
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from qerl.errors import UserError
from qerl.tasks.answers import ANSWER_FORMATS
from qerl.tasks.asks import marks_of_builtin, marks_of_callable, marks_of_source
from qerl.tasks.builtin import BUILTIN_REWARDS
from qerl.tasks.calling import VERL_PARAMETERS
from qerl.tasks.calls import (
    BuiltinFunction,
    FileFunction,
    PickledFunction,
    RewardSpec,
    total_rewards,
)
from qerl.tasks.problems import Task

__all__ = ["RewardSpec", "resolve_rewards", "total_rewards"]

GIVEN_COLUMNS = frozenset({"prompts", "completions", "completion_ids", "answer"})
TRL_GIVEN = frozenset({"trainer_state", "log_extra", "log_metric"})
"""What TRL passes beside the columns."""
NEEDS_ANSWER = frozenset({"math", *ANSWER_FORMATS})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def resolve_rewards(
    names: Sequence[str | Callable[..., Any]], weights: Sequence[float], task: Task
) -> tuple[RewardSpec, ...]:
    """The terms of the reward: built-in names, FILE.py:FUNCTION, or callables; the task's own if none are given.

    Raises UserError for an unknown name, a missing file or function, a column that the data does not have, and a
    number of weights that differs from the number of functions.
    """
    functions = [_of_session(name) for name in names] or task.reward_funcs
    if not functions:
        raise UserError(
            f"{task.name}: the data has no answers to compare with; give --reward-funcs FILE.py:FUNCTION"
        )
    if weights and len(weights) != len(functions):
        raise UserError(
            f"{len(weights)} reward_weights for {len(functions)} reward_funcs; give one each"
        )
    weights = weights or (1.0,) * len(functions)
    labels = _unique_labels(functions)
    return tuple(
        RewardSpec(label, float(weight), *_resolve(function, task))
        for label, function, weight in zip(labels, functions, weights, strict=True)
    )


SESSION_PREFIX = "python:"
SESSION_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of this Python session under the names that its configs give them: python:NAME@HASH (`qerl.api`)."""


def _of_session(name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """The function that a name of this session stands for; other names and callables as they are."""
    if not isinstance(name, str) or not name.startswith(SESSION_PREFIX):
        return name
    if name not in SESSION_FUNCTIONS:
        raise UserError(
            f"reward {name} was a function of the Python session that began this run, and is not known here; "
            "give --reward-funcs FILE.py:FUNCTION"
        )
    return SESSION_FUNCTIONS[name]


def _resolve(
    function: str | Callable[..., Any], task: Task
) -> tuple[BuiltinFunction | FileFunction | PickledFunction, tuple[str, ...]]:
    """Where the function is, and the marks it looks for."""
    if not isinstance(function, str):
        try:
            return PickledFunction(cloudpickle.dumps(function)), marks_of_callable(function)
        except (TypeError, pickle.PicklingError) as error:
            raise UserError(
                f"reward {_label(function)} cannot be sent to a worker: {error}"
            ) from error
    path, colon, name = function.rpartition(":")
    if colon and path:
        return _file_function(path, name, task)
    if function not in BUILTIN_REWARDS:
        raise UserError(_unknown_name(function))
    if function in NEEDS_ANSWER and all(problem.answer is None for problem in task.problems):
        raise UserError(
            f"reward {function} needs answers and {task.name} has none; set task.answer_column"
        )
    if function == "reasoning_gym" and not task.name.startswith("reasoning-gym/"):
        raise UserError(
            f"reward reasoning_gym works with reasoning-gym tasks only, not {task.name}"
        )
    return BuiltinFunction(function), marks_of_builtin(function)


def _unknown_name(name: str) -> str:
    if name.endswith(".py"):
        return f"reward {name}: say which function of the file, {name}:FUNCTION"
    near = difflib.get_close_matches(name, BUILTIN_REWARDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    there = ", ".join(BUILTIN_REWARDS)
    return f"no reward {name!r}{hint} There are {there}, and FILE.py:FUNCTION"


def _file_function(path: str, name: str, task: Task) -> tuple[FileFunction, tuple[str, ...]]:
    file = Path(path).expanduser().absolute()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward file {path} cannot be read: {_reason(error)}") from error
    try:
        tree = ast.parse(text, str(file))
    except (SyntaxError, ValueError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else "?"
        raise UserError(f"reward file {path}, line {line}: {_reason(error)}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, FunctionNode)}
    if name in functions:
        _check_columns(functions[name], f"{path}:{name}", task)
    elif name not in _bound_names(tree.body):
        near = difflib.get_close_matches(name, functions, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        there = ", ".join(functions) or "none"
        raise UserError(f"no function {name!r} in {path}{hint} Functions there: {there}")
    return FileFunction(str(file), text, name), marks_of_source(tree, name)


def _bound_names(body: Iterable[ast.stmt]) -> set[str]:
    """Names that a module has once it ran: assigned, imported, or defined under an if or try."""
    names = set()
    nodes = (
        node
        for statement in body
        for node in ([statement] if isinstance(statement, FunctionNode) else ast.walk(statement))
    )
    for node in nodes:
        if isinstance(node, FunctionNode | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _check_columns(node: FunctionNode, label: str, task: Task) -> None:
    """Every argument without a default must be something that is passed. Decorators may change that: not checked."""
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    all_names = {*positional, *(argument.arg for argument in arguments.kwonlyargs)}
    is_verl = all_names >= VERL_PARAMETERS
    given = (
        GIVEN_COLUMNS | {"data_source", "extra_info", *VERL_PARAMETERS}
        if is_verl
        else GIVEN_COLUMNS
    )
    columns = set(task.problems[0].columns) if task.problems else set()
    missing = [name for name in required if name not in given | TRL_GIVEN | columns]
    if missing and not node.decorator_list:
        there = ", ".join(sorted(GIVEN_COLUMNS | columns))
        raise UserError(f"reward {label} wants {missing[0]!r}; what it can have: {there}")


def _unique_labels(functions: Sequence[str | Callable[..., Any]]) -> list[str]:
    """Function names; FILE.FUNCTION where two functions of different files share one."""
    short = [_label(function) for function in functions]
    labels = [
        f"{Path(function.rpartition(':')[0]).stem}.{label}"
        if isinstance(function, str) and ":" in function and short.count(label) > 1
        else label
        for function, label in zip(functions, short, strict=True)
    ]
    repeated = [label for label in labels if labels.count(label) > 1]
    if repeated:
        raise UserError(
            f"reward {repeated[0]} is given twice; use one function once, with the sum of weights"
        )
    return labels


def _label(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function.rpartition(":")[2]
    if isinstance(function, type(lambda: None)):
        return function.__name__
    return type(function).__name__


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return error.msg if isinstance(error, SyntaxError) else str(error)
