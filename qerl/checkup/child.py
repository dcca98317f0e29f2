"""The part of a check-up that touches GPU and kernels, in a process of its own.

A wrong kernel may do worse than compute something wrong: hang, or end its process. The parent then still says which one it
was, and what it found itself. Findings come over a pipe, the name of each before its result.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from qerl.checkup.finding import Check
from qerl.checkup.machine import Driver
from qerl.child_process import ending, print_to

_START = "start of torch"
"""What the child is doing before its first message"""
_FAREWELL_S = 5
"""For a child that is done to end its own helpers"""
NOT_IN_TIME = (
    "run it again: what was compiled is kept; if it stops there again, the kernel or its compiler hangs "
    "(--seconds gives it longer)"
)

Work = Callable[[Connection], None]


def run_in_child(work: Work, seconds: float, tell: Callable[[Check], None]) -> None:
    """Run `work` in a new process and tell its findings as they come, for at most so many seconds.

    A child that ends early or is late is a finding too, under the name of what it was doing.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="qerl-doctor-") as folder:
        log = Path(folder, "output")
        process = context.Process(target=_main, args=(work, theirs, log), daemon=False)
        process.start()
        theirs.close()
        try:
            for finding in _findings(process, ours, seconds, log):
                tell(finding)
        finally:
            if process.is_alive():
                process.join(_FAREWELL_S)
            if process.is_alive():
                process.kill()
            process.join()


def _findings(process: BaseProcess, ours: Connection, seconds: float, log: Path) -> Iterator[Check]:
    doing, deadline = _START, time.monotonic() + seconds
    while True:
        try:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                found = f"not finished after {seconds:.0f} s"
                yield Check(doing, "FAILED", found, NOT_IN_TIME)
                return
            message = ours.recv()
        except (EOFError, OSError):
            process.join(_FAREWELL_S)
            found = f"its process ended with {ending(process.exitcode)}; {_last_line(log)}"
            yield Check(doing, "FAILED", found, "open an issue with the block below")
            return
        if message is None:
            return
        if isinstance(message, str):
            doing = message
        else:
            yield message


def _main(work: Work, connection: Connection, log: Path) -> None:
    """In the child: what libraries print goes to a file; `None` over the pipe says that all was done."""
    print_to(log)
    work(connection)
    connection.send(None)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
    return f"it said last: {said}" if said else "it said nothing"


def look_at_device(driver: Driver, connection: Connection) -> None:
    """`qerl.checkup.device.look_at_device`, imported in the child only: torch itself may be what is broken."""
    from qerl.checkup import device

    device.look_at_device(driver, connection)
