"""Inside a worker: loading a reward function and calling it the way its author expects.

Two forms are understood, told apart by parameter names:

* TRL's `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, called once for a group;
* verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, called once for each sample, returning a
  number or a dictionary with `score`.

Only what the signature accepts is passed; TRL's `trainer_state`, `log_extra` and `log_metric` are among it. Async
functions are run to their end. What comes back is checked here, so nothing but numbers, None and texts leaves the worker.
"""

import asyncio
import importlib
import inspect
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from qerl.tasks.builtin import BUILTIN_LIBRARIES, BUILTIN_REWARDS, completion_text
from qerl.tasks.calls import (
    BuiltinFunction,
    FailureKind,
    FileFunction,
    PickledFunction,
    RewardCall,
)

Parameters = Mapping[str, inspect.Parameter]

VERL_PARAMETERS = frozenset({"solution_str", "ground_truth"})
EXTRA_CHARACTERS = 1000
"""A value given to `log_extra` is kept as text of at most this length."""


class RewardError(Exception):
    """A call that gave no usable values; `kind` is one of `calls.FailureKind`."""

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass
class Outcome:
    """What a call gave: values [G], and what it asked to be logged. `log_extra` and `log_metric` are handed to it."""

    values: list[float | None] = field(default_factory=list)
    extra: dict[str, list[str | None]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Any) -> None:
        """TRL's: a column beside the completions, one value a sample."""
        self.extra[str(column)] = [
            None if value is None else str(value)[:EXTRA_CHARACTERS] for value in values
        ]

    def log_metric(self, name: str, value: Any) -> None:
        """TRL's: a number of this call."""
        number = _check_value(value)
        if number is not None:
            self.metrics.setdefault(str(name), []).append(number)


def load_function(source: BuiltinFunction | FileFunction | PickledFunction) -> Callable[..., Any]:
    """The callable that a spec names. Whatever the user's file raises while it is loaded propagates."""
    match source:
        case BuiltinFunction(name):
            if name in BUILTIN_LIBRARIES:
                importlib.import_module(BUILTIN_LIBRARIES[name])
            return BUILTIN_REWARDS[name]
        case PickledFunction(payload):
            return pickle.loads(payload)
        case FileFunction(path, text, function):
            return vars(_load_module(path, text))[function]


def _load_module(path: str, text: str) -> ModuleType:
    """Run a user's file as a module, once; its folder is searched for the modules it imports."""
    name = f"qerl_reward_file:{path}"
    if name not in sys.modules:
        folder = os.path.dirname(path)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module = ModuleType(name)
        module.__file__ = path
        sys.modules[name] = module
        exec(compile(text, path, "exec"), vars(module))
    return sys.modules[name]


def call_reward(
    function: Callable[..., Any], call: RewardCall, num_steps: int | None = None
) -> Outcome:
    """Values of a group, [G]. Raises RewardError for everything that went wrong, exceptions included."""
    outcome = Outcome()
    try:
        parameters = inspect.signature(function).parameters
        if parameters.keys() >= VERL_PARAMETERS:
            returned = [
                _score_of(_finish(function(**_verl_arguments(parameters, call, index))))
                for index in range(len(call.completions))
            ]
        else:
            given = {
                "trainer_state": SimpleNamespace(global_step=call.step, max_steps=num_steps),
                "log_extra": outcome.log_extra,
                "log_metric": outcome.log_metric,
            }
            returned = _finish(function(**_trl_arguments(parameters, call, given)))
        outcome.values = check_values(returned, len(call.completions))
        for column, values in outcome.extra.items():
            if len(values) != len(call.completions):
                raise RewardError(
                    "wrong_length",
                    f"log_extra({column!r}) got {len(values)} values for {len(call.completions)} samples",
                )
        return outcome
    except RewardError:
        raise
    except MemoryError as error:
        raise RewardError("exception", "MemoryError: more than a reward worker may use") from error
    except BaseException as error:  # SystemExit too: it should lose a sample, not the worker
        raise RewardError("exception", f"{type(error).__name__}: {error}") from error


def _finish(returned: Any) -> Any:
    """The result of a call, awaited if the function was async."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def _trl_arguments(
    parameters: Parameters, call: RewardCall, given: dict[str, Any]
) -> dict[str, Any]:
    offered = {
        **call.columns,
        "prompts": call.prompts,
        "completions": call.completions,
        "completion_ids": call.completion_ids,
        **given,
    }
    return _accepted(parameters, offered)


def _verl_arguments(parameters: Parameters, call: RewardCall, index: int) -> dict[str, Any]:
    columns = {name: values[index] for name, values in call.columns.items()}
    offered = {
        "data_source": "",
        "extra_info": None,
        "ground_truth": columns.get("answer"),
        **columns,
        "solution_str": completion_text(call.completions[index]),
    }
    named = {
        name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return _accepted(named, offered)


def _accepted(parameters: Parameters, offered: dict[str, Any]) -> dict[str, Any]:
    """The offered arguments that the signature takes; all of them if it ends in **kwargs."""
    kinds = inspect.Parameter
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        accepted = offered
    else:
        accepted = {name: value for name, value in offered.items() if name in parameters}
    for name, parameter in parameters.items():
        required = parameter.default is kinds.empty and parameter.kind in (
            kinds.POSITIONAL_OR_KEYWORD,
            kinds.KEYWORD_ONLY,
        )
        if required and name not in accepted:
            there = ", ".join(sorted(offered))
            raise RewardError("missing_column", f"wants {name!r}; there are {there}")
    return accepted


def _score_of(returned: Any) -> Any:
    """verl's functions return a number or {"score": number, ...}."""
    return returned["score"] if isinstance(returned, dict) else returned


def check_values(returned: Any, num_samples: int) -> list[float | None]:
    """A function's return value as [G] finite floats and None; RewardError names what is wrong with it."""
    if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__iter__"):
        raise RewardError(
            "wrong_type", f"returned {type(returned).__name__}, not a list with one number a sample"
        )
    values = list(returned)
    if len(values) != num_samples:
        raise RewardError(
            "wrong_length", f"returned {len(values)} values for {num_samples} samples"
        )
    return [_check_value(value) for value in values]


def _check_value(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise RewardError(
            "wrong_type", f"returned {value!r:.60} ({type(value).__name__}), not a number"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError("not_finite", f"returned {number}")
    return number
