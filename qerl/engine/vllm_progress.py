"""What vLLM takes for a progress bar: it shows nothing, and tells the watchdog that completions come in."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from qerl.heartbeat import beat


class SilentProgress:
    """As much of tqdm as vLLM uses: made with an iterable to walk, or with a total to count up to."""

    def __init__(self, iterable: Iterable[Any] = (), **_: Any):
        self.iterable = iterable
        self.n = 0
        self.postfix = ""
        self.started = time.perf_counter()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    @property
    def format_dict(self) -> dict[str, float]:
        """vLLM divides by the elapsed time."""
        return {"elapsed": max(time.perf_counter() - self.started, 1e-9)}

    def update(self, count: int) -> None:
        """A request is finished."""
        self.n += count
        beat()

    def refresh(self) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is held."""
