"""One thing that was looked at, and how it is shown: a line, and below it what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "FAILED", "skipped"]
"""warning: works, but not all of it; FAILED: something that is needed; skipped: was not looked at"""


@dataclass(frozen=True)
class Check:
    """A finding about one thing."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do about it; of a warning or a failure"""

    def text(self) -> str:
        """A line for the terminal, and a second one with the advice."""
        line = f"{self.status:<8} {self.name:<26} {self.found}"
        return f"{line}\n{'':>36}-> {self.advice}" if self.advice else line


def guarded(name: str, look: Callable[[], Check], advice: str = "") -> Check:
    """`look()`, with whatever it raises as a failure: a doctor has to survive what it finds."""
    try:
        return look()
    # Any library may raise anything on a broken machine, and that is the finding.
    except Exception as error:
        return Check(name, "FAILED", describe(error), advice)


def describe(error: Exception) -> str:
    """An exception as one line: its type and the last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(lines) > 1:
        text += f" ... {lines[-1]}"
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
