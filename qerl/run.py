"""A training run: everything the loop uses, built once, and what it does to its folder.

`open_training_run` builds in the order of cost: settings, model files, data, plan, folder; only then weights. So bad
input is found before anything expensive happens and before anything is written.
"""

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from qerl.build import (
    Data,
    build_data,
    build_engine,
    build_policy,
    build_sampling,
    eos_token_ids,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    run_dir_of,
)
from qerl.checkpoint import load_checkpoint, save_checkpoint
from qerl.config import Config
from qerl.engine.base import Engine
from qerl.evaluate import Evaluation
from qerl.memory import memory_metrics
from qerl.metrics import MetricsWriter, format_completions, progress_line, say
from qerl.model.policy import Policy
from qerl.model.source import resolve_model
from qerl.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from qerl.plan import format_plan, make_plan
from qerl.run_folder import open_run
from qerl.seeding import derive_seed
from qerl.tasks.pool import RewardPool
from qerl.types import Sampling

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass
class Run:
    """State: the policy and its optimizer, the open folder, and whether someone asked to stop."""

    config: Config
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    data: Data
    sampling: Sampling
    policy: Policy
    engine: Engine
    optimizer: Optimizer
    pool: RewardPool
    writer: MetricsWriter
    num_steps: int
    first_step: int
    stop_signal: int | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def stop_requested(self) -> bool:
        """True once Ctrl-C or SIGTERM has come; the loop then saves and returns."""
        return self.stop_signal is not None

    @property
    def exit_code(self) -> int:
        """0, or the shell's code for the signal that ended the run."""
        return 0 if self.stop_signal is None else EXIT_CODES[self.stop_signal]

    def problems_of(self, step: int) -> list[int]:
        """Indices of a step's problems."""
        return problems_of_step(
            step,
            len(self.data.train.problems),
            self.config.rollout.prompts_per_step,
            self.config.seed,
        )

    def is_due(self, step: int, every: int) -> bool:
        """True at every `every`-th step; never for 0."""
        return every > 0 and step % every == 0

    def log_step(self, step: int, metrics: dict[str, float], num_failures: int) -> None:
        """Write a step's metrics and, where due, the progress line."""
        metrics = {
            **metrics,
            "rewards/failures": num_failures,
            **memory_metrics(self.policy.device),
        }
        self.writer.log(step, {f"train/{key}": value for key, value in metrics.items()})
        if self.is_due(step, self.config.log.logging_steps) or step == self.num_steps:
            elapsed = time.monotonic() - self.started
            say(progress_line(step, self.num_steps, metrics, elapsed / (step - self.first_step)))

    def log_evaluation(self, step: int, evaluation: Evaluation, times: dict[str, float]) -> None:
        """Write an evaluation's metrics and completions, and say the accuracy."""
        metrics = {**evaluation.metrics, **times}
        self.writer.log(step, {f"eval/{key}": value for key, value in metrics.items()})
        self.writer.write_completions(step, evaluation.rows, "eval")
        say(
            f"eval after {step} steps: accuracy {evaluation.accuracy:.3f} on "
            f"{len(evaluation.rows)} held-out completions"
        )

    def save(self, step: int) -> None:
        """Checkpoint after `step` updates; a whole one of that step is left as it is."""
        names = [name for name, _ in self.policy.trainable_parameters()]
        tensors, optimizer_state = optimizer_tensors(self.optimizer, names)
        adapter_bytes = sum(p.numel() * p.element_size() for _, p in self.policy.trainable_parameters())
        save_checkpoint(
            self.run_dir,
            step,
            write_adapter=self.policy.save_adapter,
            adapter_bytes=adapter_bytes,
            optimizer_tensors=tensors,
            state={"step": step, "optimizer": optimizer_state},
            save_total_limit=self.config.log.save_total_limit,
        )

    def restore(self, checkpoint_info: object) -> None:
        """Adapter and optimizer as they were."""
        checkpoint = load_checkpoint(checkpoint_info)
        self.policy.load_adapter(checkpoint.adapter_dir)
        names = [name for name, _ in self.policy.trainable_parameters()]
        load_optimizer_tensors(
            self.optimizer, names, checkpoint.optimizer_tensors, checkpoint.state["optimizer"]
        )


def steps_per_epoch(num_problems: int, prompts_per_step: int) -> int:
    """Whole steps in one pass; the rest of a permutation waits for the next epoch's."""
    return num_problems // prompts_per_step


def problems_of_step(step: int, num_problems: int, prompts_per_step: int, seed: int) -> list[int]:
    """Indices of a step's problems: a fresh permutation each epoch, addressed by (seed, epoch), never stored."""
    epoch, position = divmod(step, steps_per_epoch(num_problems, prompts_per_step))
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    order = torch.randperm(num_problems, generator=generator).tolist()
    return order[position * prompts_per_step : (position + 1) * prompts_per_step]
