"""What the process is doing and whether it moves: a phase's name and a count of beats, for the watchdog. No imports.

`failures.phase` enters and leaves phases. Loops that may run long inside one (decoding, packing, microbatches, reward
calls) call `beat`. It costs nothing, so the deeper layers call it as they would a logger.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_phases: list[str] = []
_beats = [0]


def beat() -> None:
    """Something moved."""
    _beats[0] += 1


def beats() -> int:
    """How many beats there were; the same number twice means that nothing moved in between."""
    return _beats[0]


def current_phase() -> str | None:
    """The innermost phase that is entered."""
    return _phases[-1] if _phases else None


@contextmanager
def entered(phase: str) -> Iterator[None]:
    """Inside the context `current_phase` is `phase`; beats at both ends."""
    _phases.append(phase)
    beat()
    try:
        yield
    finally:
        _phases.pop()
        beat()
