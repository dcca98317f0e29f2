"""A run that is killed at any moment and continued is the run that was never killed, bit for bit.

`make reliability` kills 30 times, CI 5 times (QERL_RELIABILITY=full).
"""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from children import (
    NUM_KILLS,
    NUM_STEPS,
    Kill,
    arguments,
    assert_same_run,
    children_of,
    kill_self_at,
    kills,
    run,
    start,
    wait,
    write_data,
)

from qerl.metrics import read_metrics

SEED = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Path, float]:
    """A run that nobody disturbed, its data, and how long its steps took."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data(folder / "data.jsonl")
    assert run(arguments(folder / "run", data), folder / "log") == 0, (folder / "log").read_text()
    began = (folder / "run" / "config.json").stat().st_mtime
    ended = (folder / "run" / "adapter").stat().st_mtime
    return folder / "run", data, ended - began


def test_the_run_has_the_state_that_could_be_lost(whole):
    lines = [line for line in read_metrics(whole[0]) if "train/reward" in line]
    assert any(line["train/noise/sigma"] > 0 for line in lines)
    assert any(line["train/dynamic_sampling/num_rounds"] > 1 for line in lines)
    assert len({line["train/learning_rate"] for line in lines}) == NUM_STEPS
    assert all(line["train/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("index", range(NUM_KILLS))
def test_a_killed_run_continues_to_the_same_numbers(whole, tmp_path, index):
    """Every third is killed a second time while it continues."""
    reference, data, training_s = whole
    argv, log = arguments(tmp_path / "run", data), tmp_path / "log"
    first = kills(NUM_KILLS, training_s, SEED)[index]
    second = kills(NUM_KILLS, training_s, SEED + 1)[index] if index % 3 == 0 else None
    for kill in (first, second):
        if kill is not None:
            assert run(argv, log, kill_self_at(kill)) in (-signal.SIGKILL, 0), log.read_text()
    assert run(argv, log) == 0, f"{first} {second}\n{log.read_text()}"
    assert_same_run(tmp_path / "run", reference)


def test_a_killed_run_leaves_no_process(whole, tmp_path):
    child = start(arguments(tmp_path / "run", whole[1]), tmp_path / "log")
    workers: list[psutil.Process] = []
    while not workers:
        time.sleep(0.01)
        workers = children_of(child)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_a_run_that_ctrl_c_stops_saves_and_continues(whole, tmp_path):
    """Stopped before its first update: the checkpoint of step 0 must not make it evaluate twice."""
    reference, data, _ = whole
    argv, log = arguments(tmp_path / "run", data), tmp_path / "log"

    def ask() -> None:
        kill_self_at(Kill("reward", 1, 0.0))()
        os_kill = os.kill
        os.kill = lambda process, _: os_kill(process, signal.SIGINT)

    assert run(argv, log, ask) == 130, log.read_text()
    assert (tmp_path / "run" / "checkpoints" / "0").is_dir()
    assert run(argv, log) == 0, log.read_text()
    assert_same_run(tmp_path / "run", reference)
