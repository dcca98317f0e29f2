"""What the training loop asks of an engine that samples completions."""

from collections.abc import Sequence
from typing import Protocol

from qerl.types import GenerationRequest, NoiseDraw, Rollout, Sampling


class Engine(Protocol):
    """Samples completions from the policy's current weights.

    Log-probabilities are those of the distribution that tokens were really drawn from. The weights, the noise and the
    version that rollouts carry change only in `sync`.
    """

    def sync(self, version: int, noise: NoiseDraw | None) -> None:
        """Take over the adapter as it is now, draw noise afresh (None: clean), forget what was cached."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling
    ) -> list[list[Rollout]]:
        """One list a request, one rollout a seed, in order."""
        ...

    def release(self) -> None:
        """Give back, until the next `sync`, what only sampling needs, where that was planned."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...
