"""What the processes have in common that this package starts for work that may break one: benchmarks, doctor, reward functions."""

import os
import signal
from pathlib import Path


def ending(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"


def print_to(log: Path) -> None:
    """In the child: everything that it and its libraries print from now on goes to the end of this file."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
