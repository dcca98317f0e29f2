"""GSM8K: grade-school word problems with a number for an answer (Cobbe et al., arXiv 2110.14168).

The data's answer is a worked solution that ends in `#### NUMBER`. The number is the gold answer, graded against the
last number of a completion: models rarely write the `####` at first, and the format is learnt on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.tasks.data import load_dataset_task
from qerl.tasks.problems import Task

if TYPE_CHECKING:
    from qerl.config import TaskConfig

HUB_ID = "openai/gsm8k"
SYSTEM_PROMPT = (
    "Solve the problem. Think step by step, "
    "then give the final answer on the last line as #### NUMBER."
)


def load_gsm8k(config: TaskConfig) -> Task:
    """GSM8K from the hub, or from task.path: a folder with train.jsonl and test.jsonl, or one file."""
    if config.path is None:
        hub = {"path": HUB_ID, "config": config.config or "main"}
        config = config.model_copy(update=hub)
    return load_dataset_task(
        config,
        name="gsm8k",
        gold=gold_answer,
        reward_funcs=("last_number",),
        system_prompt=SYSTEM_PROMPT,
    )


def gold_answer(solution: str, where: str) -> str:
    """What follows the last `####`, without thousands separators. UserError if there is no such mark."""
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise UserError(
            f"{where}: the answer has no '#### NUMBER'; for other data use task dataset"
        )
    return answer.strip().replace(",", "")
