"""The plan of a run, made before anything is downloaded, packed or trained: sizes, memory, steps, disk, rough time.

Memory is counted by `qerl.planning.footprint`, sizes are chosen by `qerl.planning.memory_plan`, time is guessed by `qerl.planning.step_time`. A run
that does not fit is refused here, with the settings to lower and the least that would do, instead of at step 120. A plan
can be made for a GPU that is not here: `--device cuda --memory-gib 74.5`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from qerl.checkpoint import check_disk_space
from qerl.config import Config
from qerl.engine.choice import EngineChoice
from qerl.errors import UserError
from qerl.memory import free_disk_gib
from qerl.metrics import format_duration
from qerl.planning.footprint import (
    adapter_shapes,
    microbatch_tokens,
    num_parameters,
    offloaded_bytes,
    optimizer_bytes,
    packed_bytes,
    phase_bytes,
    recomputed_layers,
    recomputes,
)
from qerl.planning.footprint_vllm import cache_bytes
from qerl.planning.memory_plan import MemoryPlan
from qerl.planning.sizes import GIB, Part, dims_of
from qerl.planning.step_time import Speed, estimate_step_s
from qerl.quant.layout import Layout

HOST_BYTES_PER_S = 4e10
"""Between page-locked memory and a GPU over PCIe 5: assumed"""


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    config: Config
    origin: str
    """The model and where it comes from, for people."""
    download: str
    download_bytes: int | None
    """None: the hub could not be asked."""
    dtype: torch.dtype
    engine: EngineChoice
    num_layers: int
    num_parameters: int
    num_adapter_parameters: int
    sequence_cache_bytes: int
    """Key/value cache of one sequence of full length."""
    memory: MemoryPlan
    num_steps: int | None
    """None: the task's data cannot be read here."""
    longest_prompt: int
    rollout_s: float
    update_s: float
    """Of a step; rough, at full lengths."""
    run_dir: Path
    checkpoint_bytes: int
    """All that are kept, one more while it is written, and the adapter's copy."""
    cache_bytes: int
    """The packed base, in the cache's folder."""
    offloaded_bytes: int
    """Host memory for inputs of recomputed layers."""

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.update_s

    @property
    def is_for_elsewhere(self) -> bool:
        """Whether it is for a GPU that is not in this machine."""
        return self.memory.place.device_type == "cuda" and not torch.cuda.is_available()


def make_plan(
    config: Config,
    layout: Layout,
    memory: MemoryPlan,
    *,
    origin: str,
    download: str,
    download_bytes: int | None,
    num_steps: int | None,
    engine: EngineChoice,
    run_dir: Path,
    speed: Speed,
) -> Plan:
    """Count the rest of a run's sizes, and guess its time."""
    shapes = adapter_shapes(layout, config)
    num_adapter = sum(math.prod(shape) for shape in shapes)
    saved = 4 * num_adapter + optimizer_bytes(shapes, config.train.optim)
    longest_prompt = memory.place.longest_prompt
    longest = longest_prompt + config.rollout.max_completion_length
    rollout_s, update_s = estimate_step_s(config, layout, memory.place, memory.sizes, speed)
    return Plan(
        config=config,
        origin=origin,
        download=download,
        download_bytes=download_bytes,
        dtype=memory.place.dtype,
        engine=engine,
        num_layers=dims_of(layout).num_layers,
        num_parameters=num_parameters(layout),
        num_adapter_parameters=num_adapter,
        sequence_cache_bytes=cache_bytes(layout, memory.place.dtype, longest),
        memory=memory,
        num_steps=num_steps,
        longest_prompt=longest_prompt,
        rollout_s=rollout_s,
        update_s=update_s,
        run_dir=run_dir,
        checkpoint_bytes=(config.log.save_total_limit + 1) * saved + 4 * num_adapter,
        cache_bytes=packed_bytes(layout, config.quant) if config.quant == "nvfp4" else 0,
        offloaded_bytes=offloaded_bytes(
            layout,
            memory.place.dtype,
            microbatch_tokens(config, longest_prompt, memory.sizes.max_tokens_per_microbatch),
            memory.sizes.offloaded_layers,
        ),
    )


def check_plan(plan: Plan) -> None:
    """Raise UserError if the run needs more disk or memory than there is: what to lower, the least that would do."""
    # A run that continues has most of it already; another machine has another disk.
    if not plan.run_dir.exists() and not plan.is_for_elsewhere:
        check_disk_space(plan.run_dir, plan.checkpoint_bytes)
    memory, budget = plan.memory, plan.memory.budget
    if memory.fits:
        return
    least = memory.least_bytes / GIB
    problem = f"this run needs about {memory.peak_bytes / GIB:.1f} GiB and {budget.gib:.1f} GiB is {budget.reason}"
    if memory.least_bytes > budget.num_bytes:
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
    memory, budget = plan.memory, plan.memory.budget
    dtype = str(plan.dtype).removeprefix("torch.")
    lines: list[tuple[str, str]] = [
        ("model", f"{plan.origin}, {_count(plan.num_parameters)} parameters"),
        ("base", f"{config.quant}, {memory.place.device_type}, computing in {dtype}"),
        ("engine", f"{plan.engine.name} ({plan.engine.reason})"),
        (
            "adapter",
            f"rank {config.lora.lora_r}, {_count(plan.num_adapter_parameters)} parameters",
        ),
        ("download", plan.download),
        (
            "memory",
            f"{memory.peak_bytes / GIB:.2f} GiB at the peak; {budget.gib:.2f} GiB is {budget.reason}",
        ),
        *(_row(part.num_bytes, f"{_phase(part)}{part.name}") for part in memory.parts),
        _row(budget.num_bytes - memory.peak_bytes, "head-room"),
        ("sizes", _sizes_in_words(plan)),
        ("", f"longest context {_context_in_words(memory)}"),
        (
            "disk",
            f"{plan.checkpoint_bytes / GIB:.2f} GiB for checkpoints; {free_disk_gib(plan.run_dir):.1f} GiB free at "
            f"{plan.run_dir}; {plan.cache_bytes / GIB:.2f} GiB for the cache of the packed base",
        ),
        (
            "steps",
            f"{plan.num_steps or 'as many as the data has'}, each {config.rollout.prompts_per_step} prompts x "
            f"{config.rollout.num_generations} completions = {completions} of up to {length} tokens"
            f" ({completions * (plan.longest_prompt + length):,} with prompts)",
        ),
        (
            "time",
            f"very roughly {format_duration(plan.step_s)} a step ({format_duration(plan.rollout_s)} rollout, "
            f"{format_duration(plan.update_s)} update){_in_all(plan)}, if every completion had full length"
            f"{' and the GPU were an H100' * plan.is_for_elsewhere}",
        ),
    ]
    return "\n".join(f"{label:<10}{text}" for label, text in lines)


def _what_to_lower(plan: Plan) -> str:
    """Settings that make the phase that does not fit smaller."""
    config, parts, budget = plan.config, plan.memory.parts, plan.memory.budget.num_bytes
    always = phase_bytes(parts, "always")
    advice = []
    if always + phase_bytes(parts, "update") > budget:
        if not recomputes(config, plan.memory.place.device_type):
            advice.append("switch on --gradient-checkpointing")
        advice.append(
            f"lower --max-tokens-per-microbatch ({config.train.max_tokens_per_microbatch})"
        )
    if always + phase_bytes(parts, "rollout") > budget:
        advice.append(f"lower --max-batch-size ({config.rollout.max_batch_size})")
    return ", ".join(advice)


def _in_all(plan: Plan) -> str:
    if plan.num_steps is None:
        return ""
    return f", {format_duration(plan.step_s * plan.num_steps)} in all"


def _row(num_bytes: int, text: str) -> tuple[str, str]:
    return "", f"  {num_bytes / GIB:9.3f}  {text}"


def _sizes_in_words(plan: Plan) -> str:
    sizes = plan.memory.sizes
    text = f"{sizes.max_num_seqs} completions at once, microbatches of {sizes.max_tokens_per_microbatch:,} tokens"
    recomputed = recomputed_layers(
        plan.config, plan.num_layers, plan.memory.place.device_type, sizes
    )
    if recomputed:
        text += f"; backward recomputes {recomputed} of {plan.num_layers} layers"
    if sizes.offloaded_layers:
        text += (
            f", inputs of {sizes.offloaded_layers} wait in host memory ({_offload_in_words(plan)})"
        )
    if plan.engine.name != "vllm":
        return text
    cache, sequence = sizes.kv_cache_bytes / GIB, plan.sequence_cache_bytes / GIB
    kept = "given back during the update" if sizes.releases_cache else "held for good"
    return f"{text}; KV cache {cache:.2f} GiB ({sequence:.3f} a completion), {kept}"


def _offload_in_words(plan: Plan) -> str:
    """What offloading takes of the host, and of the time."""
    copies = 2 * plan.offloaded_bytes / HOST_BYTES_PER_S
    return (
        f"{plan.offloaded_bytes / GIB:.1f} GiB, about {copies:.1f} s of copies a microbatch, "
        "most of them while the GPU computes"
    )


def _context_in_words(memory: MemoryPlan) -> str:
    if memory.longest_context == 0:
        return "none"
    return f"{memory.longest_context:,} tokens of prompt and completion, one at a time"


def _phase(part: Part) -> str:
    return "" if part.phase == "always" else f"{part.phase}: "


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
