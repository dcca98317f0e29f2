"""What of a run is saved, when, and how it is put back; also by the watchdog, while the loop hangs.

The state of a run is the adapter, the optimizer and the few numbers in `_loop_state`. Saving twice the same step writes
once. The best checkpoint so far is read from the manifests, so a resumed run knows it too.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.checkpoint import (
    CheckpointInfo,
    find_best_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from qerl.data_order import Cursor
from qerl.errors import RunError, UserError
from qerl.heartbeat import beats
from qerl.manifest import Score
from qerl.metrics import read_metrics
from qerl.optim import load_optimizer_tensors, optimizer_tensors

if TYPE_CHECKING:
    from qerl.run import Run

CONSISTENT_PHASES = ("sync", "rollout", "reward", "eval")
"""Phases in which adapter, optimizer and loop state are those of the steps done: nothing writes them."""


def save(run: "Run", step: int) -> None:
    """Checkpoint after `step` steps. Raises RunError if it cannot be written."""
    _save(run, step, run.policy.save_adapter)


def _save(run: "Run", step: int, write_adapter: Callable[[Path], None]) -> None:
    parameters = run.policy.trainable_parameters()
    with run.saving:
        tensors, optimizer_state = optimizer_tensors(
            run.optimizer, [name for name, _ in parameters]
        )
        save_checkpoint(
            run.run_dir,
            step,
            write_adapter=write_adapter,
            adapter_bytes=sum(p.numel() * p.element_size() for _, p in parameters),
            optimizer_tensors=tensors,
            state={"step": step, "optimizer": optimizer_state, **_loop_state(run)},
            save_total_limit=run.config.log.save_total_limit,
            score=score_at(run, step),
        )


def restore(run: "Run", info: CheckpointInfo) -> None:
    """Put adapter, optimizer and the loop's own state back as they were."""
    checkpoint = load_checkpoint(info)
    state = checkpoint.state
    run.policy.load_adapter(checkpoint.adapter_dir)
    names = [name for name, _ in run.policy.trainable_parameters()]
    try:
        load_optimizer_tensors(
            run.optimizer, names, checkpoint.optimizer_tensors, state["optimizer"]
        )
        cursor = state["cursor"]
        run.cursor = None if cursor is None else Cursor(**cursor)
        run.skipped_in_a_row = state["skipped_in_a_row"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{info.path} does not fit this version of qerl ({type(error).__name__}: {error}); start afresh with "
            f"another --run-dir and --init-adapter {info.path}"
        ) from error


def _loop_state(run: "Run") -> dict[str, Any]:
    """What a step takes over from the one before, besides the weights."""
    return {
        "skipped_in_a_row": run.skipped_in_a_row,
        "cursor": None if run.cursor is None else asdict(run.cursor),
    }


def score_at(run: "Run", step: int) -> Score | None:
    """How good the policy after `step` steps is, by `log.save_best`; None if that is not known of this step.

    accuracy: the evaluation at this step. reward: the mean over the last `save_steps` steps, for one step's says little.
    """
    metric = run.config.log.save_best
    if metric == "off":
        return None
    first = step if metric == "accuracy" else step - run.config.log.save_steps + 1
    key = "eval/accuracy" if metric == "accuracy" else "train/reward"
    values = [line.get(key) for line in read_metrics(run.run_dir) if first <= line["step"] <= step]
    known = [value for value in values if value is not None]
    return Score(metric, math.fsum(known) / len(known)) if known else None


def is_new_best(run: "Run", step: int) -> bool:
    """True after an evaluation that was better than that of every checkpoint."""
    if run.config.log.save_best != "accuracy":
        return False
    score = score_at(run, step)
    if score is None:
        return False
    best = find_best_checkpoint(run.run_dir, score.metric)
    return best is None or score.value > best[1]


def rescue(run: "Run", phase: str) -> str:
    """For the watchdog: save, unless the loop may be in the middle of changing the state. Says what was done.

    Should the loop move again while the adapter is written, the file may be of two states and is thrown away.
    """
    if phase not in CONSISTENT_PHASES:
        return f"nothing more was saved, for in phase {phase} the weights may be half changed"
    before = beats()

    def write(folder: Path) -> None:
        run.policy.save_adapter(folder)
        if beats() != before:
            raise OSError("the run moved again")

    try:
        _save(run, run.steps_done, write)
    except RunError as error:
        return f"saving failed: {error.message}"
    return f"checkpoint {run.steps_done} is saved"
