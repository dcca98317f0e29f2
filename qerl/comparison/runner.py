"""Running the arms of a comparison: one process a run, one or a few at once, stopped and continued at any point. No torch.

`compare.json` in the comparison's folder says what became of each run. A run is finished when its command ended with
exit code 0; the same command is then not run again. Everything else is left to the run itself: its folder continues
after its last checkpoint, whether it was stopped by us, killed, or failed. A failed run is noted and the next one
starts; giving the comparison again tries it again.

A child dies with us (PR_SET_PDEATHSIG), so a killed comparison leaves no run behind that holds a folder's lock or a
GPU. It is a session of its own: Ctrl-C reaches us alone, and we ask it once to save and stop.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from qerl.comparison.arms import Comparison, PlannedRun
from qerl.errors import UserError

STATUS = "compare.json"
STOPPED = (130, 143, -signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of a run that was asked to stop: it saved, or had not begun, or took too long and was killed."""
GRACE_S = 600.0
"""How long a run may take to save after it was asked to stop; then it is killed, and continues from its checkpoint."""
SHOWN = ("step ", "eval after", "continuing ", "note: ")
"""How the lines of a run begin that are shown while it goes on; its log has all."""
TRAIN = (sys.executable, "-m", "qerl.train")
_PR_SET_PDEATHSIG = 1


class Runner:
    """State: what became of each run so far, the children that are running, and whether someone asked to stop."""

    def __init__(self, comparison: Comparison, minutes: float | None = None, at_once: int = 1):
        """Read what earlier sessions did. Raises UserError if the folder holds something else."""
        self.comparison, self.at_once = comparison, at_once
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.runs = read_status(comparison.folder).get("runs", {})
        self.stop_signal: int | None = None
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        check_folder(comparison.folder)

    def run_all(self) -> None:
        """Run what is not finished, until all are, the time is up, or a signal asks to stop."""
        self.comparison.folder.mkdir(parents=True, exist_ok=True)
        self._write_status()
        with self._signals(), self._alarm(), ThreadPoolExecutor(self.at_once) as threads:
            for done in [threads.submit(self._run, run) for run in self.comparison.runs]:
                done.result()

    @property
    def time_is_up(self) -> bool:
        """True once the minutes that were given are over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def is_finished(self, planned: PlannedRun) -> bool:
        """Whether this very command has ended well."""
        known = self.runs.get(planned.name, {})
        return known.get("state") == "finished" and known.get("command") == planned.command

    def state_of(self, planned: PlannedRun) -> str:
        """finished, failed, stopped or pending."""
        known = self.runs.get(planned.name, {})
        return (
            known.get("state", "pending") if known.get("command") == planned.command else "pending"
        )

    def _run(self, planned: PlannedRun) -> None:
        if self.is_finished(planned) or self._is_stopping:
            return
        log = self.comparison.folder / "logs" / f"{planned.name.replace('/', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        earlier = self.runs.get(planned.name, {})
        started = time.monotonic()
        say(f"{planned.name}: started; its log: {log}")
        with log.open("a", encoding="utf-8") as file:
            code, last_line = self._wait_for_child(planned, file)
        state = "finished" if code == 0 else "stopped" if self._was_stopped(code) else "failed"
        result = {
            "state": state,
            "command": planned.command,
            "run_dir": str(planned.run_dir),
            "exit_code": code,
            "message": last_line if state == "failed" else "",
            "sessions": earlier.get("sessions", 0) + 1,
            "seconds": earlier.get("seconds", 0.0) + time.monotonic() - started,
        }
        with self._lock:
            self.runs[planned.name] = result
            self._write_status()
        say(f"{planned.name}: {state}{f' ({last_line})' if state == 'failed' else ''}")

    def _was_stopped(self, code: int) -> bool:
        """By us, and not by a fault."""
        return code in STOPPED and self._is_stopping

    @property
    def _is_stopping(self) -> bool:
        return self.stop_signal is not None or self.time_is_up

    def _wait_for_child(self, planned: PlannedRun, log: IO[str]) -> tuple[int, str]:
        """Exit code and last line of a run; its lines go to `log`, the telling ones to the terminal."""
        with subprocess.Popen(
            [*TRAIN, *planned.words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent,
        ) as child:
            with self._lock:
                self._children.add(child)
            if self._is_stopping:  # asked just before
                self._ask_to_stop(child)
            last_line = ""
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    log.write(line)
                    log.flush()
                    last_line = line.strip() or last_line
                    if line.startswith(SHOWN):
                        say(f"[{planned.name}] {line.rstrip()}")
            finally:
                with self._lock:
                    self._children.discard(child)
        return child.returncode, last_line

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        """Ask all children to stop when the time is up."""
        if self.deadline is None:
            yield
            return
        alarm = threading.Timer(max(0.0, self.deadline - time.monotonic()), self._ask_all_to_stop)
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def _ask_all_to_stop(self) -> None:
        for child in tuple(self._children):
            self._ask_to_stop(child)

    def _ask_to_stop(self, child: subprocess.Popen[str]) -> None:
        if child.poll() is not None:
            return
        child.send_signal(signal.SIGTERM)
        killer = threading.Timer(GRACE_S, child.kill)
        killer.daemon = True
        killer.start()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop the running children; where signals cannot be caught (a thread) nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, _: FrameType | None) -> None:
            if self.stop_signal is not None:
                for child in tuple(self._children):
                    child.kill()
                raise KeyboardInterrupt
            self.stop_signal = number
            say("stopping: what runs now saves first (again to stop at once)")
            self._ask_all_to_stop()

        previous = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _write_status(self) -> None:
        comparison = self.comparison
        status = {
            "arms": comparison.differences,
            "seeds": comparison.seeds,
            "baseline": comparison.baseline,
            "target_accuracy": comparison.target_accuracy,
            "at_once": self.at_once,
            "runs": self.runs,
        }
        path = comparison.folder / STATUS
        aside = path.with_name(f".{STATUS}.tmp")
        aside.write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, path)


def check_folder(folder: Path) -> None:
    """Raise UserError unless the folder is a comparison's, empty, or not there yet."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --run-dir")
    if folder.exists() and any(folder.iterdir()) and not (folder / STATUS).exists():
        raise UserError(
            f"{folder} is not empty and holds no comparison (no {STATUS}); choose another --run-dir"
        )


def read_status(folder: Path) -> dict[str, Any]:
    """`compare.json`; empty if there is none. Raises UserError if it is not ours to read."""
    path = folder / STATUS
    if not path.exists():
        return {}
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(status, dict) or not isinstance(status.get("runs"), dict):
        raise UserError(f"{path} was not written by qerl.compare")
    return status


def say(text: str) -> None:
    """Write a line to stdout now (`metrics.say`, without its imports)."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _die_with_parent() -> None:
    """In the child, before it becomes the run: be killed when the parent ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
