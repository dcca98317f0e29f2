"""A training run: everything the loop uses, built once, and what it does to its folder.

`prepare` does what is cheap: settings, model files, data, plan. `open_run_of` then opens the folder and builds what is
expensive: the packed base, the policy, the engine. So bad input is found before anything is written or computed.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from types import FrameType

import torch
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from qerl import saving
from qerl.build import (
    Data,
    build_data,
    build_engine,
    build_policy,
    build_sampling,
    check_model,
    context_limit,
    eos_token_ids,
    load_base,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    run_dir_of,
)
from qerl.config import Config
from qerl.data_order import Cursor, cursor_of_step, steps_per_epoch
from qerl.determinism import needs_determinism, prepare_determinism, torch_determinism
from qerl.diagnosis.findings import say_if_flat
from qerl.engine.base import Engine
from qerl.engine.choice import EngineChoice, choose_engine
from qerl.evaluation.policy import Evaluation
from qerl.failures import failure_log, phase
from qerl.identity import identity_of
from qerl.memory import memory_metrics
from qerl.metrics import MetricsWriter, progress_line, read_metrics, say
from qerl.model.policy import Policy
from qerl.model.source import ModelSource, resolve_model
from qerl.optim import make_optimizer
from qerl.planning.footprint import recomputed_layers
from qerl.planning.memory_plan import MemoryPlan, budget_of, make_memory_plan
from qerl.planning.record import PlanRecord
from qerl.planning.sizes import Place
from qerl.quant.base_weights import BaseWeights
from qerl.quant.layout import Layout
from qerl.reward_trial import try_rewards
from qerl.run_folder import RunState, open_run
from qerl.start_checks import cap_memory, check_start
from qerl.tasks.board import describe_failure
from qerl.tasks.calls import RewardFailure
from qerl.tasks.pool import RewardPool, open_pool
from qerl.types import Sampling
from qerl.watchdog import watching

EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}


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
    memory: MemoryPlan
    record: PlanRecord
    num_steps: int
    first_step: int
    cursor: Cursor | None = None
    """Place in the data after the last step, while steps use up unequal numbers of problems; None: it follows from the step"""
    skipped_in_a_row: int = 0
    """How many of the last steps had an update skipped"""
    steps_done: int = 0
    """Steps whose metrics are written"""
    saving: Lock = field(default_factory=Lock)
    """Held while a checkpoint is written: the watchdog may write one too"""
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

    def cursor_at(self, step: int) -> Cursor:
        """Where a step's problems begin."""
        if self.cursor is not None:
            return self.cursor
        per_step = self.config.rollout.prompts_per_step
        return cursor_of_step(step, len(self.data.train.problems), per_step)

    def is_due(self, step: int, every: int) -> bool:
        """True at every `every`-th step; never for 0."""
        return every > 0 and step % every == 0

    def log_step(
        self, step: int, metrics: dict[str, float], failures: Sequence[RewardFailure]
    ) -> None:
        """Write a step's metrics and, where due, the progress line and what is wrong with the rewards."""
        memory = memory_metrics(self.policy.device)
        metrics = {
            **metrics,
            "rewards/failures": len(failures),
            **memory,
            **self.record.measured(memory["memory/peak_gib"]),
        }
        self.writer.log(step, {f"train/{key}": value for key, value in metrics.items()})
        self.steps_done = step
        if self.is_due(step, self.config.log.logging_steps) or step == self.num_steps:
            elapsed = time.monotonic() - self.started
            say(progress_line(step, self.num_steps, metrics, elapsed / (step - self.first_step)))
            if failures:
                say(f"warning: {len(failures)} reward values lost; {describe_failure(failures[0])}")
        if self.is_due(step, self.config.reward.flat_reward_steps):
            say_if_flat(self.run_dir, self.config)

    def log_evaluation(self, step: int, evaluation: Evaluation, times: dict[str, float]) -> None:
        """Write an evaluation's metrics and completions, and say the accuracy."""
        metrics = {**evaluation.metrics, **times}
        self.writer.log(step, {f"eval/{key}": value for key, value in metrics.items()})
        self.writer.write_completions(step, evaluation.rows, "eval")
        say(
            f"eval after {step} steps: accuracy {evaluation.accuracy:.3f} on "
            f"{len(evaluation.rows)} held-out completions"
        )

    def owes_evaluation(self) -> bool:
        """True at the start of a run, and where one was ended between a step and its evaluation."""
        step = self.first_step
        due = step in (0, self.num_steps) or self.is_due(step, self.config.log.eval_steps)
        lines = read_metrics(self.run_dir) if due else []
        return due and not any(x["step"] == step and "eval/accuracy" in x for x in lines)

    def should_save(self, step: int) -> bool:
        """True where a checkpoint is due, at the end, before stopping, and after the best evaluation so far."""
        due = self.is_due(step, self.config.log.save_steps) or step == self.num_steps
        return due or self.stop_requested or saving.is_new_best(self, step)

    def save(self, step: int) -> None:
        """Checkpoint after `step` updates; a whole one of that step is left as it is."""
        with phase("checkpoint"):
            saving.save(self, step)


@dataclass(frozen=True)
class Preparation:
    """What is known before anything expensive: enough to say what the run will do, and to refuse it."""

    config: Config
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    engine: EngineChoice
    layout: Layout
    memory: MemoryPlan
    tokenizer: PreTrainedTokenizerBase
    data: Data
    sampling: Sampling
    num_steps: int
    run_dir: Path
    load_base: Callable[..., BaseWeights] = load_base
    """Called as `build.load_base` is; a benchmark makes up weights"""


def prepare(config: Config) -> Preparation:
    """Resolve device, model files, tokenizer and data. Raises UserError for whatever is wrong with them."""
    device = resolve_device(config)
    source = resolve_model(config.model, config.revision)
    model_config, layout = check_model(config, source)
    tokenizer = load_tokenizer(source, config.trust_remote_code)
    data = build_data(config, tokenizer)
    dtype = resolve_dtype(config, device)
    engine = choose_engine(config.engine, device, config.quant)
    prompts = [*data.train.prompt_ids, *(data.test.prompt_ids if data.test else ())]
    memory = make_memory_plan(
        config,
        layout,
        Place(device.type, dtype, engine.name, max(len(ids) for ids in prompts)),
        budget_of(config, device),
        context_limit=context_limit(model_config)[0],
    )
    prepare_determinism(config, memory)
    return Preparation(
        config=config,
        source=source,
        device=device,
        dtype=dtype,
        engine=engine,
        layout=layout,
        memory=memory,
        tokenizer=tokenizer,
        data=data,
        sampling=build_sampling(config, eos_token_ids(source, tokenizer)),
        num_steps=num_steps_of(config, len(data.train.problems)),
        run_dir=run_dir_of(config),
    )


@contextmanager
def open_training_run(prepared: Preparation) -> Iterator[Run]:
    """Open or continue the run's folder, build policy and engine, restore the checkpoint; close all at the end.

    Raises UserError for what the user can mend, and RunError, with the traceback in RUN/error.log, for all else.
    Ctrl-C and SIGTERM ask the loop to save and return; a second one stops at once.
    """
    config, data = prepared.config, prepared.data
    for note in try_rewards(data.train, data.rewards, prepared.tokenizer, config.reward):
        say(f"note: {note}")
    machine: dict[str, object] = {
        "device": prepared.device.type,
        "dtype": str(prepared.dtype).removeprefix("torch."),
        "engine": prepared.engine.name,
    }
    if config.deterministic:
        machine["sizes"] = asdict(prepared.memory.sizes)
    state = open_run(
        prepared.run_dir,
        config.model_dump(mode="json"),
        config.resume,
        identity=identity_of(prepared.source, data.train, data.rewards),
        machine=machine,
        num_steps=prepared.num_steps,
    )
    for note in state.notes:
        say(f"note: {note}")
    with (
        state.lock,
        failure_log(prepared.run_dir),
        watching(prepared.run_dir, config.log.watchdog_s) as watchdog,
        ExitStack() as closing,
    ):
        with phase("setup"):
            run = _build_run(prepared, state, closing)
        watchdog.rescue = partial(saving.rescue, run)
        with _stop_on_signal(run), phase("report"):  # what is no other phase's
            yield run


def _build_run(prepared: Preparation, state: RunState, closing: ExitStack) -> Run:
    """Everything in memory, what can refuse first; `closing` closes it at the end."""
    config, checkpoint = prepared.config, state.checkpoint
    writer = MetricsWriter(
        prepared.run_dir,
        resume_step=checkpoint.step if checkpoint else None,
        report_to=config.log.report_to,
        config=config.model_dump(mode="json"),
    )
    closing.callback(writer.close)
    for note in writer.notes:
        say(f"note: {note}")
    pool = closing.enter_context(
        open_pool(
            prepared.data.rewards,
            config.reward,
            prepared.run_dir / "rewards.log",
            prepared.num_steps,
        )
    )
    if needs_determinism(config, prepared.device.type):
        closing.enter_context(torch_determinism(algorithms=True, compiled=True))
    cap_memory(prepared.memory, prepared.device)
    source = prepared.source
    base = prepared.load_base(config, source, prepared.device, prepared.dtype, prepared.engine)
    policy = build_policy(config, source, base)
    layers = policy.base.config.num_hidden_layers
    sizes = prepared.memory.sizes
    recomputed = recomputed_layers(config, layers, prepared.device.type, sizes)
    if recomputed:
        policy.enable_recomputation(recomputed, sizes.offloaded_layers)
    engine = build_engine(config, policy, prepared.engine, sizes)
    closing.callback(engine.close)
    run = Run(
        config=config,
        run_dir=prepared.run_dir,
        tokenizer=prepared.tokenizer,
        data=prepared.data,
        sampling=prepared.sampling,
        policy=policy,
        engine=engine,
        optimizer=make_optimizer(policy.trainable_parameters(), config.train),
        pool=pool,
        writer=writer,
        memory=prepared.memory,
        record=PlanRecord(prepared.run_dir, prepared.engine, prepared.memory),
        num_steps=prepared.num_steps,
        first_step=checkpoint.step if checkpoint else 0,
        steps_done=checkpoint.step if checkpoint else 0,
    )
    if checkpoint:
        saving.restore(run, checkpoint)
        say(f"continuing {run.run_dir} after step {run.first_step} of {run.num_steps}")
    check_start(run, prepared.memory)
    return run


@contextmanager
def _stop_on_signal(run: Run) -> Iterator[None]:
    def ask(number: int, _: FrameType | None) -> None:
        if run.stop_requested:
            raise KeyboardInterrupt
        run.stop_signal = number
        with suppress(RuntimeError):  # the signal came while a line was being written
            say("stopping: saving after the current phase (again to stop at once)")

    previous = {number: signal.signal(number, ask) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def num_steps_of(config: Config, num_problems: int) -> int:
    """max_steps, or num_epochs over the problems."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    per_epoch = steps_per_epoch(num_problems, config.rollout.prompts_per_step)
    return math.ceil(config.train.num_epochs * per_epoch)
