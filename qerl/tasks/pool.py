"""Reward functions in worker processes: killed when they hang, replaced when they die, never waited for in vain.

A call is one function on one prompt group. When it fails in any way (no answer in time, a dead process, an exception,
values that are not G finite numbers) its samples are tried again one by one, so that only the guilty ones are lost:
they get None and a `RewardFailure`. SIGKILL to the worker's whole session ends what ignores every other signal.

One thread does it all with a selector: writes and reads never block, so neither a full pipe nor a stopped process can
hold the trainer. Workers are sessions of their own, out of reach of the terminal's Ctrl-C, and see no GPU: its memory
is planned for the model. Results are placed by index, so they do not depend on which worker was faster.
"""

import os
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from qerl.child_process import ending
from qerl.errors import RunError, UserError
from qerl.heartbeat import beat
from qerl.tasks.board import Board, Job
from qerl.tasks.calls import (
    FailureKind,
    Request,
    RewardCall,
    RewardResult,
    RewardSpec,
    Setup,
)
from qerl.tasks.process import LOAD_TIMEOUT_S, WorkerProcess

if TYPE_CHECKING:
    from qerl.config import RewardConfig

NOT_AN_ANSWER = "the worker answered with something that is not the result of the call"
POLL_S = 0.2
"""A worker whose pipe is held open by a process it left behind is found dead after at most this long."""


def open_pool(
    specs: Sequence[RewardSpec],
    config: "RewardConfig",
    log_path: str | os.PathLike[str] | None = None,
    num_steps: int | None = None,
) -> "RewardPool":
    """A pool under the limits of a config."""
    return RewardPool(
        specs,
        config.reward_workers,
        config.reward_timeout_s,
        log_path,
        config.reward_memory_gib,
        config.max_failure_share,
        num_steps,
    )


class RewardPool:
    """Worker processes that hold the reward functions. A context manager; `close` leaves nothing behind.

    Starting does not wait for the functions to load: the first `score` does, and raises UserError if one cannot be.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        num_workers: int,
        timeout_s: float,
        log_path: str | os.PathLike[str] | None = None,
        memory_gib: float = 4.0,
        max_failure_share: float = 1.0,
        num_steps: int | None = None,
    ):
        """`log_path` gets what the functions print and a line a failure (appended; None throws both away).

        `num_steps` is the run's length, for functions that ask for TRL's `trainer_state`.
        """
        self._specs = tuple(specs)
        self._timeout_s = timeout_s
        self._memory_bytes = int(memory_gib * 2**30)
        self._max_failure_share = max_failure_share
        self._setup = pickle.dumps(Setup(self._specs, tuple(sys.path), num_steps))
        self._log_path = None if log_path is None else Path(log_path)
        self._log_fd = subprocess.DEVNULL
        if self._log_path is not None:
            self._log_fd = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._was_ready = False
        self._workers = [self._start() for _ in range(num_workers)]
        self._jobs: list[Job | None] = [None] * num_workers

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        """Every function on every group, in the order of `calls`. Returns when each sample has a value or a failure.

        Raises UserError when a function cannot be loaded, RunError when that happens after it once could, and when more
        than `max_failure_share` of the samples have a function that failed (at once: the rest may take long to fail).
        """
        board = Board(calls, self._specs)
        for worker in self._workers:
            if worker.loading:
                worker.restart_clock(LOAD_TIMEOUT_S)
        queue = deque(board.jobs())
        try:
            while queue or any(self._jobs):
                self._assign(queue, board)
                for index, outcome in self._wait():
                    beat()
                    self._settle(index, outcome, board, queue)
        except BaseException:  # Ctrl-C too: a later call must not meet the answers of this one
            for index, job in enumerate(self._jobs):
                if job is not None:
                    self._replace(index)
            raise
        return board.results()

    def _assign(self, queue: deque[Job], board: Board) -> None:
        """Give idle workers jobs. One that died while idle is replaced first: no sample is to blame."""
        for index, worker in enumerate(self._workers):
            if not queue or worker.loading or self._jobs[index] is not None:
                continue
            if worker.process.poll() is not None:
                self._replace(index)
                continue
            job = self._jobs[index] = queue.popleft()
            request = Request(job.function, board.call_of(job))
            worker.send(pickle.dumps(request), self._timeout_s)

    def close(self) -> None:
        """Kill the workers. Safe to call twice."""
        for worker in self._workers:
            worker.kill()
        self._workers, self._jobs = [], []
        if self._log_fd != subprocess.DEVNULL:
            os.close(self._log_fd)
            self._log_fd = subprocess.DEVNULL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._setup, self._log_fd, self._memory_bytes)

    def _replace(self, index: int) -> int:
        """A fresh worker in place of this one; returns the old one's exit code."""
        code = self._workers[index].kill()
        self._workers[index] = self._start()
        self._jobs[index] = None
        return code

    def _wait(self) -> list[tuple[int, dict[str, Any] | FailureKind]]:
        """Move bytes until something happened: (worker, its reply or how it failed)."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.read_fd, selectors.EVENT_READ, worker)
                if worker.outbox:
                    selector.register(worker.write_fd, selectors.EVENT_WRITE, worker)
            deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
            remaining = min(deadlines) - time.monotonic() if deadlines else POLL_S
            for key, events in selector.select(max(0.0, min(remaining, POLL_S))):
                if events & selectors.EVENT_WRITE:
                    key.data.write()
        outcomes = []
        for index, worker in enumerate(self._workers):
            try:
                reply = worker.read()
            except EOFError:
                outcomes.append((index, "died"))
                continue
            if reply is not None:
                outcomes.append((index, reply))
            elif worker.deadline is not None and time.monotonic() > worker.deadline:
                outcomes.append((index, "timeout"))
        return outcomes

    def _settle(
        self, index: int, outcome: dict[str, Any] | FailureKind, board: Board, queue: deque[Job]
    ) -> None:
        """Enter a worker's outcome on the board, or queue its samples one by one; replace it if it is lost."""
        worker = self._workers[index]
        job = self._jobs[index]
        if isinstance(outcome, str):
            code = self._replace(index)
            if worker.loading:
                self._raise_load_error("", _describe(outcome, LOAD_TIMEOUT_S, code))
            if job is not None:  # an idle worker's death harms nobody
                message = _describe(outcome, self._timeout_s, code)
                queue.extend(self._fail(board, job, outcome, message))
            return
        if worker.loading:
            if "load_error" in outcome:
                self._raise_load_error(f"{outcome['name']} ", outcome["load_error"])
            worker.loading = False
            self._was_ready = True
            return
        self._jobs[index] = None
        if job is None:  # nobody asked: a reward has reached the pipe
            self._replace(index)
            return
        if "values" in outcome and board.fits(job, outcome):
            board.enter(job, outcome)
        elif "kind" in outcome:
            queue.extend(self._fail(board, job, outcome["kind"], outcome["message"]))
        else:
            self._replace(index)
            queue.extend(self._fail(board, job, "died", NOT_AN_ANSWER))

    def _fail(self, board: Board, job: Job, kind: FailureKind, message: str) -> list[Job]:
        """Note a failed job; the jobs that retry its samples. Raises RunError once too many have failed."""
        retries = board.fail(job, kind, message)
        if not retries and self._log_fd != subprocess.DEVNULL:
            os.write(self._log_fd, f"qerl: {board.describe(job)}\n".encode(errors="replace"))
        if (share := board.share_failed()) > self._max_failure_share:
            log = "" if self._log_path is None else f" (see {self._log_path})"
            raise RunError(
                "reward",
                f"{share:.0%} of the samples have a reward that failed, more than "
                f"reward.max_failure_share={self._max_failure_share:g} allows; {board.commonest_failure()}{log}",
            )
        return retries

    def _raise_load_error(self, name: str, message: str) -> None:
        text = f"reward {name}could not be loaded: {message}"
        log = "" if self._log_path is None else f" (see {self._log_path})"
        if self._was_ready:
            raise RunError("reward", text + log)
        raise UserError(text + log)


def _describe(outcome: str, timeout_s: float, code: int) -> str:
    if outcome == "timeout":
        return f"no result within {timeout_s:g} s"
    return f"the worker process died ({ending(code)})"
