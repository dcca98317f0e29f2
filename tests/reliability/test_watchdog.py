"""A run in which nothing moves ends by itself, says in which phase, and leaves what is needed to look into it."""

import time

import pytest
from children import arguments, run, write_data

from qerl import watchdog
from qerl.heartbeat import beat, entered
from qerl.metrics import read_metrics
from qerl.rollout import score as real_score


def hang_in_rewards() -> None:
    """In the child: the second step's rewards never come."""
    import qerl.collect

    calls = []

    def score(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 4:  # the evaluation before training scores first
            time.sleep(600)
        return real_score(*arguments, **keywords)

    qerl.collect.score = score


def test_a_hanging_run_ends_with_its_phase_and_continues(tmp_path):
    data = write_data(tmp_path / "data.jsonl")
    argv = arguments(tmp_path / "run", data, watchdog_s=1.5, max_steps=6, save_steps=1)
    assert run(argv, tmp_path / "log", hang_in_rewards) == 1, (tmp_path / "log").read_text()
    said = (tmp_path / "log").read_text()
    assert "nothing has moved for 1.5 s" in said and "reward" in said.splitlines()[-1]
    stacks = (tmp_path / "run" / "watchdog.log").read_text()
    assert "phase reward" in stacks and "score" in stacks
    done = max(line["step"] for line in read_metrics(tmp_path / "run"))
    assert 0 < done < 6
    assert run(argv, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert max(line["step"] for line in read_metrics(tmp_path / "run")) == 6


def test_what_moves_is_left_alone_and_the_thread_is_gone_afterwards(tmp_path):
    with watchdog.watching(tmp_path, 0.3) as watched, entered("update"):
        for _ in range(12):
            time.sleep(0.05)
            beat()
    assert watched.error is None
    assert not watched._thread.is_alive(), (
        "a thread that outlives the run can abort the process at its end"
    )
    assert not (tmp_path / watchdog.WATCHDOG_LOG).exists()


def test_nothing_is_watched_where_it_is_switched_off(tmp_path):
    with watchdog.watching(tmp_path, 0) as watched:
        time.sleep(0.05)
    assert not watched._thread.is_alive() and watched.error is None


@pytest.mark.parametrize("phase", ["rollout", "checkpoint"])
def test_the_phase_is_named_and_the_rescue_asked(tmp_path, phase):
    asked = []
    with (
        pytest.raises(watchdog.RunError, match=f"{phase}: nothing has moved"),
        watchdog.watching(tmp_path, 0.2) as watched,
        entered(phase),
    ):
        watched.rescue = lambda name: asked.append(name) or "step 3 was saved"
        time.sleep(20)
    assert asked == [phase]
    assert "step 3 was saved" in str(watched.error)
