"""Every arm is measured in a process of its own, so that none inherits memory, compiled code or settings of another.

What an arm measures is a generator of rows; they come over a pipe as they are found, and survive an arm that fails later.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Measure = Callable[..., Iterator[Row]]
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
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(measure, arguments, theirs, log), daemon=False)
    process.start()
    theirs.close()
    rows: list[Row] = []
    try:
        while isinstance(message := ours.recv(), dict):
            rows.append(message)
            tell(message)
    except EOFError:
        process.join(_FAREWELL_S)
        message = f"its process ended with {_ending(process.exitcode)}"
    finally:
        if process.is_alive():
            process.join(_FAREWELL_S)
        if process.is_alive():
            process.kill()
        process.join()
    return Outcome(rows, message)


def _main(measure: Measure, arguments: tuple, connection: Connection, log: Path | None) -> None:
    if log is not None:
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        for row in measure(*arguments):
            connection.send(row)
    except Exception as error:  # whatever a library raises, the other arms are measured
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        connection.send(None)


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
