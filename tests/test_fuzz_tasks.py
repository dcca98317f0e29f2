"""Fuzzing of data rows and reward outputs: a UserError in one line or a right result, never a traceback, never a hang.

Bounded: a fixed number of examples, the same ones each time (`derandomize`). `QERL_FUZZ=1000` runs more, at random.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl.config import PromptConfig, TaskConfig
from qerl.errors import UserError
from qerl.model.source import resolve_model
from qerl.tasks import Task, load_task
from qerl.tasks.answers import ANSWER_FORMATS, gold_answer, is_right
from qerl.tasks.calls import RewardCall
from qerl.tasks.pool import RewardPool
from qerl.tasks.prompts import encode_problems
from qerl.tasks.rewards import resolve_rewards, total_rewards
from qerl.tasks.shots import take_shots
from qerl.types import Problem

EXAMPLES = int(os.environ.get("QERL_FUZZ", "0"))


def fuzz(examples: int):
    """A bounded number of examples; not in a fixed order when QERL_FUZZ asks for more."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "18", "#### 18", "\\boxed{", "{prompt}", "\x00", "\u2212", "<answer>"]
    ),
    st.text(max_size=12),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXTS,
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS}
        ),
        st.dictionaries(st.sampled_from(["role", "content", "name"]), SCALARS, max_size=3),
    ),
    max_size=3,
)
VALUES = st.one_of(
    SCALARS, MESSAGES, st.dictionaries(st.sampled_from(["a", "b"]), SCALARS, max_size=2)
)
NAMES = st.sampled_from(
    ["prompt", "question", "problem", "answer", "solution", "level", "x", "reward_model"]
)
ROWS = st.one_of(
    st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=6),
    st.lists(  # mostly right rows, so that the rest of the way is walked too
        st.fixed_dictionaries({"question": TEXTS, "answer": SCALARS, "level": SCALARS}),
        min_size=1,
        max_size=12,
    ),
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["gsm8k", "math", "big-math", "math-500", "aime24", "dataset"]),
        "answer_format": st.sampled_from([None, *ANSWER_FORMATS]),
        "levels": st.lists(st.integers(0, 5), max_size=2).map(tuple),
        "filter": st.dictionaries(
            NAMES,
            st.one_of(SCALARS, st.lists(SCALARS, max_size=2), st.just({"min": 1})),
            max_size=1,
        ),
        "prompt_column": st.sampled_from([None, "x", "prompt", "reward_model.a"]),
        "answer_column": st.sampled_from([None, "answer", "nope"]),
        "train_size": st.sampled_from([None, 1, 3]),
        "test_split": st.sampled_from([None, "train", "dev"]),
    },
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("tiny").folder)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def load_or_explain(path: Path, chosen: dict[str, Any]) -> Task | None:
    """The task, or None after an error that is one line for people."""
    try:
        return load_task(TaskConfig(path=str(path), **chosen))
    except UserError as error:
        assert str(error).strip() and "Traceback" not in str(error)
        return None


@given(
    rows=ROWS, chosen=SETTINGS, suffix=st.sampled_from([".jsonl", ".json"]), shots=st.integers(0, 2)
)
@fuzz(60)
def test_rows_of_data(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    rows: list,
    chosen: dict,
    suffix: str,
    shots: int,
) -> None:
    path = folder / f"data{suffix}"
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    task = load_or_explain(path, chosen)
    if task is None:
        return
    assert not {str(p.prompt) for p in task.train} & {str(p.prompt) for p in task.test}
    for problem in (*task.train, *task.test):
        assert problem.prompt and (problem.answer is None or isinstance(problem.answer, str))
    try:
        task, examples = take_shots(task, shots)
        encoded = encode_problems(
            task.problems, tokenizer, PromptConfig(), task.system_prompt, 300, examples
        )
    except UserError as error:
        assert str(error)
    else:
        assert len(encoded.problems) + encoded.num_dropped == len(task.problems)
        assert all(1 <= len(ids) <= 300 for ids in encoded.prompt_ids)


@given(data=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]))
@fuzz(40)
def test_files_of_any_bytes(folder: Path, data: bytes, suffix: str) -> None:
    path = folder / f"bytes{suffix}"
    path.write_bytes(data)
    load_or_explain(path, {})


@given(completion=TEXTS, answer=TEXTS, form=st.sampled_from(sorted(ANSWER_FORMATS)))
@fuzz(150)
def test_any_text_is_graded(completion: str, answer: str, form: str) -> None:
    gold = gold_answer(answer, form)
    try:
        assert is_right(form, completion, gold) in (True, False)
    except ValueError as error:
        assert form == "last_number" and "not a number" in str(error)
    found = ANSWER_FORMATS[form].find(completion)
    assert found is None or (found == found.strip() and found)


# What a reward may return: each text is a Python expression, evaluated in the worker.
GOOD = (
    "1.0",
    "0",
    "None",
    "True",
    "__import__('numpy').float32(0.5)",
    "__import__('decimal').Decimal('1.5')",
)
BAD = (
    *("float('nan')", "float('inf')", "'1'", "b'1'", "[1]", "{}", "object()", "1j", "10**400"),
    *(
        "(_ for _ in ()).throw(ValueError('no'))",
        "1 / 0",
        "exit()",
        "[][0]",
        "__import__('os')._exit(3)",
    ),
    *(
        "type('T', (), {'__float__': lambda s: 'x'})()",
        "type('T', (), {'__float__': lambda s: 1 / 0})()",
    ),
    *("(lambda f: f(f))(lambda f: f(f))", "'x' * 10**7", "__import__('sys').exit(None)"),
)
SHAPES = (
    "{}",
    "tuple({})",
    "iter({})",
    "{}[:-1]",
    "{} * 2",
    "{}[0]",
    "dict(enumerate({}))",
    "None",
    "str({})",
)


@pytest.fixture(scope="module")
def evaluating_pool(folder: Path) -> Iterator[RewardPool]:
    path = folder / "evaluates.py"
    path.write_text(
        "def f(completions, shape):\n    return eval(shape[0].format('[' + ','.join(completions) + ']'))\n"
    )
    task = Task("t", (Problem("p", "q", None, {"shape": ""}),), (), ())
    with RewardPool(resolve_rewards([f"{path}:f"], (), task), 2, 5.0, folder / "log") as pool:
        yield pool


@given(
    expressions=st.lists(st.sampled_from(GOOD * 3 + BAD), min_size=1, max_size=4),
    shape=st.sampled_from(("{}",) * 6 + SHAPES),
)
@fuzz(40)
def test_what_rewards_return(
    evaluating_pool: RewardPool, expressions: list[str], shape: str
) -> None:
    n = len(expressions)
    call = RewardCall("p", ["q"] * n, expressions, [[1]] * n, {"shape": [shape] * n})
    (result,) = evaluating_pool.score([call])
    values = result.values["f"]
    failed = {failure.sample_index for failure in result.failures}
    assert len(values) == n
    for index, (value, expression) in enumerate(zip(values, expressions, strict=True)):
        assert value is None or (isinstance(value, float) and math.isfinite(value))
        assert not (index in failed and value is not None)
        if shape == "{}":
            assert (index in failed) == (expression in BAD), expression
    ((*totals,),) = total_rewards([result], evaluating_pool._specs)
    assert [math.isnan(total) for total in totals] == [value is None for value in values]
