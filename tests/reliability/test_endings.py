"""Runs that end badly for a reason of their own: a hang, a full disk. One line, the right exit code, nothing lost."""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from children import arguments, assert_same_run, numbers, run, write_data

import qerl.watchdog
from qerl import update as update_module
from qerl.checkpoint import find_best_checkpoint, find_latest_checkpoint
from qerl.run_folder import read_run_config
from qerl.tasks.pool import RewardPool
from qerl.watchdog import WATCHDOG_LOG


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path]:
    """A run that nobody disturbed, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data(folder / "data.jsonl")
    assert run(arguments(folder / "run", data), folder / "log") == 0, (folder / "log").read_text()
    return folder / "run", data


def error_line(log: Path) -> str:
    text = log.read_text()
    assert "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("qerl: error: ")]
    return line


def hang_at(owner: object, name: str, call: int, how: Callable[[], object]) -> Callable[[], None]:
    """In the child, from the `call`-th call on, a function never returns."""

    def prepare() -> None:
        real, num_calls = getattr(owner, name), 0

        def hanging(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            if num_calls == call:
                how()
            return real(*args, **kwargs)

        setattr(owner, name, hanging)
        qerl.watchdog.GRACE_S = 1.0

    return prepare


def test_a_run_that_hangs_is_saved_ended_and_continued(whole, tmp_path):
    """A reward that waits for ever, between two checkpoints: a step is saved though none was due."""
    reference, data = whole
    argv, log = arguments(tmp_path / "run", data), tmp_path / "log"
    hang = hang_at(RewardPool, "score", 8, lambda: time.sleep(1000))
    assert run([*argv, "--watchdog_s", "1.5"], log, hang) == 1
    line = error_line(log)
    assert line.startswith("qerl: error: reward: nothing has moved for 1.5 s")
    newest = find_latest_checkpoint(tmp_path / "run")[0]
    assert newest is not None and f"checkpoint {newest.step} is saved" in line
    assert newest.step == numbers(tmp_path / "run")[-1]["step"] and newest.step % 3
    stacks = (tmp_path / "run" / WATCHDOG_LOG).read_text()
    assert "in phase reward" in stacks and "hanging" in stacks and "loop.py" in stacks
    assert "loop.py" in (tmp_path / "run" / "error.log").read_text()
    assert run(argv, log) == 0, log.read_text()
    assert_same_run(tmp_path / "run", reference)


def deaf() -> None:
    """Not even a signal's handler runs: as in a kernel that never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1000)


def test_an_update_that_hangs_deaf_is_ended_without_saving(whole, tmp_path):
    reference, data = whole
    argv, log = arguments(tmp_path / "run", data), tmp_path / "log"
    hang = hang_at(update_module, "clip_gradients", 5, deaf)
    assert run([*argv, "--watchdog_s", "1.5"], log, hang) == 1
    assert "nothing more was saved, for in phase update" in error_line(log)
    newest = find_latest_checkpoint(tmp_path / "run")[0]
    assert newest is not None and newest.step == 3
    assert run(argv, log) == 0, log.read_text()
    assert_same_run(tmp_path / "run", reference)


def limit_files() -> None:
    """No file may exceed 60 kB: an optimizer state of this adapter does, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))


def test_a_full_disk_ends_the_run_with_its_last_checkpoint(whole, tmp_path):
    """Exit code 1, not 2: the command is right and the same one continues."""
    data = whole[1]
    argv, log = arguments(tmp_path / "run", data, lora_r=8), tmp_path / "log"
    assert run([*argv, "--max_steps", "3"], log) == 0, log.read_text()
    before = {p: p.read_bytes() for p in (tmp_path / "run" / "checkpoints" / "3").iterdir()}
    assert run(argv, log, limit_files) == 1, log.read_text()
    line = error_line(log)
    assert "checkpoint: cannot save checkpoint" in line and "Earlier checkpoints are intact" in line
    assert before == {p: p.read_bytes() for p in before}
    newest = find_latest_checkpoint(tmp_path / "run")[0]
    assert newest is not None and newest.step == 3
    assert not list(tmp_path.rglob(".tmp-*"))
    assert run(argv, log) == 0, log.read_text()
    # What the longer run meant was said when it began, and is on record.
    said = log.read_text()
    assert "the run has 8 steps now and had 3. From step 4 on, the cosine schedule" in said
    changes = read_run_config(tmp_path / "run")["changes"]
    assert changes[0] == {
        "after_step": 3,
        "fields": {"config.train.max_steps": [3, 8], "num_steps": [3, 8]},
    }


def test_a_shorter_run_than_was_done_is_refused(whole, tmp_path):
    _, data = whole
    argv, log = arguments(tmp_path / "run", data, max_steps=3), tmp_path / "log"
    assert run(argv, log) == 0, log.read_text()
    config = (tmp_path / "run" / "config.json").read_bytes()
    assert run([*argv, "--max_steps", "2"], log) == 2
    assert "has done 3 steps, more than the 2 that are asked for" in error_line(log)
    assert (tmp_path / "run" / "config.json").read_bytes() == config


def test_data_and_model_may_move_but_not_change(whole, tmp_path):
    """Paths are no identity: the same bytes elsewhere go on, other bytes at the same place are refused."""
    _, data = whole
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(data.read_bytes())
    argv, log = arguments(tmp_path / "run", data, max_steps=3), tmp_path / "log"
    assert run(argv, log) == 0, log.read_text()
    assert run([*argv, "--task.path", str(moved)], log) == 0, log.read_text()
    moved.write_text(moved.read_text().replace("three", "thirty"))
    assert run([*argv, "--task.path", str(moved)], log) == 2
    assert "data.train: " in error_line(log)


def test_the_best_checkpoint_is_kept_beside_the_newest(whole):
    run_dir = whole[0]
    best = find_best_checkpoint(run_dir, "accuracy")
    assert best is not None
    kept = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    accuracies = {x["step"]: x["eval/accuracy"] for x in numbers(run_dir) if "eval/accuracy" in x}
    scored = {step: value for step, value in accuracies.items() if step > 0}
    first_best = min(step for step in scored if scored[step] == max(scored.values()))
    assert best[0].step == first_best and best[1] == scored[first_best]
    assert kept == sorted({first_best, *kept[-2:]})
    name = "adapter_model.safetensors"
    assert (run_dir / "best" / name).read_bytes() == (best[0].path / name).read_bytes()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_one_line(whole, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    log = tmp_path / "log"
    assert run(arguments(folder / "run", whole[1]), log) == 2
    assert "cannot write the run folder" in error_line(log)
