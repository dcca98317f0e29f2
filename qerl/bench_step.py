"""Whole training steps: this package's own loop with its settings, and QLoRA as practised.

Every arm samples, scores and trains the same work on random weights: the settings of a training run, prompts of a fixed length, a
reward that gives 73 % of groups spread. This package's arms are `qerl.loop.train`. QLoRA as practised keeps two models, as
vLLM beside transformers do: NF4 rollouts in this package's engine, and transformers + PEFT + bitsandbytes NF4 (on a CPU:
fp32) for the update, whose adapter is handed to the engine each step. It trains on every sequence.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qerl.algo.advantages import group_advantages
from qerl.benchmarking import synthetic_reward, update_arms
from qerl.benchmarking.device import finish
from qerl.benchmarking.processes import Row
from qerl.benchmarking.synthetic import model_config, random_base, write_outline
from qerl.collect import collect
from qerl.config import Config
from qerl.loop import train
from qerl.memory import memory_metrics
from qerl.metrics import PhaseTimer, read_metrics
from qerl.model.packing import Item
from qerl.optim import clip_gradients, make_optimizer
from qerl.run import Run, open_training_run, prepare
from qerl.settings.cli import parse_config

PRACTISED = "qlora"
EQUAL_WORK = {"skip-zero-advantage": "false", "share-prompts": "false"}
ARMS: dict[str, dict[str, str]] = {
    "ours": {},
    "ours-equal-work": EQUAL_WORK,
    "own-nf4": {"quant": "nf4"},
    "own-bf16": {"quant": "bf16"},
    PRACTISED: {"quant": "nf4", "noise.scope": "off"},
}
"""Settings of each arm beside those of the work"""
PHASES = ("sync", "rollout", "reward", "update")
PRACTISED_SHARE = 0.6
"""Of the free memory, what the engine's half of QLoRA as practised may plan with when nothing is given"""


@dataclass(frozen=True)
class StepWork:
    """What every arm of a comparison does."""

    model: str
    """A shape or a preset (synthetic.model_config)"""
    num_layers: int = 0
    """0: all of the model's"""
    problems: int = 16
    samples: int = 8
    prompt: int = 256
    completion: int = 512
    steps: int = 4
    """The first warms up and does not count"""
    max_tokens_per_microbatch: int = 8192
    memory_gib: float | None = None


def measure(arm: str, work: StepWork) -> Iterator[Row]:
    """A row for each step after the first: seconds of each phase, step_s, completion_tokens, trained_tokens, peak_gib of the process."""
    with tempfile.TemporaryDirectory(prefix="qerl-bench-") as name:
        folder = Path(name)
        model = model_config(work.model, work.num_layers)
        write_outline(folder / "model", model)
        config = _config(arm, work, folder)
        prepared = replace(
            prepare(config),
            load_base=lambda config, source, device, *_: random_base(model, config.quant, device),
        )
        with open_training_run(prepared) as run:
            if arm == PRACTISED:
                rows = list(_practised_steps(run))
            else:
                train(run)
                rows = [_row(line) for line in read_metrics(run.run_dir)]
        for step, row in enumerate(rows[1:], start=1):
            yield {
                "arm": arm,
                "engine": prepared.engine.line().split(maxsplit=1)[1],
                "step": step,
                **row,
            }


def _config(arm: str, work: StepWork, folder: Path) -> Config:
    """Settings as a command line has them."""
    settings = {
        **work_settings(work, folder / "model", folder / "prompts.jsonl"),
        "run-dir": str(folder / "run"),
        "parity": "never",
        **ARMS[arm],
    }
    if gib := _memory_gib(arm, work):
        settings["memory-gib"] = str(gib)
    words = [part for key, value in settings.items() for part in (f"--{key}", value)]
    return parse_config(words, prog="bench", description="")[0]


def _memory_gib(arm: str, work: StepWork) -> float | None:
    if work.memory_gib or arm != PRACTISED or not torch.cuda.is_available():
        return work.memory_gib
    return round(PRACTISED_SHARE * torch.cuda.mem_get_info()[0] / 2**30, 2)


def work_settings(work: StepWork, model: Path, prompts: Path) -> dict[str, str]:
    """Settings of a run that does the work; writes its prompts."""
    reward = f"{synthetic_reward.__file__}:{synthetic_reward.spread.__name__}"
    write_prompts(prompts, work.problems * work.steps, work.prompt)
    return {
        "model": str(model),
        "task": "dataset",
        "task.path": str(prompts),
        "chat-template": "none",
        "reward-funcs": reward,
        "num-generations": str(work.samples),
        "prompts-per-step": str(work.problems),
        "max-prompt-length": str(work.prompt),
        "max-completion-length": str(work.completion),
        "max-tokens-per-microbatch": str(work.max_tokens_per_microbatch),
        "max-steps": str(work.steps),
        "max-batch-size": "256",
        "lora-r": str(update_arms.RANK),
        "warmup-ratio": "0",
        "noise.num-stages": "2",
        "eval-size": "0",
    }


def write_prompts(path: Path, count: int, length: int) -> None:
    """Different prompts of `length` tokens, one token a letter."""
    letters = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            text = "".join(letters.choice("abcdefghij ") for _ in range(length - 1)) + "?"
            file.write(json.dumps({"prompt": text, "answer": "0"}) + "\n")


def _row(line: dict) -> Row:
    """From a line of metrics.jsonl."""
    seconds = {f"{phase}_s": line[f"train/time/{phase}_s"] for phase in PHASES}
    step_s = sum(seconds.values())
    row = {**seconds, "step_s": step_s}
    rollout_s, speed = seconds["rollout_s"], line["train/throughput/rollout_tokens_per_s"]
    row["completion_tokens"] = round(rollout_s * speed)
    row["trained_tokens"] = line["train/num_tokens_trained"]
    row["frac_groups_without_spread"] = line["train/frac_reward_zero_std"]
    row["peak_gib"] = line["train/memory/peak_gib"]
    return row


def _practised_steps(run: Run) -> Iterator[Row]:
    """QLoRA as practised, step by step (module docstring)."""
    config, device = run.config, run.policy.device
    on_gpu = device.type == "cuda"
    if on_gpu:  # the plan capped what one model needs
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    arm = "hf-nf4" if on_gpu else "hf-fp32"
    trainer = update_arms.start_transformers(arm, run.policy.base.config, device)
    optimizer = make_optimizer(
        list(zip(trainer.names, trainer.parameters, strict=True)), config.train
    )
    in_engine = dict(run.policy.trainable_parameters())
    for step in range(run.num_steps):
        timer = PhaseTimer()
        with timer("sync"), torch.no_grad():
            for name, parameter in zip(trainer.names, trainer.parameters, strict=True):
                in_engine[name].copy_(parameter)
            run.engine.sync(step, None)
        collected = collect(run, step, timer)
        with timer("update"):
            run.engine.release()
            advantages_PG = group_advantages(
                collected.rewards_PG, config.algo.scale_rewards, config.algo.advantage
            )
            rollouts = [rollout for group in collected.batch.rollouts for rollout in group]
            tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
            items = [
                Item(rollout, advantage, 1 / tokens)
                for rollout, advantage in zip(
                    rollouts, advantages_PG.flatten().tolist(), strict=True
                )
            ]
            optimizer.zero_grad()
            for batch in update_arms.unshared(
                items, config.train.max_tokens_per_microbatch, device
            ):
                trainer.step(batch)
            clip_gradients(trainer.parameters, config.train.max_grad_norm)
            optimizer.step()
            finish(device)
        row = {f"{phase}_s": timer.seconds[phase] for phase in PHASES}
        row |= {"step_s": sum(timer.seconds.values()), "completion_tokens": tokens}
        row["trained_tokens"] = tokens
        row["frac_groups_without_spread"] = (advantages_PG == 0).all(1).double().mean().item()
        row["peak_gib"] = memory_metrics(device)["memory/peak_gib"]
        yield row
