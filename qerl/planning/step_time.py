"""A guess at the time of a step, from two short measurements of the device and every completion having its full length.

Measured are matrix products (FLOP/s) and copies (bytes/s); for a GPU that is not here, an H100's are assumed. A weight costs
2 FLOPs a token forward and 2 backward (only dX: the base is frozen), 2 more where layers are recomputed, the last matrix of
each aside; the head costs three products, for its logits are computed again in backward. A group's prompt counts once where the
update shares it. Sequences that are left out, for their advantage is 0, are not foreseen.

A decode step of the transformers engine is bound by whichever is slower, the products of its rows or moving the weights. In
vLLM's both add up, for the packed GEMM does not hide one behind the other, and each layer has a price of its own: with 0.15 ms a
layer this gives 14, 19 and 39 ms for 32B at 8, 64 and 256 sequences, where 14, 19 and 43 were measured on an H200.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qerl.config import Config
from qerl.model.packing import group_tokens
from qerl.planning.footprint import microbatch_tokens, packed_bytes, recomputed_layers
from qerl.planning.sizes import Place, Sizes, dims_of
from qerl.quant.layout import Layout

PROBE_S = 0.15
LAUNCH_S = {"cpu": 2e-4, "cuda": 8e-4}
"""Time of a decoder layer's calls in a decode step, whatever their size; without CUDA graphs."""
GRAPH_LAYER_S = 1.5e-4
"""The same in vLLM's CUDA graphs, with the adapter."""


@dataclass(frozen=True)
class Speed:
    """What a device does in a second."""

    flops_per_s: float
    bytes_per_s: float


H100 = Speed(flops_per_s=6.5e14, bytes_per_s=2.8e12)
"""Assumed where a plan is for a GPU that is not here: dense bf16 products and copies."""


def measure_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Time matrix products and copies on the device for a fraction of a second; a GPU gets more to do at once."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return H100
    on_gpu = device.type == "cuda"
    rows, width, size = (4096, 8192, 2**28) if on_gpu else (256, 2048, 2**26)

    def product() -> Callable[[], Any]:
        left = torch.randn(rows, width, device=device).to(dtype)
        right = torch.randn(width, width, device=device).to(dtype)
        return lambda: left @ right

    def copy() -> Callable[[], Any]:
        block = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(block)
        return lambda: target.copy_(block)

    speed = Speed(
        flops_per_s=_rate(device, product()) * 2 * rows * width * width,
        bytes_per_s=_rate(device, copy()) * 2 * size,
    )
    if on_gpu:
        torch.cuda.empty_cache()
    return speed


def estimate_step_s(
    config: Config, layout: Layout, place: Place, sizes: Sizes, speed: Speed
) -> tuple[float, float]:
    """Seconds of rollout and of update when all lengths are full (module docstring)."""
    dims, c = dims_of(layout), place.dtype.itemsize
    linear = sum(fused.num_weights for fused in layout.linears)
    head = dims.vocab * dims.hidden
    completions = config.rollout.prompts_per_step * config.rollout.num_generations
    length = config.rollout.max_completion_length
    rows = min(sizes.max_num_seqs, completions)
    products = 2 * (linear + head) * rows / speed.flops_per_s
    if place.engine == "vllm" and place.device_type == "cuda":
        context = place.longest_prompt + length / 2
        cache = rows * context * 2 * dims.key * dims.num_layers * c
        moved = packed_bytes(layout, config.quant) + head * c + cache
        decode_step = products + moved / speed.bytes_per_s + GRAPH_LAYER_S * dims.num_layers
    else:
        # CUDA expands each matrix anew in a step (write and read again); the CPU holds it expanded.
        moved = head * c + linear * c * (1 if place.device_type == "cpu" else 3)
        launches = LAUNCH_S[place.device_type] * dims.num_layers
        decode_step = max(products, moved / speed.bytes_per_s) + launches
    prefill = 2 * linear * config.rollout.prompts_per_step * place.longest_prompt
    rollout_s = math.ceil(completions / rows) * length * decode_step + prefill / speed.flops_per_s

    samples = config.rollout.num_generations
    if config.train.share_prompts:
        of_group = group_tokens(place.longest_prompt, length, samples, dims.hidden)
    else:
        of_group = samples * (place.longest_prompt + length)
    tokens = config.rollout.prompts_per_step * of_group
    algo = config.algo
    # Log-probs of the rollout weights and of the reference, where a setting needs them: a forward pass each.
    scored = (algo.num_updates > 1) + (algo.beta > 0)
    recomputed = recomputed_layers(config, dims.num_layers, place.device_type, sizes)
    again = 2 * (linear - dims.num_layers * dims.hidden * dims.intermediate)
    trained = 4 * linear + again * recomputed / dims.num_layers
    flops = (algo.num_iterations * trained + scored * 2 * linear) * tokens
    flops += (algo.num_iterations * 6 + scored * 2) * head * completions * length
    a_microbatch = microbatch_tokens(config, place.longest_prompt, sizes.max_tokens_per_microbatch)
    # Forward and backward expand every matrix; recomputation shares backward's.
    passes = 2 * algo.num_iterations + scored
    expansions = math.ceil(tokens / a_microbatch) * passes * linear * c / speed.bytes_per_s
    return rollout_s, flops / speed.flops_per_s + expansions


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
