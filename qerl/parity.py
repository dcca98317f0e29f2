"""Do trainer and engine compute the same policy? Asked when a run starts, and on demand: `python -m qerl.parity`.

Completions are sampled without noise and scored by the trainer, with the adapter zero and not, at temperatures 1 and 0.7.
The mean of exp |log p_trainer - log p_rollout| over the sampled tokens says how far apart they are: 1 for equal policies,
1.01 for bf16 kernels that differ in the order of their sums. Above 1.02 is worth a warning, above 1.05 the run would learn
from wrong probabilities and is stopped. Which of the four is off says where to look:

    zero adapter, T = 1      base, kernels, norms, head, or an old adapter in the engine: everything is off then
    only with an adapter     its scaling, its layout inside the engine, or that it is not updated
    only at T = 0.7          the temperature: both sides have to divide the logits by it

The non-zero adapter is random, and as large as it takes to change the log-probabilities of what the zero one sampled by
a third of a nat, so that a factor that is missing or there twice shows. Afterwards the adapter is as it was, bit for bit.

    python -m qerl.parity --model qwen2.5-7b
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl.errors import RunError
from qerl.settings.cli import parse_config, run_main

if TYPE_CHECKING:
    from qerl.engine.base import Engine
    from qerl.model.policy import Policy
    from qerl.types import GenerationRequest, Rollout

WARN, STOP = 1.02, 1.05
TEMPERATURES = (1.0, 0.7)
NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 4, 4, 24
WANTED_CHANGE = 0.3
"""Nats by which the random adapter changes a token's log-probability, on average."""
FIRST_SCALE, MAX_DOUBLINGS = 1e-3, 14


@dataclass(frozen=True)
class Parity:
    """What was found: mean exp |delta log p| of each case."""

    ratios: dict[tuple[bool, float], float]
    """By (adapter filled, temperature)"""

    @property
    def worst(self) -> float:
        return max(self.ratios.values())

    def as_json(self) -> dict[str, float]:
        """For the run's folder."""
        return {
            f"{'random' if filled else 'zero'}_adapter_t{temperature:g}": ratio
            for (filled, temperature), ratio in self.ratios.items()
        }

    def suspect(self, limit: float) -> str:
        """Which side is wrong, judging by the cases above `limit`."""
        bad = {case for case, ratio in self.ratios.items() if ratio > limit}
        if (False, 1.0) in bad:
            return (
                "already without an adapter: suspect the base, a kernel, the norms or the head, "
                "or an old adapter in the engine"
            )
        if (True, 1.0) in bad:
            return "only with an adapter: suspect its scaling (alpha / r), or that it is not copied to the engine"
        return "only at a temperature other than 1: suspect how the logits are divided by it"

    def line(self) -> str:
        """One line for the terminal."""
        cases = ", ".join(
            f"{'random' if filled else 'zero'} adapter T={temperature:g} {ratio:.4f}"
            for (filled, temperature), ratio in self.ratios.items()
        )
        return f"parity of trainer and engine (1 is equal): {cases}"


def check_parity(
    policy: "Policy", engine: "Engine", prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> tuple[Parity, str | None]:
    """Compare the two on completions of these prompts (tokens), of at most `max_tokens` tokens.

    The engine is left in need of a `sync`.

    Returns what was found and a warning, if one is due. Raises RunError above `STOP`.
    """
    requests = _requests(prompts)
    num_tokens = min(NUM_TOKENS, max_tokens)
    ratios: dict[tuple[bool, float], float] = {}
    with _borrowed_adapter(policy) as adapter:
        adapter.clear()
        sampled = _measure(policy, engine, requests, num_tokens, False, ratios)
        adapter.fill_until_it_matters(sampled)
        _measure(policy, engine, requests, num_tokens, True, ratios)
    parity = Parity(ratios)
    problem = f"mean exp |log p trainer - log p engine| is {parity.worst:.3f}"
    if parity.worst > STOP:
        raise RunError("parity", f"{problem}, above {STOP}, {parity.suspect(STOP)}")
    if parity.worst > WARN:
        return parity, f"{problem}, above {WARN}, {parity.suspect(WARN)}"
    return parity, None


def _requests(prompts: Sequence[tuple[int, ...]]) -> "list[GenerationRequest]":
    from qerl.seeding import derive_seed
    from qerl.types import GenerationRequest

    return [
        GenerationRequest(
            str(p), prompt, tuple(derive_seed("parity", p, i) for i in range(NUM_SAMPLES))
        )
        for p, prompt in enumerate(prompts)
    ]


def _measure(
    policy: "Policy",
    engine: "Engine",
    requests: "list[GenerationRequest]",
    num_tokens: int,
    filled: bool,
    ratios: dict[tuple[bool, float], float],
) -> "list[Rollout]":
    """Fill in the ratio of each temperature; returns what was sampled at the first."""
    from qerl.model.scoring import score
    from qerl.types import Sampling

    first: list[Rollout] = []
    for temperature in TEMPERATURES:
        engine.sync(0, None)
        groups = engine.generate(requests, Sampling(temperature, num_tokens, ()))
        rollouts = [rollout for group in groups for rollout in group]
        first = first or rollouts
        scores = score(policy, rollouts, temperature)
        ratios[filled, temperature] = (scores.logprobs - scores.recorded).abs().exp().mean().item()
    return first


class _Adapter:
    """The policy's adapter matrices while they are borrowed."""

    def __init__(self, policy: "Policy"):
        self.policy = policy
        self.matrices = dict(policy.trainable_parameters())

    def clear(self) -> None:
        """Random A as it is initialised, B = 0: the adapter does nothing."""
        import torch

        from qerl.seeding import derive_seed

        with torch.no_grad():
            for name, matrix in self.matrices.items():
                if "lora_B" in name:
                    matrix.zero_()
                else:
                    generator = torch.Generator(matrix.device)
                    generator.manual_seed(derive_seed("parity", name))
                    matrix.normal_(0, (3 * matrix.shape[1]) ** -0.5, generator=generator)

    def fill_until_it_matters(self, rollouts: "list[Rollout]") -> None:
        """Random B, doubled until the log-probs of `rollouts` change enough. Raises RunError if they never do."""
        import torch

        from qerl.model.scoring import score
        from qerl.seeding import derive_seed

        clean = score(self.policy, rollouts, 1.0).logprobs
        outer = {name: matrix for name, matrix in self.matrices.items() if "lora_B" in name}
        with torch.no_grad():
            for name, matrix in outer.items():
                generator = torch.Generator(matrix.device)
                generator.manual_seed(derive_seed("parity", name))
                matrix.normal_(0, FIRST_SCALE, generator=generator)
            for _ in range(MAX_DOUBLINGS):
                changed = score(self.policy, rollouts, 1.0).logprobs
                if (changed - clean).abs().mean().item() >= WANTED_CHANGE:
                    return
                for matrix in outer.values():
                    matrix.mul_(2)
        raise RunError(
            "parity",
            "a random adapter does not change what the trainer computes: it is not applied",
        )


@contextmanager
def _borrowed_adapter(policy: "Policy") -> "Iterator[_Adapter]":
    """The adapter to play with; what was in it comes back bit for bit."""
    import torch

    adapter = _Adapter(policy)
    kept = {name: matrix.detach().clone() for name, matrix in adapter.matrices.items()}
    try:
        yield adapter
    finally:
        with torch.no_grad():
            for name, matrix in adapter.matrices.items():
                matrix.copy_(kept[name])


def parity_prompts(prompt_ids: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A few prompts of the task, the shortest: the comparison does not depend on what they say."""
    return sorted(dict.fromkeys(prompt_ids), key=len)[:NUM_PROMPTS]


def main(argv: list[str] | None = None) -> int:
    """Build policy and engine as a run would, compare, print. Exit code 1 when they disagree."""
    config, _ = parse_config(
        argv,
        prog="python -m qerl.parity",
        description="Compare the log-probabilities of trainer and engine.",
    )
    from qerl.build import build_data, load_tokenizer, open_inference
    from qerl.metrics import say
    from qerl.model.source import resolve_model

    source = resolve_model(config.model, config.revision)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    data = build_data(config, tokenizer)
    inference = open_inference(config, source, tokenizer)
    prompts = parity_prompts(data.train.prompt_ids)
    try:
        parity, warning = check_parity(
            inference.policy, inference.engine, prompts, config.rollout.max_completion_length
        )
    finally:
        inference.engine.close()
    say(parity.line())
    if warning:
        say(f"warning: {warning}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
