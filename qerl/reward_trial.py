"""Reward functions are tried on a gold answer before the run, so one that can never work is found at once.

During a run a failing reward costs its sample and the run goes on. A function that fails on everything would leave no
sample at all, step after step; so each is called first with the answer of a problem as the completion (an empty text
where the data has no answers). It need not like it, but has to return numbers. Only being slow is forgiven: a first
call may load what later ones have.
"""

import os
import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qerl.config import RewardConfig
from qerl.errors import UserError
from qerl.rollout import reward_call
from qerl.tasks.calls import RewardFailure
from qerl.tasks.pool import RewardPool
from qerl.tasks.prompts import EncodedProblems
from qerl.tasks.rewards import RewardSpec

NUM_SAMPLES = 2
"""A group of one would not show a wrong number of values."""


def try_rewards(
    problems: EncodedProblems,
    rewards: tuple[RewardSpec, ...],
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
) -> tuple[str, ...]:
    """Call every function once in a worker; returns what each made of the gold answer, for people.

    Raises UserError naming function, kind and message when one cannot be loaded, fails, or returns the wrong thing;
    what it printed stays in a temporary file, which the message names.
    """
    text = problems.problems[0].answer or ""
    # A completion is never without tokens: an empty text still has its end token.
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    call = reward_call(problems, 0, [text] * NUM_SAMPLES, [token_ids] * NUM_SAMPLES)
    descriptor, name = tempfile.mkstemp(prefix="qerl-rewards-", suffix=".log")
    os.close(descriptor)
    log = Path(name)
    with RewardPool(rewards, 1, config.reward_timeout_s, log, config.reward_memory_gib) as pool:
        (result,) = pool.score([call])
    notes = []
    for failure in result.failures[::NUM_SAMPLES]:
        if failure.kind != "timeout":
            raise UserError(_explain(failure, text, log))
        notes.append(f"reward {failure.function} was slow when it was tried: {failure.message}")
    log.unlink()
    values = [f"{spec.name} {_in_words(result.values[spec.name][0])}" for spec in rewards]
    notes.append(f"rewards of {_describe(text)}: {', '.join(values)}")
    return tuple(notes)


def _explain(failure: RewardFailure, text: str, log: Path) -> str:
    printed = f" (what it printed: {log})"
    if not log.stat().st_size:
        log.unlink()
        printed = ""
    return (
        f"reward {failure.function} does not work: tried on {_describe(text)}, {failure.kind}: "
        f"{failure.message}{printed}. It has to return one number, or None, for any text"
    )


def _describe(text: str) -> str:
    return f"a gold answer as the completion ({text!r:.40})" if text else "an empty completion"


def _in_words(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
