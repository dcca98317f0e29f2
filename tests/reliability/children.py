"""Training runs in forked children: what is imported is there at once, so that a run to kill costs a second.

The parent has one thread that computes (OMP_NUM_THREADS=1) and torch starts its autograd engine anew after a fork, so a
child is as good as a fresh process. `tests/test_training.py` kills real ones too.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq
from hypothesis import HealthCheck, settings

from qerl import failures, summary
from qerl.errors import RunError, UserError
from qerl.metrics import read_metrics
from qerl.train import main

FULL = os.environ.get("QERL_RELIABILITY") == "full"
NUM_KILLS = 30 if FULL else 5
NUM_CASES = int(os.environ.get("QERL_CASES", 1000 if FULL else 100))
NUM_STEPS = 8
UNSTABLE = ("time/", "memory/", "throughput/")
PHASES = ("rollout", "update", "checkpoint", "reward", "eval", "sync", "setup")


@dataclass(frozen=True)
class Kill:
    """When to send SIGKILL: `delay_s` after the `entry`-th entering of `phase`."""

    phase: str
    entry: int
    delay_s: float


def arguments(run_dir: Path, data: Path, **changes: object) -> list[str]:
    """A tiny run with everything that has state: noise, dynamic sampling, evaluations, keep-best, three epochs."""
    values = {
        "model": "tiny",
        "device": "cpu",
        "task.path": data,
        "reward_funcs": f"{Path(__file__).parent / 'reward.py'}:low_or_not",
        "run_dir": run_dir,
        "max_steps": NUM_STEPS,
        "max_completion_length": 8,
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_resample_rounds": 2,
        "num_stages": 4,
        "learning_rate": 5e-3,
        "lora_r": 4,
        "save_steps": 3,
        "save_best": "accuracy",
        "eval_steps": 2,
        "eval_size": 2,
        "reward_workers": 1,
    } | changes
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def write_data(path: Path) -> Path:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    path.write_text("".join(json.dumps({"prompt": w, "answer": w}) + "\n" for w in words))
    return path


def start(argv: list[str], log: Path, prepare: Callable[[], None] | None = None) -> int:
    """Fork a child that runs `qerl.train` with its output in `log`; returns its process id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        # Half of such a run's time, and tests/test_metrics.py has it.
        summary.plot_learning_curve = lambda run_dir: run_dir / "curve.png"
        if prepare is not None:
            prepare()
        code = main(argv)
    except (UserError, RunError) as error:
        print(f"qerl: error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UserError) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, timeout_s: float = 120) -> int:
    """The child's exit code, negative for a signal; a child that does not end fails the test."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the run did not end within {timeout_s} s")


def run(argv: list[str], log: Path, prepare: Callable[[], None] | None = None) -> int:
    return wait(start(argv, log, prepare))


def kill_self_at(kill: Kill) -> Callable[[], None]:
    """Arranges, in the child, for its death at that moment."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare() -> None:
        real, entries = failures.entered, 0

        @contextmanager
        def counting(phase: str) -> Iterator[None]:
            nonlocal entries
            with real(phase):
                if phase == kill.phase:
                    entries += 1
                    if entries == kill.entry:
                        threading.Timer(kill.delay_s, die).start()
                yield

        failures.entered = counting

    return prepare


def kills(count: int, training_s: float, seed: int) -> list[Kill]:
    """Moments: every other one in a phase, each phase in turn, the others anywhere between set-up and end.

    The phase report encloses the loop, so its first entering is where training begins.
    """
    generator = random.Random(seed)
    chosen = []
    for index in range(count):
        if index % 2:
            chosen.append(Kill("report", 1, generator.uniform(0, training_s)))
            continue
        phase = PHASES[index // 2 % len(PHASES)]
        most = {"setup": 1, "checkpoint": 4, "eval": 5}.get(phase, NUM_STEPS)
        longest = {"setup": 0.5}.get(phase, 0.02)
        chosen.append(Kill(phase, generator.randint(1, most), generator.uniform(0, longest)))
    return chosen


def children_of(process: int) -> list[psutil.Process]:
    try:
        return psutil.Process(process).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def numbers(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what depends on the machine's speed."""
    return [
        {k: v for k, v in line.items() if not k.partition("/")[2].startswith(UNSTABLE)}
        for line in read_metrics(run_dir)
    ]


def assert_same_run(one: Path, other: Path) -> None:
    """Every number, every completion, and every byte of what goes on from here."""
    assert numbers(one) == numbers(other)
    steps = [line["step"] for line in numbers(one) if "train/reward" in line]
    assert steps == list(range(1, steps[-1] + 1))
    tables = sorted(path.name for path in (one / "completions").iterdir())
    assert tables == sorted(path.name for path in (other / "completions").iterdir())
    for name in tables:
        a, b = (pq.read_table(run / "completions" / name).to_pylist() for run in (one, other))
        assert a == b, name
    last = f"checkpoints/{steps[-1]}"
    for file in (
        "adapter/adapter_model.safetensors",
        "best/adapter_model.safetensors",
        f"{last}/adapter_model.safetensors",
        f"{last}/optimizer.safetensors",
        f"{last}/state.json",
    ):
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    assert not list(one.rglob(".tmp-*"))


def cases(share: float):
    """This share of the cases, the same ones each time unless there are many."""
    return settings(
        max_examples=max(5, int(NUM_CASES * share)),
        derandomize=NUM_CASES <= 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
