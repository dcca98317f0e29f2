"""The reward contract: what people write for TRL and verl runs unchanged; what is logged; when failures end a run."""

import asyncio
from pathlib import Path
from textwrap import dedent

import pytest

from qerl.errors import RunError
from qerl.tasks.asks import notes_on_marks
from qerl.tasks.calls import RewardCall, RewardResult
from qerl.tasks.pool import RewardPool
from qerl.tasks.problems import Task
from qerl.tasks.rewards import resolve_rewards, total_rewards
from qerl.types import Problem

TIMEOUT_S = 5.0
COLUMNS = {"solution": r"\boxed{18}", "task": "math", "ground_truth": "18", "data_source": "toy"}


def call(texts: list[str], conversational: bool = True, **columns) -> RewardCall:
    columns = {"answer": "18", **COLUMNS, "extra_info": {"index": 3}, **columns}
    user = [{"role": "user", "content": "9 + 9?"}]
    return RewardCall(
        problem_id="train-7",
        prompts=[user if conversational else "9 + 9?"] * len(texts),
        completions=[
            [{"role": "assistant", "content": text}] if conversational else text for text in texts
        ],
        completion_ids=[[1] * len(text) for text in texts],
        columns={name: [value] * len(texts) for name, value in columns.items()},
        step=12,
    )


def task() -> Task:
    return Task("t", (Problem("p", "9 + 9?", "18", {**COLUMNS, "extra_info": {}}),), (), ())


def run(
    folder: Path, code: str, names: str, one: RewardCall, max_failure_share: float = 1.0, **limits
) -> RewardResult:
    """Score one group with the named functions of a file, the whole way."""
    path = folder / "rewards.py"
    path.write_text(dedent(code))
    specs = resolve_rewards([f"{path}:{name}" for name in names.split(",")], (), task())
    log = folder / "rewards.log"
    timeout_s = limits.get("timeout_s", TIMEOUT_S)
    memory = limits.get("memory_gib", 4.0)
    with RewardPool(specs, 2, timeout_s, log, memory, max_failure_share, num_steps=40) as pool:
        return pool.score([one])[0]


# In the manner of TRL's documentation: lengths, formats, a column by name, a mix of tasks, async, logging.
TRL_STYLE = r"""
import asyncio
import re

def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", text, re.DOTALL) else 0.0 for text in contents]

def column_reward(completions, ground_truth, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in contents]
    return [float(bool(m) and m.group(1) == gold) for m, gold in zip(found, ground_truth)]

def only_coding(prompts, completions, task, **kwargs):
    return [1.0 if one == "coding" else None for one in task]

async def waits(prompts, completions, **kwargs):
    async def one(completion):
        await asyncio.sleep(0.01)
        return 0.5
    return await asyncio.gather(*[one(completion) for completion in completions])

def logs(completions, answer, log_extra=None, log_metric=None, trainer_state=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    if log_extra:
        log_extra("gold", answer)
    if log_metric:
        log_metric("mean_characters", sum(map(len, contents)) / len(contents))
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

class Judge:
    def __init__(self, value):
        self.value = value
    def __call__(self, completions, **kwargs):
        return [self.value for _ in completions]

judge = Judge(0.25)
"""


def test_functions_for_trl_run_unchanged(tmp_path: Path) -> None:
    texts = [r"<think>9 and 9</think> \boxed{18}", "18"]
    names = "length_reward,format_reward,column_reward,only_coding,waits,logs,judge"
    result = run(tmp_path, TRL_STYLE, names, call(texts))
    assert result.failures == ()
    assert result.values == {
        "length_reward": [33.0, 2.0],
        "format_reward": [1.0, 0.0],
        "column_reward": [1.0, 0.0],
        "only_coding": [None, None],
        "waits": [0.5, 0.5],
        "logs": [0.3, 0.3],
        "judge": [0.25, 0.25],
    }
    assert result.extra == {"gold": ["18", "18"]}
    assert result.metrics == {"mean_characters": [17.5]}


def test_trls_own_rewards_run_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    code = "from trl.rewards import accuracy_reward, think_format_reward\n"
    texts = [r"<think>9 and 9</think> It is \boxed{18}.", r"\boxed{19}"]
    result = run(tmp_path, code, "accuracy_reward,think_format_reward", call(texts), timeout_s=60.0)
    assert result.failures == ()
    assert result.values == {"accuracy_reward": [1.0, 0.0], "think_format_reward": [1.0, 0.0]}


VERL_STYLE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "toy" and extra_info["index"] == 3
    found = solution_str.split("####")[-1].strip()
    return 1.0 if found == ground_truth else 0.0

def with_details(data_source, solution_str, ground_truth, extra_info, strict=True, **kwargs):
    return {"score": float(solution_str.endswith(ground_truth)), "acc": True, "pred": solution_str}

async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    return 2
"""


@pytest.mark.parametrize("conversational", [True, False])
def test_functions_for_verl_run_unchanged(tmp_path: Path, conversational: bool) -> None:
    one = call(["9 + 9\n#### 18", "#### 17"], conversational)
    result = run(tmp_path, VERL_STYLE, "compute_score,with_details,asynchronous", one)
    assert result.failures == ()
    assert result.values == {
        "compute_score": [1.0, 0.0],
        "with_details": [1.0, 0.0],
        "asynchronous": [2.0, 2.0],
    }


def test_only_what_the_signature_accepts_is_passed(tmp_path: Path) -> None:
    code = """
    def none_at_all():
        return [1.0, 2.0]
    def one(*, completions):
        return [3.0] * len(completions)
    def everything(**kwargs):
        return [float(len(kwargs))] * len(kwargs["prompts"])
    """
    result = run(tmp_path, code, "none_at_all,one,everything", call(["a", "b"], False))
    assert result.failures == ()
    given = len(COLUMNS) + len(("answer", "extra_info", "prompts", "completions", "completion_ids"))
    logging = len(("trainer_state", "log_extra", "log_metric"))
    assert list(result.values.values()) == [[1.0, 2.0], [3.0, 3.0], [given + logging] * 2]


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            'log_extra("gold", "abc")',
            "wrong_length",
            r"log_extra('gold') got 3 values for 1 samples",
        ),
        ('log_metric("m", "much")', "wrong_type", "returned 'much' (str), not a number"),
        ('log_metric("m", float("nan"))', "not_finite", "returned nan"),
        ('log_extra("gold", 3)', "exception", "TypeError: 'int' object is not iterable"),
    ],
)
def test_wrong_logging_is_a_failure_with_a_reason(
    tmp_path: Path, body: str, kind: str, message: str
) -> None:
    code = f"def f(completions, log_extra, log_metric):\n    {body}\n    return [1.0] * len(completions)\n"
    result = run(tmp_path, code, "f", call(["x", "y"], False))
    assert [(f.kind, f.message) for f in result.failures] == [(kind, message)] * 2


def test_a_failure_is_named_in_the_log_and_leaves_the_sample_out(tmp_path: Path) -> None:
    code = """
    def f(completions):
        if "bad" in completions:
            raise KeyError("no such thing")
        return [1.0] * len(completions)
    """
    result = run(tmp_path, code, "f", call(["ok", "bad", "ok"], False))
    assert result.values == {"f": [1.0, None, 1.0]}
    specs = resolve_rewards([f"{tmp_path}/rewards.py:f"], (), task())
    (totals,) = total_rewards([result], specs)
    assert totals[0] == totals[2] == 1.0 and totals[1] != totals[1]
    line = "reward f, problem train-7, sample 1, exception: KeyError: 'no such thing'"
    assert line in (tmp_path / "rewards.log").read_text()


def test_too_many_failures_end_the_run_at_once(tmp_path: Path) -> None:
    code = """
    import time
    def f(completions):
        if any("hang" in text for text in completions):
            time.sleep(60)
        return [1.0] * len(completions)
    """
    texts = ["hang", "ok", "hang", "hang", *["ok"] * 4]
    result = run(tmp_path, code, "f", call(texts, False), max_failure_share=0.5, timeout_s=0.3)
    assert len(result.failures) == 3
    message = r"62% of the samples .*max_failure_share=0.5 .*5 times reward f, problem train-7, sample \d, timeout"
    with pytest.raises(RunError, match=message):
        run(tmp_path, code, "f", call(["hang"] * 5 + ["ok"] * 3, False), 0.5, timeout_s=0.3)


def test_memory_is_limited_and_numpy_and_sympy_work_under_the_limit(tmp_path: Path) -> None:
    code = """
    import numpy, sympy
    def f(completions):
        x = sympy.symbols("x")
        matrix = numpy.ones((300, 300)) @ numpy.ones((300, 300))
        if "big" in completions:
            matrix = numpy.ones((1 << 30,), dtype=numpy.uint8).astype(numpy.float64)
        return [float(sympy.integrate(x, (x, 0, 2)) + matrix[0, 0] if matrix.ndim == 2 else 0)] * len(completions)
    """
    one = call(["small", "big"], False)
    result = run(tmp_path, code, "f", one, memory_gib=1.0, timeout_s=60.0)
    assert result.values == {"f": [302.0, None]}
    assert [failure.kind for failure in result.failures] == ["exception"]
    assert "MemoryError" in result.failures[0].message


def test_marks_that_a_reward_looks_for_and_no_prompt_mentions_are_said(tmp_path: Path) -> None:
    code = r'''
    import re
    PATTERN = re.compile(r"<think>(?P<work>.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
    OTHER = "<unused>"

    def tagged(completions, **kwargs):
        """Wants <tags>; this text is for people."""
        return [float(bool(PATTERN.search(text))) for text in completions]

    def hashed(completions, **kwargs):
        return [float("####" in text) for text in completions]

    def plain(completions, **kwargs):
        return [float(len(text)) for text in completions]
    '''
    path = tmp_path / "rewards.py"
    path.write_text(dedent(code))
    names = [f"{path}:{name}" for name in ("tagged", "hashed", "plain")]
    specs = resolve_rewards([*names, "boxed_format"], (), task())
    marks = [spec.marks for spec in specs]
    assert marks == [("<think>", "<answer>"), ("####",), (), ("\\boxed",)]
    notes = notes_on_marks(specs, ["Use <answer> tags and \\boxed{}.", "9 + 9?"])
    assert len(notes) == 2
    assert "reward tagged looks for <think>, which no prompt" in notes[0]
    assert "reward hashed looks for ####" in notes[1]


def test_marks_of_a_function_in_a_notebook_are_seen() -> None:
    def tagged(completions, **kwargs):
        return [float("<answer>" in text) for text in completions]

    (spec,) = resolve_rewards([tagged], (), task())
    assert spec.marks == ("<answer>",)
    (spec,) = resolve_rewards([eval("lambda completions: [1.0]")], (), task())
    assert spec.marks == ()


def test_async_functions_of_a_notebook_run() -> None:
    async def later(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    with RewardPool(resolve_rewards([later], (), task()), 1, TIMEOUT_S) as pool:
        assert pool.score([call(["a"])])[0].values == {"later": [1.0]}
