"""Adaptive quantization noise (AQN): its schedule and its draws (QeRL, arXiv 2510.11696, section 3.3; docs/aqn.md).

The run is cut into K stages of equal length. Stage 0 adds nothing: quantization alone is the noise. Stage k >= 1 adds
Gaussian noise of standard deviation sigma_k to the weights of every noise-carrying RMSNorm of the rollout policy;
with the exponential schedule sigma_k = sigma_start * (sigma_end / sigma_start)^((k-1)/(K-2)), so the first noisy stage
has exactly sigma_start and the last exactly sigma_end. Each step draws afresh and adds to the CLEAN weights.
"""

import math

import torch
from torch import Tensor

from qerl.config import NoiseConfig
from qerl.seeding import derive_seed
from qerl.types import NoiseDraw


def stage_of(step: int, num_steps: int, num_stages: int) -> int:
    """Stage of a step; every stage has floor or ceil of num_steps / num_stages steps."""
    return min(step, num_steps - 1) * num_stages // num_steps


def sigma_of_stage(stage: int, config: NoiseConfig) -> float:
    """Standard deviation of a stage: 0 at stage 0, then sigma_start at 1 to sigma_end at num_stages - 1."""
    if stage == 0:
        return 0.0
    start, end = config.sigma_start, config.sigma_end
    last = config.num_stages - 1
    if stage == 1:
        return start
    if stage == last:
        return end
    progress = (stage - 1) / (last - 1)
    match config.schedule:
        case "exponential":
            return start * (end / start) ** progress
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
        case "logarithmic":
            return start + (end - start) * math.log(stage) / math.log(last)


def noise_at(step: int, num_steps: int, seed: int, config: NoiseConfig) -> NoiseDraw | None:
    """The draw of a step, or None when nothing is to be added."""
    sigma = sigma_of_stage(stage_of(step, num_steps, config.num_stages), config)
    if config.scope == "off" or sigma == 0 or step >= config.stop_at * num_steps:
        return None
    return NoiseDraw(sigma=sigma, seed=seed, step=step, norm_dtype=config.norm_dtype)


def draw_noise(draw: NoiseDraw, module_name: str, shape: torch.Size) -> Tensor:
    """fp32 CPU noise for one module, the same on every device: seeded by (seed, step, module name)."""
    generator = torch.Generator().manual_seed(
        derive_seed("noise", draw.seed, draw.step, module_name)
    )
    return torch.randn(shape, generator=generator, dtype=torch.float32) * draw.sigma


def noisy_weight(clean: Tensor, draw: NoiseDraw, module_name: str) -> Tensor:
    """clean + noise of one norm, fp32 on the weight's device, rounded to `draw.norm_dtype`."""
    noisy = clean + draw_noise(draw, module_name, clean.shape).to(clean.device)
    return noisy.bfloat16().float() if draw.norm_dtype == "bfloat16" else noisy
