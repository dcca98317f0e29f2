"""What travels between the trainer and its reward workers, and how terms become one reward.

On the pipes a message is a length (8 bytes, big endian) and a body. To a worker, bodies are pickles that the trainer
made of its own data; from a worker they are JSON, so nothing that a reward touched is unpickled in the trainer.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

FailureKind = Literal[
    "timeout", "died", "exception", "wrong_length", "wrong_type", "not_finite", "missing_column"
]


@dataclass(frozen=True)
class BuiltinFunction:
    """A key of `builtin.BUILTIN_REWARDS`."""

    name: str


@dataclass(frozen=True)
class FileFunction:
    """A function of a user's file. The text is read once, so an edit during a run changes nothing in it."""

    path: str
    text: str
    function: str


@dataclass(frozen=True)
class PickledFunction:
    """A callable sent by value (cloudpickle): one defined in a notebook cell has no file to import."""

    payload: bytes


@dataclass(frozen=True)
class RewardSpec:
    """One term of the reward."""

    name: str
    """Unique among the run's terms; the metric is rewards/NAME/mean."""
    weight: float
    source: BuiltinFunction | FileFunction | PickledFunction
    marks: tuple[str, ...] = ()
    """What it looks for in a completion, as far as can be seen (`asks.py`): a prompt should ask for it."""


@dataclass(frozen=True)
class RewardCall:
    """One prompt group: G samples of one problem. Every list has length G."""

    problem_id: str
    prompts: list[Any]
    completions: list[Any]
    """Strings, or [{"role": "assistant", "content": ...}] where the data's prompts are messages."""
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    """Every other data column, the gold answer as `answer` among them."""
    step: int = 0
    """Training steps taken when the completions were sampled."""

    def sample(self, index: int) -> "RewardCall":
        """The group of one that holds only sample `index`."""
        one = slice(index, index + 1)
        columns = {name: values[one] for name, values in self.columns.items()}
        return RewardCall(
            self.problem_id,
            self.prompts[one],
            self.completions[one],
            self.completion_ids[one],
            columns,
            self.step,
        )


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample has no value from a function, although it was tried alone."""

    function: str
    problem_id: str
    sample_index: int
    kind: FailureKind
    message: str


@dataclass(frozen=True)
class RewardResult:
    """The values of one prompt group: [G] for each function, in the order of the specs."""

    values: dict[str, list[float | None]]
    """None: the function left this sample out, or it failed and is listed below."""
    failures: tuple[RewardFailure, ...]
    extra: dict[str, list[str | None]] = field(default_factory=dict)
    """Columns that functions asked to see beside the completions (`log_extra`), [G] each."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Numbers that functions asked to log (`log_metric`), one a call; the step's metric is their mean."""


@dataclass(frozen=True)
class Setup:
    """The first message to a worker."""

    specs: tuple[RewardSpec, ...]
    sys_path: tuple[str, ...]
    """The trainer's module search path, for callables that are pickled by reference to a module."""
    num_steps: int | None = None
    """Steps of the run, for functions that ask for TRL's `trainer_state`."""


@dataclass(frozen=True)
class Request:
    """Every later message: call function number `function` on a group."""

    function: int
    call: RewardCall


LENGTH = struct.Struct(">Q")


def encode_message(body: bytes) -> bytes:
    """A body with its length in front."""
    return LENGTH.pack(len(body)) + body


def decode_reply(body: bytes) -> dict[str, Any]:
    """A worker's JSON. Raises EOFError for anything but a reply of ours: a reward may have reached the pipe."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EOFError from error
    kinds = [kind for kind in REPLIES if isinstance(reply, dict) and reply.keys() == kind.keys()]
    if not kinds or not all(check(reply[key]) for key, check in kinds[0].items()):
        raise EOFError
    return reply


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _are_values(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or _is_number(one) for one in value)


def _are_columns(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(texts, list) and all(text is None or _is_text(text) for text in texts)
        for texts in value.values()
    )


def _are_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(numbers, list) and all(map(_is_number, numbers)) for numbers in value.values()
    )


REPLIES = (
    {"ready": bool},
    {"load_error": _is_text, "name": _is_text},
    {"kind": lambda kind: kind in get_args(FailureKind), "message": _is_text},
    {"values": _are_values, "extra": _are_columns, "metrics": _are_metrics},
)
"""What a worker answers: keys, and what each must be."""


def total_rewards(
    results: Sequence[RewardResult], specs: Sequence[RewardSpec]
) -> list[list[float]]:
    """Weighted sum of the terms, [P][G].

    A term that is None is left out. NaN where all terms are None, and where any of them failed: a sum without a term
    that should be there would be compared with complete ones.
    """
    totals = []
    for result in results:
        failed = {failure.sample_index for failure in result.failures}
        rows = zip(*(result.values[spec.name] for spec in specs), strict=True)
        totals.append(
            [
                math.nan if index in failed else _weighted_sum(row, specs)
                for index, row in enumerate(rows)
            ]
        )
    return totals


def _weighted_sum(values: Sequence[float | None], specs: Sequence[RewardSpec]) -> float:
    terms = [
        spec.weight * value for value, spec in zip(values, specs, strict=True) if value is not None
    ]
    return sum(terms) if terms else math.nan
