"""The plan of a run, made before anything is downloaded, packed or trained: sizes, memory, steps, disk, rough time.

Memory is counted by `qerl.footprint` and compared with the budget: `memory_gib`, or what is free less a reserve. A run
that does not fit is refused here, with the settings to lower and the least that would do, instead of at step 120.

Time is a guess from two short measurements on this device, matrix products (FLOP/s) and copies (bytes/s), and from
every completion having its full length; most are shorter. A weight costs 2 FLOPs a token forward and 2 backward (only
dX: the base is frozen), 2 more where layers are recomputed; the head costs three products, for its logits are computed
again in backward. A decode step is bound by whichever is slower, the products of its rows or reading the weights.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from qerl.checkpoint import check_disk_space
from qerl.config import Config
from qerl.engine.choice import EngineChoice
from qerl.errors import UserError
from qerl.footprint import (
    GIB,
    Part,
    adapter_shapes,
    dims_of,
    footprint,
    microbatch_tokens,
    num_parameters,
    num_rows,
    optimizer_bytes,
    packed_bytes,
    peak_bytes,
    phase_bytes,
    recomputes,
)
from qerl.memory import free_disk_gib, free_gib
from qerl.metrics import format_duration
from qerl.quant.layout import Layout, build_layout

RESERVE_SHARE, RESERVE_MIN_GIB = 0.05, 0.5
"""Kept free when memory_gib is not given: a share of what is free, and at least so much."""
PROBE_S = 0.15
LAUNCH_S = {"cpu": 2e-4, "cuda": 8e-4}
"""Time of a decoder layer's calls in a decode step, whatever their size."""


@dataclass(frozen=True)
class Speed:
    """What a device did in a short measurement."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    config: Config
    origin: str
    """The model and where it comes from, for people."""
    download: str
    download_bytes: int | None
    """None: the hub could not be asked."""
    device: torch.device
    dtype: torch.dtype
    engine: EngineChoice
    num_parameters: int
    num_adapter_parameters: int
    parts: tuple[Part, ...]
    least_bytes: int
    """Peak with the smallest batches, the shortest microbatches and recomputation."""
    budget_gib: float
    budget_reason: str
    num_steps: int
    longest_prompt: int
    step_s: float
    """Rough, at full lengths."""
    run_dir: Path
    checkpoint_bytes: int
    """All that are kept, one more while it is written, and the adapter's copy."""
    cache_bytes: int
    """The packed base, in the cache's folder."""


def make_plan(
    config: Config,
    model_config: PreTrainedConfig,
    *,
    origin: str,
    download: str,
    download_bytes: int | None,
    num_steps: int,
    longest_prompt: int,
    device: torch.device,
    dtype: torch.dtype,
    engine: EngineChoice,
    run_dir: Path,
    speed: Speed,
) -> Plan:
    """Count a run's sizes. `longest_prompt` is in tokens; max_prompt_length where the prompts are not known yet.

    Raises UserError for a model family that is not supported.
    """
    layout = build_layout(model_config)
    shapes = adapter_shapes(layout, config)
    num_adapter = sum(math.prod(shape) for shape in shapes)
    saved = 4 * num_adapter + optimizer_bytes(shapes, config.train.optim)
    budget_gib, budget_reason = _budget(config, device)
    smallest = _with_least_memory(config)
    return Plan(
        config=config,
        origin=origin,
        download=download,
        download_bytes=download_bytes,
        device=device,
        dtype=dtype,
        engine=engine,
        num_parameters=num_parameters(layout),
        num_adapter_parameters=num_adapter,
        parts=footprint(config, layout, device.type, dtype, longest_prompt),
        least_bytes=peak_bytes(footprint(smallest, layout, device.type, dtype, longest_prompt)),
        budget_gib=budget_gib,
        budget_reason=budget_reason,
        num_steps=num_steps,
        longest_prompt=longest_prompt,
        step_s=estimate_step_s(config, layout, device.type, dtype, longest_prompt, speed),
        run_dir=run_dir,
        checkpoint_bytes=(config.log.save_total_limit + 1) * saved + 4 * num_adapter,
        cache_bytes=packed_bytes(layout, config.quant) if config.quant == "nvfp4" else 0,
    )


def check_plan(plan: Plan) -> None:
    """Raise UserError if the run needs more disk or memory than there is: what to lower, the least that would do."""
    if not plan.run_dir.exists():  # a run that continues has most of it already
        check_disk_space(plan.run_dir, plan.checkpoint_bytes)
    need = peak_bytes(plan.parts) / GIB
    if need <= plan.budget_gib:
        return
    least = plan.least_bytes / GIB
    problem = (
        f"this run needs about {need:.1f} GiB and {plan.budget_gib:.1f} GiB is {plan.budget_reason}"
    )
    if least > plan.budget_gib:
        raise UserError(
            f"{problem}; with the smallest batches it would still need {least:.1f} GiB: shorten "
            f"--max-completion-length ({plan.config.rollout.max_completion_length}), or take a smaller model"
            f"{'' if plan.config.quant == 'nvfp4' else ' or --quant nvfp4'}"
        )
    raise UserError(
        f"{problem}; {_what_to_lower(plan)} (the least that would do is {least:.1f} GiB)"
    )


def format_plan(plan: Plan) -> str:
    """The plan as a few aligned lines."""
    config = plan.config
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    length = config.rollout.max_completion_length
    need = peak_bytes(plan.parts) / GIB
    dtype = str(plan.dtype).removeprefix("torch.")
    lines = [
        ("model", f"{plan.origin}, {_count(plan.num_parameters)} parameters"),
        ("base", f"{config.quant}, {plan.device.type}, computing in {dtype}"),
        ("engine", f"{plan.engine.name} ({plan.engine.reason})"),
        (
            "adapter",
            f"rank {config.lora.lora_r}, {_count(plan.num_adapter_parameters)} parameters",
        ),
        ("download", plan.download),
        (
            "memory",
            f"{need:.2f} GiB at the peak; {plan.budget_gib:.2f} GiB is {plan.budget_reason}",
        ),
        *(("", f"  {part.num_bytes / GIB:9.3f}  {_phase(part)}{part.name}") for part in plan.parts),
        (
            "disk",
            f"{plan.checkpoint_bytes / GIB:.2f} GiB for checkpoints; {free_disk_gib(plan.run_dir):.1f} GiB free at "
            f"{plan.run_dir}; {plan.cache_bytes / GIB:.2f} GiB for the cache of the packed base",
        ),
        (
            "steps",
            f"{plan.num_steps}, each {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.num_generations} completions = {completions} of up to {length} tokens"
            f" ({completions * (plan.longest_prompt + length):,} with prompts)",
        ),
        (
            "time",
            f"very roughly {format_duration(plan.step_s)} a step, "
            f"{format_duration(plan.step_s * plan.num_steps)} in all, if every completion had full length",
        ),
    ]
    return "\n".join(f"{label:<10}{text}" for label, text in lines)


def measure_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Time matrix products and copies on the device for a fraction of a second."""
    left = torch.randn(256, 2048, device=device).to(dtype)
    right = torch.randn(2048, 2048, device=device).to(dtype)
    block = torch.zeros(2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    products_per_s = _rate(device, lambda: left @ right)
    copies_per_s = _rate(device, lambda: target.copy_(block))
    return Speed(
        flops_per_s=products_per_s * 2 * 256 * 2048 * 2048,
        bytes_per_s=copies_per_s * 2 * block.nbytes,
    )


def estimate_step_s(
    config: Config,
    layout: Layout,
    device_type: str,
    dtype: torch.dtype,
    longest_prompt: int,
    speed: Speed,
) -> float:
    """Seconds of rollout and update when all lengths are full (module docstring)."""
    dims = dims_of(layout)
    linear = sum(fused.num_weights for fused in layout.linears)
    head = dims.vocab * dims.hidden
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    length = config.rollout.max_completion_length
    rows = min(num_rows(config), completions)
    # CUDA expands each matrix anew in a step (write and read again); the CPU holds it expanded.
    moved = head * dtype.itemsize + linear * dtype.itemsize * (1 if device_type == "cpu" else 3)
    products = 2 * (linear + head) * rows / speed.flops_per_s
    decode_step = max(products, moved / speed.bytes_per_s) + LAUNCH_S[device_type] * dims.num_layers
    rollout_s = math.ceil(completions / rows) * length * decode_step

    tokens = completions * (longest_prompt + length)
    passes = 6 if recomputes(config, device_type) else 4
    flops = passes * linear * tokens + 6 * head * completions * length
    num_microbatches = math.ceil(tokens / microbatch_tokens(config, longest_prompt))
    expansions = num_microbatches * passes / 2 * linear * dtype.itemsize / speed.bytes_per_s
    return rollout_s + flops / speed.flops_per_s + expansions


def _rate(device: torch.device, work: Callable[[], Any]) -> float:
    """Calls a second, after one call that does not count."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    finish()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < PROBE_S:
        work()
        finish()
        calls += 1
    return calls / (time.perf_counter() - start)


def _budget(config: Config, device: torch.device) -> tuple[float, str]:
    free = free_gib(device)
    if config.memory_gib is not None:
        if config.memory_gib <= free:
            return config.memory_gib, "memory_gib"
        return free, f"free (memory_gib is {config.memory_gib:g})"
    return free - max(RESERVE_MIN_GIB, RESERVE_SHARE * free), "free, less a reserve"


def _with_least_memory(config: Config) -> Config:
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"max_batch_size": 1}),
            "train": config.train.model_copy(
                update={"max_tokens_per_microbatch": 1, "gradient_checkpointing": True}
            ),
        }
    )


def _what_to_lower(plan: Plan) -> str:
    """Settings that make the phase that does not fit smaller."""
    config = plan.config
    always = phase_bytes(plan.parts, "always")
    advice = []
    if (always + phase_bytes(plan.parts, "update")) / GIB > plan.budget_gib:
        if not recomputes(config, plan.device.type):
            advice.append("switch on --gradient-checkpointing")
        advice.append(
            f"lower --max-tokens-per-microbatch ({config.train.max_tokens_per_microbatch})"
        )
    if (always + phase_bytes(plan.parts, "rollout")) / GIB > plan.budget_gib:
        advice.append(f"lower --max-batch-size ({config.rollout.max_batch_size})")
    return ", ".join(advice)


def _phase(part: Part) -> str:
    return "" if part.phase == "always" else f"{part.phase}: "


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
