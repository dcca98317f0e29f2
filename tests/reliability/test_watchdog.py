"""The watchdog by itself; `test_endings.py` has whole runs that hang."""

import signal
import time

import pytest

from qerl import watchdog
from qerl.heartbeat import beat, entered


def test_what_moves_is_left_alone_and_the_thread_is_gone_afterwards(tmp_path):
    handler = signal.getsignal(signal.SIGALRM)
    with watchdog.watching(tmp_path, 0.3) as watched, entered("update"):
        for _ in range(12):
            time.sleep(0.05)
            beat()
    assert watched.error is None
    assert not watched._thread.is_alive(), (
        "a thread that outlives the run can abort the process at its end"
    )
    assert not (tmp_path / watchdog.WATCHDOG_LOG).exists()
    assert signal.getsignal(signal.SIGALRM) is handler


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
