"""The arms of `qerl evaluate`: the base, and an adapter on it, which first has to prove that it changes something."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.build import Data, Inference
from qerl.config import Config
from qerl.engine.base import Engine
from qerl.errors import UserError
from qerl.evaluation.policy import Evaluation, correctness_reward, evaluate_policy
from qerl.metrics import format_duration, say
from qerl.model.policy import Policy
from qerl.rollout import generate
from qerl.tasks.pool import RewardPool
from qerl.tasks.prompts import EncodedProblems
from qerl.types import Rollout, Sampling

CALLS_OF_THE_ENGINE = 20
"""At most about so many progress lines an arm."""
PROBE_PROBLEMS = 4
PROBE_TOKENS = 16


def probe(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: EncodedProblems,
    sampling: Sampling,
    version: int,
) -> list[Rollout]:
    """A few short completions with fixed seeds, whose tokens and log-probs say whether the weights differ."""
    engine.sync(version, None)
    short = Sampling(
        temperature=sampling.temperature or 1.0,  # greedy log-probs are 0 whatever the weights
        max_completion_length=min(PROBE_TOKENS, sampling.max_completion_length),
        eos_token_ids=sampling.eos_token_ids,
    )
    indices = range(min(PROBE_PROBLEMS, len(problems.problems)))
    batch = generate(engine, tokenizer, problems, indices, short, 1, ("probe",))
    return [rollout for group in batch.rollouts for rollout in group]


@dataclass(frozen=True)
class ProbeDifference:
    """How two probes of the same prompts and seeds differ."""

    num_diverged: int
    """Completions whose tokens differ"""
    max_logprob_difference: float
    """Largest |log p - log p'| of tokens before the first that differs"""

    @classmethod
    def between(cls, before: Sequence[Rollout], after: Sequence[Rollout]) -> "ProbeDifference":
        diverged, largest = 0, 0.0
        for one, other in zip(before, after, strict=True):
            diverged += one.completion_ids != other.completion_ids
            for token, token_2, logprob, logprob_2 in zip(
                one.completion_ids, other.completion_ids, one.logprobs, other.logprobs, strict=False
            ):
                if token != token_2:
                    break
                largest = max(largest, abs(logprob - logprob_2))
        return cls(diverged, largest)

    def exceeds(self, noise: "ProbeDifference") -> bool:
        """True if this is more than `noise`, what the same weights differ by when they are asked twice."""
        return (
            self.num_diverged > noise.num_diverged
            or self.max_logprob_difference > noise.max_logprob_difference
        )


def evaluate_arm(
    arm: str,
    config: Config,
    data: Data,
    inference: Inference,
    pool: RewardPool,
    k: int,
    *,
    version: int,
) -> Evaluation:
    assert data.test is not None
    num_problems = len(data.test.problems)
    at_once = max(-(-num_problems // CALLS_OF_THE_ENGINE), config.rollout.max_batch_size // k, 1)
    return evaluate_policy(
        inference.engine,
        inference.tokenizer,
        data.test,
        pool,
        data.rewards,
        inference.sampling,
        correctness=correctness_reward(data.rewards, data.task),
        num_generations=k,
        seed=config.seed,
        version=version,
        problems_at_once=at_once,
        on_progress=_progress(arm, num_problems),
    )


def _progress(arm: str, num_problems: int) -> Callable[[int, float], None]:
    started = time.monotonic()

    def show(done: int, accuracy: float) -> None:
        elapsed = time.monotonic() - started
        left = format_duration(elapsed / done * (num_problems - done))
        say(f"{arm:<8}{done:>5}/{num_problems} problems  accuracy {accuracy:.3f}  {left} left")

    return show


def evaluate_both(
    config: Config,
    data: Data,
    inference: Inference,
    pool: RewardPool,
    k: int,
    adapter: Path,
) -> tuple[dict[str, Evaluation], ProbeDifference]:
    """Base, then adapter. Raises UserError, before either is evaluated, if the adapter changes nothing."""
    policy = inference.policy
    clean = _parameters(policy)
    proof = _prove_a_difference(data, inference, adapter)
    trained = _parameters(policy)
    evaluations = {}
    for version, (arm, state) in enumerate({"base": clean, "adapter": trained}.items(), start=3):
        _set_parameters(policy, state)
        evaluations[arm] = evaluate_arm(arm, config, data, inference, pool, k, version=version)
    if not (changed := _num_changed(evaluations)):
        raise UserError(
            f"{adapter} changes log-probabilities by up to {proof.max_logprob_difference:.1e} and not one of "
            f"{len(evaluations['base'].rows)} completions: there is nothing to report. Train longer, or ask with --k "
            "and --eval-size for more completions"
        )
    say(f"the adapter changes {changed} of {len(evaluations['base'].rows)} completions")
    return evaluations, proof


def _prove_a_difference(data: Data, inference: Inference, adapter: Path) -> ProbeDifference:
    """Load the adapter and show, through the engine, that log-probs or tokens differ by more than asking twice does."""
    assert data.test is not None
    ask = (inference.engine, inference.tokenizer, data.test, inference.sampling)
    before, again = probe(*ask, version=0), probe(*ask, version=1)
    inference.policy.load_adapter(adapter)
    difference = ProbeDifference.between(before, probe(*ask, version=2))
    if difference.exceeds(ProbeDifference.between(before, again)):
        return difference
    parameters = _parameters(inference.policy)
    untrained = not any(value.any() for name, value in parameters.items() if "lora_B" in name)
    reason = (
        "its B matrices are all zero, so it was never trained (no group had different rewards, or the learning rate was 0)"
        if untrained
        else "it has learnt too little to see, or the engine does not apply it"
    )
    raise UserError(f"{adapter} changes no output, so there is nothing to report: {reason}")


def _parameters(policy: Policy) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in policy.trainable_parameters()}


def _set_parameters(policy: Policy, state: dict[str, Tensor]) -> None:
    for name, value in policy.trainable_parameters():
        value.data.copy_(state[name])


def _num_changed(evaluations: dict[str, Evaluation]) -> int:
    rows = zip(evaluations["base"].rows, evaluations["adapter"].rows, strict=True)
    return sum(base["completion"] != trained["completion"] for base, trained in rows)
