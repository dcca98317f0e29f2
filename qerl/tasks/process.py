"""One reward worker as the trainer sees it: a process and two pipes that are never waited for.

Reads and writes take what there is and return, so neither a full pipe nor a stopped process can hold the trainer. The
process is the leader of a session of its own: the terminal's Ctrl-C does not reach it, and SIGKILL to the session ends
what it started too. It sees no GPU, whose memory is planned for the model.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qerl.tasks.calls import LENGTH, decode_reply, encode_message

LOAD_TIMEOUT_S = 120.0
"""A worker may take this long to import the user's file; a reward's own limit counts calls only."""

READ_BYTES = 1 << 16
MOST_REPLY_BYTES = 1 << 28
"""No honest reply is longer; a worker that goes on is ended."""


class WorkerProcess:
    """State: the process, its two pipes, and the bytes under way in both directions."""

    def __init__(self, setup: bytes, log: int, memory_bytes: int):
        request_fd, self.write_fd = os.pipe()
        self.read_fd, reply_fd = os.pipe()
        numbers = (request_fd, reply_fd, os.getpid(), memory_bytes)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "qerl.tasks.worker", *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(request_fd, reply_fd),
            start_new_session=True,
            env=_worker_environment(),
        )
        os.close(request_fd)
        os.close(reply_fd)
        os.set_blocking(self.write_fd, False)
        os.set_blocking(self.read_fd, False)
        self.loading = True
        """Until the first reply: the functions are not there yet."""
        self.inbox = bytearray()
        self.send(setup, LOAD_TIMEOUT_S)
        self.write()  # it loads while the trainer is busy with the model

    def send(self, body: bytes, timeout_s: float) -> None:
        """Queue a message for `write`; the clock of its reply runs from now."""
        self.outbox = memoryview(encode_message(body))
        self.deadline: float | None = time.monotonic() + timeout_s

    def restart_clock(self, timeout_s: float) -> None:
        """Let the time for the reply run from now: nobody listened until now."""
        self.deadline = time.monotonic() + timeout_s

    def write(self) -> None:
        """Send what the pipe takes. A closed pipe is left for `read` to find."""
        try:
            self.outbox = self.outbox[os.write(self.write_fd, self.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outbox = memoryview(b"")

    def read(self) -> dict[str, Any] | None:
        """A whole reply, or None if there is none yet.

        Raises EOFError when the process is gone, and when a reward has written into the pipe what is no reply of ours.
        """
        try:
            while chunk := os.read(self.read_fd, READ_BYTES):
                self.inbox += chunk
                if len(self.inbox) > MOST_REPLY_BYTES:
                    raise EOFError
            closed = True
        except BlockingIOError:
            closed = self.process.poll() is not None
        if len(self.inbox) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self.inbox)
            end = LENGTH.size + length
            if len(self.inbox) >= end:
                reply = decode_reply(bytes(self.inbox[LENGTH.size : end]))
                del self.inbox[:end]
                self.deadline = None
                return reply
        if closed:
            raise EOFError
        return None

    def kill(self) -> int:
        """End the process and what it started; returns its exit code, negative for a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.write_fd)
        os.close(self.read_fd)
        return self.process.wait()


def _worker_environment() -> dict[str, str]:
    """The trainer's, with this package found first, one thread, no GPU, and the same hashing each time."""
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
    }
