"""Every arm is measured in a process of its own, so that none inherits memory, compiled code or settings of another.

What an arm measures is a generator of rows; they come over a pipe as they are found, and survive an arm that fails later.
"""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qerl.child_process import ending, print_to

Row = dict[str, Any]
Measure = Callable[..., Iterator[Row | None]]
"""A function at the top of a module, with arguments that can be pickled"""
_FAREWELL_S = 30
"""For a process that has told everything to end"""


@dataclass(frozen=True)
class Outcome:
    """What an arm came to."""

    rows: list[Row]
    failure: str | None
    """Its last words; None when it measured everything"""


def measure_in_process(
    measure: Measure, *arguments: Any, tell: Callable[[Row], None], log: Path | None = None
) -> Outcome:
    """Run `measure(*arguments)` in a new process and tell its rows as they come.

    What libraries print there goes to the file `log`, or to this process' own output.
    """
    (outcome,) = measure_in_turn([(measure, arguments)], tell=tell, log=log)
    return outcome


def measure_in_turn(
    jobs: Sequence[tuple[Measure, tuple[Any, ...]]],
    *,
    tell: Callable[[Row], None],
    log: Path | None = None,
) -> list[Outcome]:
    """As `measure_in_process` for several at once: all start together, then each measures a row in turn while the others wait.

    A measure that shares its turns has to yield None when it has started, before it measures anything.
    """
    children = [_Child(measure, arguments, log) for measure, arguments in jobs]
    try:
        for child in children:
            child.receive(tell)
        while waiting := [child for child in children if not child.ended]:
            for child in waiting:
                child.go_on()
                child.receive(tell)
    finally:
        for child in children:
            child.end()
    return [Outcome(child.rows, child.failure) for child in children]


class _Child:
    """A process that measures, and what it has told so far."""

    def __init__(self, measure: Measure, arguments: tuple[Any, ...], log: Path | None):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (measure, arguments, theirs, log)
        self.process = context.Process(target=_main, args=arguments, daemon=False)
        self.process.start()
        theirs.close()
        self.rows: list[Row] = []
        self.ended = False
        self.failure: str | None = None

    def receive(self, tell: Callable[[Row], None]) -> None:
        """Wait for its next row, for it to be ready, or for its end."""
        try:
            message = self.connection.recv()
        except EOFError:
            self.process.join(_FAREWELL_S)
            message = _Ended(f"its process ended with {ending(self.process.exitcode)}")
        if isinstance(message, _Ended):
            self.ended, self.failure = True, message.failure
            self.end()
        elif message is not None:
            self.rows.append(message)
            tell(message)

    def go_on(self) -> None:
        """It is its turn."""
        with suppress(BrokenPipeError):  # it died since; `receive` says of what
            self.connection.send(None)

    def end(self) -> None:
        """See to it that the process is no more."""
        if self.ended:
            self.process.join(_FAREWELL_S)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


@dataclass(frozen=True)
class _Ended:
    failure: str | None


def _main(measure: Measure, arguments: tuple, connection: Connection, log: Path | None) -> None:
    if log is not None:
        print_to(log)
    try:
        for row in measure(*arguments):
            connection.send(row)
            connection.recv()
    except Exception as error:  # whatever a library raises, the other arms are measured
        traceback.print_exc()
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        connection.send(_Ended(failure))
    else:
        connection.send(_Ended(None))
