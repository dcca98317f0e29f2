"""A thread that ends a run in which nothing moves, and says where it stood.

A hang is worse than a crash: it holds the machine and says nothing. When no beat (`heartbeat.py`) has come for the set
time, the watchdog

1. writes the stacks of all threads to RUN/watchdog.log;
2. saves what can be saved: `rescue` is given the phase and answers in words. It runs in a thread of its own, with a
   time limit, for it may hang on what hangs already;
3. raises the RunError in the main thread, by SIGALRM, so that a run that waits for a lock, a pipe or a file ends like
   any failed run: workers killed, files closed, one line, exit code 1;
4. where that does not help either (a kernel that never returns), writes the line itself and ends the process.

Time is counted in ticks of the watchdog, so hours in which the whole process was stopped (Ctrl-Z, a sleeping laptop)
are not taken for a hang.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from qerl.errors import RunError
from qerl.heartbeat import beats, current_phase

WATCHDOG_LOG = "watchdog.log"
RESCUE_S = 60.0
"""How long saving may take."""
GRACE_S = 30.0
"""How long the run may take to end by itself."""
JOIN_S = 5.0
"""How long the end of the watch waits for its thread."""


def _nothing_to_save(_phase: str) -> str:
    return "nothing was to be saved yet"


class Watchdog:
    """State: the thread, what it may call to save, and the error once it has fired."""

    def __init__(self, run_dir: Path, limit_s: float):
        self.run_dir, self.limit_s = run_dir, limit_s
        self.rescue: Callable[[str], str] = _nothing_to_save
        """Saves what can be saved in this phase and says what; set by the run once there is something."""
        self.error: RunError | None = None
        self._ended = threading.Event()
        self._owner = threading.current_thread()
        self._thread = threading.Thread(target=self._watch, name="qerl-watchdog", daemon=True)

    def _watch(self) -> None:
        tick = min(1.0, self.limit_s / 5)
        seen, idle_s, last = beats(), 0.0, time.monotonic()
        while not self._ended.wait(tick):
            now = time.monotonic()
            if beats() != seen:
                seen, idle_s = beats(), 0.0
            else:
                idle_s += min(now - last, 2 * tick)
            last = now
            if idle_s >= self.limit_s:
                return self._fire(current_phase() or "report")
        return None

    def _fire(self, phase: str) -> None:
        where = self._write_stacks(phase)
        self.error = RunError(
            phase,
            f"nothing has moved for {self.limit_s:g} s (--watchdog-s); {where}; {self._save(phase)}; "
            "the same command continues the run",
        )
        if self._owner is threading.main_thread() and self._owner.ident is not None:
            signal.pthread_kill(self._owner.ident, signal.SIGALRM)
        if not self._ended.wait(GRACE_S):
            sys.stderr.write(f"qerl: error: {self.error}\n")
            sys.stderr.flush()
            os._exit(1)

    def _write_stacks(self, phase: str) -> str:
        path = self.run_dir / WATCHDOG_LOG
        try:
            with path.open("a", encoding="utf-8") as file:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"{now} nothing has moved for {self.limit_s:g} s in phase {phase}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
        except OSError as error:
            return f"the stacks could not be written to {path} ({error.strerror})"
        return f"the stacks of all threads are in {path}"

    def _save(self, phase: str) -> str:
        said: list[str] = []
        thread = threading.Thread(
            target=lambda: said.append(self.rescue(phase)), name="qerl-rescue", daemon=True
        )
        thread.start()
        thread.join(RESCUE_S)
        return said[0] if said else "saving did not work either"

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def watching(run_dir: Path, limit_s: float) -> Iterator[Watchdog]:
    """Watch what happens inside the context; `limit_s` 0 watches nothing.

    SIGALRM is the watchdog's for as long. Off the main thread, where no signal can be sent, only its last means is left.
    """
    watchdog = Watchdog(run_dir, limit_s)
    if limit_s == 0:
        yield watchdog
        return
    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGALRM, watchdog._raise) if in_main else None
    watchdog._thread.start()
    try:
        yield watchdog
    finally:
        watchdog._ended.set()
        # A daemon thread that frees tensors while the interpreter ends aborts the process, and this one knows the run.
        watchdog._thread.join(JOIN_S)
        watchdog.rescue = _nothing_to_save
        if in_main:
            signal.signal(signal.SIGALRM, previous)
