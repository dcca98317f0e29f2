"""From problems to scored rollouts: the part of a step that training and evaluation share."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qerl.engine.base import Engine
from qerl.seeding import derive_seed
from qerl.tasks.pool import RewardCall, RewardPool, RewardResult
from qerl.tasks.prompts import EncodedProblems
from qerl.types import GenerationRequest, Rollout, Sampling


@dataclass(frozen=True)
class Batch:
    """Encoded problems, their rollouts and texts; all lists are [P] or [P][G]."""

    encoded: EncodedProblems
    indices: tuple[int, ...]
    """Which of the encoded problems these are."""
    rollouts: list[list[Rollout]]
    texts: list[list[str]]


def generate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    encoded: EncodedProblems,
    indices: Sequence[int],
    sampling: Sampling,
    num_generations: int,
    seed_address: tuple[str | int, ...],
) -> Batch:
    """Sample `num_generations` completions of each chosen problem.

    A sample's seed is a hash of (seed_address, problem id, sample index).
    """
    requests = []
    for index in indices:
        problem = encoded.problems[index]
        seeds = tuple(
            derive_seed(*seed_address, problem.id, sample) for sample in range(num_generations)
        )
        requests.append(GenerationRequest(problem.id, tuple(encoded.prompt_ids[index]), seeds))
    rollouts = engine.generate(requests, sampling)
    texts = [
        [str(tokenizer.decode(list(r.completion_ids), skip_special_tokens=True)) for r in group]
        for group in rollouts
    ]
    return Batch(encoded, tuple(indices), rollouts, texts)


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Batches of the same encoded problems, one after the other."""
    return Batch(
        encoded=batches[0].encoded,
        indices=tuple(index for batch in batches for index in batch.indices),
        rollouts=[group for batch in batches for group in batch.rollouts],
        texts=[group for batch in batches for group in batch.texts],
    )


def score(pool: RewardPool, batch: Batch) -> list[RewardResult]:
    """Run every reward function on every group of the batch, in worker processes."""
    groups = zip(batch.indices, batch.rollouts, batch.texts, strict=True)
    return pool.score(
        [
            reward_call(
                batch.encoded,
                index,
                texts,
                [list(r.completion_ids) for r in group],
                step=group[0].version,
            )
            for index, group, texts in groups
        ]
    )


def reward_call(
    encoded: EncodedProblems,
    index: int,
    texts: Sequence[str],
    completion_ids: list[list[int]],
    step: int = 0,
) -> RewardCall:
    """What reward functions see of completions of problem `index`."""
    problem = encoded.problems[index]
    n = len(texts)
    if encoded.conversational[index]:
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    else:
        completions = list(texts)
    return RewardCall(
        problem_id=problem.id,
        prompts=[problem.prompt] * n,
        completions=completions,
        completion_ids=completion_ids,
        columns={
            "answer": [problem.answer] * n,
            **{name: [value] * n for name, value in problem.columns.items()},
        },
        step=step,
    )


def completion_rows(
    batch: Batch,
    tokenizer: PreTrainedTokenizerBase,
    results: Sequence[RewardResult],
    rewards: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]] | None,
) -> list[dict[str, object]]:
    """One row a completion for the completions table: what the model saw, what it said, what it was worth."""
    rows = []
    for p, group in enumerate(batch.rollouts):
        for g, rollout in enumerate(group):
            rows.append(
                {
                    "problem_id": rollout.problem_id,
                    "sample_index": rollout.sample_index,
                    "prompt": tokenizer.decode(list(rollout.prompt_ids)),
                    "completion": batch.texts[p][g],
                    "answer": batch.encoded.problems[batch.indices[p]].answer,
                    **{f"reward/{name}": values[g] for name, values in results[p].values.items()},
                    **{f"extra/{name}": texts[g] for name, texts in results[p].extra.items()},
                    "reward": rewards[p][g],
                    "advantage": None if advantages is None else advantages[p][g],
                    "num_tokens": len(rollout.completion_ids),
                    "finish_reason": rollout.finish_reason,
                    "version": rollout.version,
                }
            )
    return rows
