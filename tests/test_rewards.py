"""Reward functions in worker processes: what users write runs unchanged, and nothing they do stops a step."""

import importlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from qerl.errors import UserError
from qerl.tasks.calls import RewardCall, RewardFailure, RewardResult, RewardSpec
from qerl.tasks.pool import RewardPool
from qerl.tasks.problems import Task
from qerl.tasks.rewards import resolve_rewards, total_rewards
from qerl.types import Problem

TIMEOUT_S = 0.8


def make_task(answer: str | None = "18", **columns) -> Task:
    problem = Problem("p0", "What is 9 + 9?", answer, columns)
    return Task("dataset test", (problem,), (), ("last_number",) if answer else ())


def make_call(texts: list[str], conversational: bool = False, **columns) -> RewardCall:
    prompt = [{"role": "user", "content": "9 + 9?"}] if conversational else "9 + 9?"
    completions = [[{"role": "assistant", "content": t}] if conversational else t for t in texts]
    columns = {"answer": "18", **columns}
    return RewardCall(
        problem_id="p0",
        prompts=[prompt] * len(texts),
        completions=completions,
        completion_ids=[list(range(len(text))) for text in texts],
        columns={name: [value] * len(texts) for name, value in columns.items()},
    )


def write_rewards(folder: Path, code: str) -> str:
    path = folder / "my_rewards.py"
    path.write_text(dedent(code))
    return str(path)


def score_file(
    folder: Path, code: str, call: RewardCall, names: tuple[str, ...] = ("f",), **columns
) -> RewardResult:
    """Score one group with functions of a file, the whole way from the file's name to the values."""
    path = write_rewards(folder, code)
    specs = resolve_rewards([f"{path}:{name}" for name in names], (), make_task(**columns))
    with RewardPool(specs, 2, TIMEOUT_S, folder / "rewards.log") as pool:
        return pool.score([call])[0]


# What users write


def test_functions_in_trl_style_run_unchanged(tmp_path: Path) -> None:
    code = r"""
    import asyncio
    import re

    def reward_len(completions, **kwargs):
        return [-abs(4 - len(completion)) for completion in completions]

    def reward_ids(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def correct(completions, ground_truth, **kwargs):
        matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        found = [match.group(1) if match else "" for match in matches]
        return [1.0 if c == gt else 0.0 for c, gt in zip(found, ground_truth)]

    async def slow_check(prompts, completions, **kwargs):
        await asyncio.sleep(0.01)
        return [len(p) + len(c) for p, c in zip(prompts, completions)]

    def only_math(completions, kind, **kwargs):
        return [1.0 if k == "math" else None for k in kind]

    def exact_arguments(prompts, answer):
        return [answer[0] == "18"] * len(prompts)
    """
    names = ("reward_len", "reward_ids", "correct", "slow_check", "only_math", "exact_arguments")
    call = make_call(["abcd", r"\boxed{18}"], ground_truth="18", kind="code")
    result = score_file(tmp_path, code, call, names, ground_truth="18", kind="code")
    assert result.failures == ()
    assert result.values == {
        "reward_len": [0.0, -6.0],
        "reward_ids": [4.0, 10.0],
        "correct": [0.0, 1.0],
        "slow_check": [10.0, 16.0],
        "only_math": [None, None],
        "exact_arguments": [1.0, 1.0],
    }


def test_conversational_data_give_message_lists(tmp_path: Path) -> None:
    code = """
    import re

    def format_reward(completions, prompts, **kwargs):
        pattern = r"^<think>.*?</think><answer>.*?</answer>$"
        contents = [completion[0]["content"] for completion in completions]
        assert prompts[0][-1]["role"] == "user" and completions[0][0]["role"] == "assistant"
        return [1.0 if re.match(pattern, content) else 0.0 for content in contents]
    """
    texts = ["<think>a</think><answer>18</answer>", "18"]
    result = score_file(tmp_path, code, make_call(texts, True), ("format_reward",))
    assert result.values == {"format_reward": [1.0, 0.0]} and result.failures == ()


@pytest.mark.parametrize("conversational", [False, True])
def test_verl_compute_score(tmp_path: Path, conversational: bool) -> None:
    code = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source == "here" and extra_info == {"index": 3}
        return {"score": float(solution_str == ground_truth), "acc": 1}
    """
    columns = {"data_source": "here", "extra_info": {"index": 3}}
    call = make_call(["18", "17"], conversational, **columns)
    result = score_file(tmp_path, code, call, ("compute_score",), **columns)
    assert result.values == {"compute_score": [1.0, 0.0]} and result.failures == ()


def test_callables_are_sent_by_value() -> None:
    bonus = 2.0

    def with_closure(completions, **kwargs):
        return [bonus * len(completion) for completion in completions]

    specs = resolve_rewards(
        [with_closure, lambda completions: [1] * len(completions)], (), make_task()
    )
    with RewardPool(specs, 1, TIMEOUT_S, None) as pool:
        values = pool.score([make_call(["a", "bb"])])[0].values
    assert values == {"with_closure": [2.0, 4.0], "<lambda>": [1.0, 1.0]}


def test_callables_of_a_module_are_found_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebook_helpers.py").write_text("def f(completions):\n    return [4.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("notebook_helpers").f
    with RewardPool(resolve_rewards([function], (), make_task()), 1, TIMEOUT_S) as pool:
        assert pool.score([make_call(["a"])])[0].values == {"f": [4.0]}


def test_a_file_imports_its_neighbours_and_stays_as_it_was_read(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 3.0\n")
    code = (
        "import neighbour\n\ndef f(completions):\n    return [neighbour.VALUE] * len(completions)\n"
    )
    path = write_rewards(tmp_path, code)
    specs = resolve_rewards([f"{path}:f"], (), make_task())
    Path(path).write_text("an edit during the run, not even Python")
    with RewardPool(specs, 1, TIMEOUT_S, None) as pool:
        assert pool.score([make_call(["a"])])[0].values == {"f": [3.0]}


def test_numpy_values_and_arrays_are_numbers(tmp_path: Path) -> None:
    code = """
    import numpy as np

    def f(completions):
        return np.array([len(c) for c in completions], dtype=np.float32)

    def g(completions):
        return [np.int64(1) for _ in completions]
    """
    result = score_file(tmp_path, code, make_call(["ab", "abc"]), ("f", "g"))
    assert result.values == {"f": [2.0, 3.0], "g": [1.0, 1.0]}


def test_builtin_rewards_run_in_workers() -> None:
    specs = resolve_rewards(
        ["math", "last_number", "exact", "boxed_format"], (1, 1, 1, 0.5), make_task()
    )
    texts = [r"so \boxed{\frac{36}{2}}", "18", "it is $18.00", "no idea"]
    with RewardPool(specs, 1, 5.0, None) as pool:
        result = pool.score([make_call(texts)])[0]
    assert result.failures == ()
    assert result.values == {
        "math": [1, 1, 1, 0],
        "last_number": [0, 1, 1, 0],
        "exact": [0, 1, 0, 0],
        "boxed_format": [1, 0, 0, 0],
    }
    assert total_rewards([result], specs) == [[1.5, 3.0, 2.0, 0.0]]


# What users' code does wrong. In each file the sample "bad" does it, and only that sample is lost.

NASTY = {
    "hangs": ("while True:\n    pass", "timeout", "0.8 s"),
    "sleeps through every signal": (
        "import signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):\n"
        "    signal.signal(number, lambda *_: None)\n"
        "while True:\n    time.sleep(60)",
        "timeout",
        "0.8 s",
    ),
    "stops its process": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "timeout",
        "0.8 s",
    ),
    "leaves": ("import os\nos._exit(3)", "died", "exit code 3"),
    "exits": ("import sys\nsys.exit(1)", "exception", "SystemExit"),
    "segfaults": ("import ctypes\nctypes.string_at(0)", "died", "SIGSEGV"),
    "raises": ("raise KeyError('nope')", "exception", "KeyError: 'nope'"),
    "recurses": ("def r():\n    return r()\nr()", "exception", "RecursionError"),
    "takes 16 GiB": ("block = bytearray(16 << 30)", "exception", "MemoryError"),
    "miscounts": (
        "return [1.0] * (len(completions) + 1)",
        "wrong_length",
        "2 values for 1 samples",
    ),
    "gives one number": ("return 1.0", "wrong_type", "float, not a list"),
    "gives nothing": ("return None", "wrong_type", "NoneType"),
    "gives text": ("return ['1.0'] * len(completions)", "wrong_type", "not a number"),
    "gives a string": ("return 'x' * len(completions)", "wrong_type", "str, not a list"),
    "gives NaN": ("return [float('nan')] * len(completions)", "not_finite", "nan"),
    "gives infinity": ("return [float('inf')] * len(completions)", "not_finite", "inf"),
    "gives nested lists": ("return [[1.0, 2.0]] * len(completions)", "wrong_type", "not a number"),
}


@pytest.mark.parametrize("what", NASTY)
def test_only_the_guilty_sample_is_lost(tmp_path: Path, what: str) -> None:
    body, kind, message = NASTY[what]
    code = "def f(completions):\n    if 'bad' in completions:\n"
    code += "".join(f"        {line}\n" for line in body.splitlines())
    code += "    return [float(len(c)) for c in completions]\n"
    result = score_file(tmp_path, code, make_call(["a", "bad", "ccc"]))
    assert result.values == {"f": [1.0, None, 3.0]}
    (failure,) = result.failures
    assert (failure.function, failure.problem_id, failure.sample_index) == ("f", "p0", 1)
    assert failure.kind == kind and message in failure.message


def test_a_process_left_behind_does_not_hide_a_death_and_is_killed(tmp_path: Path) -> None:
    code = f"""
    import os, time

    def f(completions):
        if "bad" in completions:
            child = os.fork()
            if child == 0:
                time.sleep(60)
            with open({str(tmp_path / "child")!r}, "w") as file:
                file.write(str(child))
            os._exit(1)
        return [1.0] * len(completions)
    """
    start = time.monotonic()
    result = score_file(tmp_path, code, make_call(["a", "bad"]))
    assert result.values == {"f": [1.0, None]} and result.failures[0].kind == "died"
    assert time.monotonic() - start < 10
    assert wait_until_gone(int((tmp_path / "child").read_text()))


def test_other_functions_and_groups_are_not_touched_by_a_hang(tmp_path: Path) -> None:
    code = """
    import time

    def hangs(completions):
        while completions[0].startswith("bad"):
            time.sleep(1)
        return [float(c) for c in completions]

    def works(completions):
        return [len(c) for c in completions]
    """
    path = write_rewards(tmp_path, code)
    specs = resolve_rewards([f"{path}:hangs", f"{path}:works"], (), make_task())
    calls = [make_call(["bad", "2"]), make_call(["3", "4"]), make_call(["5"])]
    with RewardPool(specs, 2, TIMEOUT_S, None) as pool:
        results = pool.score(calls)
        again = pool.score(calls[1:])
    assert [result.values["hangs"] for result in results] == [[None, 2.0], [3.0, 4.0], [5.0]]
    assert [result.values["works"] for result in results] == [[3.0, 1.0], [1.0, 1.0], [1.0]]
    assert [len(result.failures) for result in results] == [1, 0, 0]
    assert again == results[1:]


def test_results_do_not_depend_on_timing(tmp_path: Path) -> None:
    code = """
    import time

    def f(completions):
        time.sleep(0.02 if int(completions[0]) % 3 == 0 else 0)
        return [float(c) for c in completions]
    """
    path = write_rewards(tmp_path, code)
    specs = resolve_rewards([f"{path}:f"], (), make_task())
    with RewardPool(specs, 3, TIMEOUT_S, None) as pool:
        results = pool.score([make_call([str(i), str(i + 100)]) for i in range(20)])
    assert [result.values["f"] for result in results] == [[i, i + 100] for i in range(20)]


def test_what_rewards_print_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    code = """
    import os, sys
    print("while loading")

    def f(completions):
        print("from print")
        print("from stderr", file=sys.stderr)
        os.system("echo from a child")
        input_is_empty = sys.stdin.read() == ""
        if completions == ["bad"]:
            raise ValueError("shown with its traceback")
        return [float(input_is_empty)] * len(completions)
    """
    assert score_file(tmp_path, code, make_call(["a"])).values == {"f": [1.0]}
    assert score_file(tmp_path, code, make_call(["bad"])).values == {"f": [None]}
    log = (tmp_path / "rewards.log").read_text()
    for text in (
        "while loading",
        "from print",
        "from stderr",
        "from a child",
        "shown with its traceback",
    ):
        assert text in log
    assert capfd.readouterr() == ("", "")


def test_large_groups_pass_through_the_pipes(tmp_path: Path) -> None:
    code = "def f(completions):\n    return [float(len(c)) for c in completions]\n"
    texts = ["x" * 300_000, "y" * 400_000]
    assert score_file(tmp_path, code, make_call(texts)).values == {"f": [300_000.0, 400_000.0]}


def test_math_answers_that_are_hard_to_evaluate_harm_no_other() -> None:
    specs = resolve_rewards(["math"], (), make_task())
    hard = r"\boxed{\sum_{n=1}^{999999999} \sin(n)^{n}}"
    with RewardPool(specs, 2, 1.5, None) as pool:
        result = pool.score([make_call(["18", hard, r"\boxed{18}"])])[0]
    right, unknown, also_right = result.values["math"]
    assert right == also_right == 1.0 and unknown in (0.0, None)
    assert all(failure.sample_index == 1 for failure in result.failures)


# The life of the processes


def wait_until_gone(pid: int, timeout_s: float = 5.0) -> bool:
    """True when the process has ended (or is a zombie that nobody has collected)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def children() -> set[int]:
    return set(map(int, Path("/proc/self/task", str(os.getpid()), "children").read_text().split()))


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    code = "import os\n\ndef f(completions):\n    os._exit(1)\n"
    before = children(), num_open_files()
    result = score_file(tmp_path, code, make_call(["a", "b"]))
    assert result.values == {"f": [None, None]} and len(result.failures) == 2
    assert (children(), num_open_files()) == before


def test_workers_die_with_a_killed_trainer_even_when_hanging(tmp_path: Path) -> None:
    path = write_rewards(
        tmp_path,
        f"""
        import os

        def f(completions):
            with open({str(tmp_path / "pid")!r}, "w") as file:
                file.write(f"{{os.getpid()}}\\n")
            while True:
                pass
        """,
    )
    trainer = f"""
from qerl.tasks.calls import FileFunction, RewardCall, RewardSpec
from qerl.tasks.pool import RewardPool
spec = RewardSpec("f", 1.0, FileFunction({path!r}, open({path!r}).read(), "f"))
RewardPool([spec], 1, 60.0, None).score([RewardCall("p", ["a"], ["a"], [[1]], {{}})])
"""
    root = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen([sys.executable, "-c", trainer], cwd=root)
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert wait_until_gone(int(pid_file.read_text()))


def test_ctrl_c_leaves_score_at_once_and_the_pool_usable(tmp_path: Path) -> None:
    code = """
    import time

    def f(completions):
        if completions == ["bad"]:
            time.sleep(60)
        return [1.0] * len(completions)
    """
    path = write_rewards(tmp_path, code)
    specs = resolve_rewards([f"{path}:f"], (), make_task())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with RewardPool(specs, 1, 30.0, None) as pool:
        pool.score([make_call(["warm"])])
        previous = signal.signal(signal.SIGALRM, interrupt)
        start = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.score([make_call(["bad"])])
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert time.monotonic() - start < 5
        assert pool.score([make_call(["a"])])[0].values == {"f": [1.0]}


def test_an_idle_worker_that_dies_is_replaced_without_blame(tmp_path: Path) -> None:
    code = """
    import os, threading

    def f(completions):
        if completions == ["later"]:
            threading.Timer(0.1, os._exit, [1]).start()
        return [1.0] * len(completions)
    """
    path = write_rewards(tmp_path, code)
    specs = resolve_rewards([f"{path}:f"], (), make_task())
    with RewardPool(specs, 1, 5.0, None) as pool:
        assert pool.score([make_call(["later"])])[0].failures == ()
        time.sleep(0.5)
        assert pool.score([make_call(["a"])])[0] == RewardResult({"f": [1.0]}, ())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import not_a_module_of_mine\ndef f(completions): ...", "ModuleNotFoundError"),
        ("import sys\nsys.exit('no')\ndef f(completions): ...", "SystemExit"),
        ("import os\nos._exit(7)\ndef f(completions): ...", "exit code 7"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score_file(tmp_path, code, make_call(["a"]))


def test_workers_import_only_what_rewards_need(tmp_path: Path) -> None:
    code = """
    import sys

    HEAVY = ("torch", "transformers", "datasets", "pydantic", "sympy", "math_verify", "reasoning_gym")

    def f(completions):
        return [float(sum(name in sys.modules for name in HEAVY))] * len(completions)
    """
    assert score_file(tmp_path, code, make_call(["a"])).values == {"f": [0.0]}


# Names, weights, sums


def test_default_rewards_and_weights() -> None:
    (spec,) = resolve_rewards((), (), make_task())
    assert (spec.name, spec.weight) == ("last_number", 1.0)
    with pytest.raises(UserError, match="no answers"):
        resolve_rewards((), (), make_task(answer=None))
    with pytest.raises(UserError, match="2 reward_weights for 1"):
        resolve_rewards(["exact"], (1.0, 2.0), make_task())


def test_wrong_names_are_explained(tmp_path: Path) -> None:
    code = "def reward_len(completions): ...\nasync def other(completions): ...\n"
    path = write_rewards(tmp_path, code)
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ndef f(:\n")
    cases = {
        "maths": "did you mean math",
        f"{path}:reward_length": "did you mean reward_len.*reward_len, other",
        f"{path}": "my_rewards.py:FUNCTION",
        f"{tmp_path}/none.py:f": "No such file",
        f"{broken}:f": "line 2",
        "reasoning_gym": "reasoning-gym tasks only",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message):
            resolve_rewards([name], (), make_task())


def test_a_column_that_is_not_there_is_found_before_the_run(tmp_path: Path) -> None:
    path = write_rewards(tmp_path, "def f(completions, ground_truth, level=1, *, kind): ...\n")
    with pytest.raises(UserError, match=r"wants 'ground_truth'.*answer, .*kind"):
        resolve_rewards([f"{path}:f"], (), make_task(kind="a"))
    with pytest.raises(UserError, match="wants 'kind'"):
        resolve_rewards([f"{path}:f"], (), make_task(ground_truth="a"))
    assert resolve_rewards([f"{path}:f"], (), make_task(ground_truth="a", kind="b"))


def test_resolving_does_not_run_the_file(tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w')\nf = lambda completions: [1.0] * len(completions)\n"
    path = write_rewards(tmp_path, code)
    specs = resolve_rewards([f"{path}:f"], (), make_task())
    assert not marker.exists()
    with RewardPool(specs, 1, TIMEOUT_S, None) as pool:
        assert pool.score([make_call(["a"])])[0].values == {"f": [1.0]}


def test_equal_names_in_two_files_are_told_apart(tmp_path: Path) -> None:
    for stem in ("a", "b"):
        (tmp_path / f"{stem}.py").write_text("def f(completions): ...\n")
    names = [f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f"]
    assert [spec.name for spec in resolve_rewards(names, (), make_task())] == ["a.f", "b.f"]
    with pytest.raises(UserError, match="given twice"):
        resolve_rewards([names[0], names[0]], (), make_task())


def test_total_rewards() -> None:
    specs = [RewardSpec("a", 1.0, None), RewardSpec("b", 0.5, None)]
    failed = RewardFailure("b", "p", 3, "timeout", "")
    result = RewardResult({"a": [1.0, None, None, 1.0], "b": [2.0, 4.0, None, None]}, (failed,))
    (row,) = total_rewards([result], specs)
    assert row[:2] == [2.0, 2.0]
    assert math.isnan(row[2]) and math.isnan(row[3])


def test_a_long_first_rollout_is_not_a_slow_reward(tmp_path: Path) -> None:
    """Nobody listens to the workers while the model samples; that time is not theirs."""
    specs = resolve_rewards(
        [
            write_rewards(tmp_path, "def f(completions):\n    return [1.0] * len(completions)")
            + ":f"
        ],
        (),
        make_task(),
    )
    with RewardPool(specs, 1, TIMEOUT_S) as pool:
        for worker in pool._workers:
            worker.deadline = time.monotonic() - 1
        assert pool.score([make_call(["a"])])[0].values == {"f": [1.0]}
