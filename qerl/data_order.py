"""Which problems come next: a fresh permutation each epoch, addressed by (seed, epoch), never stored.

A place in the order is a `Cursor`. Without resampling it follows from the step; with it, steps use up unequal numbers
of problems, and the cursor is stored in the checkpoint.
"""

from dataclasses import dataclass

import torch

from qerl.seeding import derive_seed


@dataclass(frozen=True)
class Cursor:
    """The next problem to be taken."""

    epoch: int
    position: int


def steps_per_epoch(num_problems: int, prompts_per_step: int) -> int:
    """Whole steps in one pass; the rest of a permutation waits for the next epoch's."""
    return num_problems // prompts_per_step


def cursor_of_step(step: int, num_problems: int, prompts_per_step: int) -> Cursor:
    """Where a step begins when every step takes `prompts_per_step` problems."""
    epoch, index = divmod(step, steps_per_epoch(num_problems, prompts_per_step))
    return Cursor(epoch, index * prompts_per_step)


def take(cursor: Cursor, count: int, num_problems: int, seed: int) -> tuple[list[int], Cursor]:
    """Indices of the next `count` problems (at most all), and the place after them.

    Never across the end of an epoch, so that no problem is taken twice: if fewer are left, the next epoch begins.
    """
    if cursor.position + count > num_problems:
        cursor = Cursor(cursor.epoch + 1, 0)
    generator = torch.Generator().manual_seed(derive_seed("order", seed, cursor.epoch))
    order = torch.randperm(num_problems, generator=generator).tolist()
    end = cursor.position + count
    return order[cursor.position : end], Cursor(cursor.epoch, end)
