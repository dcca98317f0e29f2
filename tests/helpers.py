"""Small builders that several tests share."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qerl.config import LoraConfig
from qerl.model.packing import Item, pack
from qerl.model.policy import Policy
from qerl.quant.base_weights import BaseWeights
from qerl.types import Microbatch, Rollout


def make_rollout(
    prompt: int, completion: int, *, seed: int = 0, vocab: int = 50, **changes
) -> Rollout:
    """A rollout of random tokens with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (prompt + completion,), generator=generator).tolist()
    logprobs = (-3 * torch.rand(completion, generator=generator)).tolist()
    values = {
        "problem_id": f"p{seed}",
        "sample_index": 0,
        "prompt_ids": tuple(ids[:prompt]),
        "completion_ids": tuple(ids[prompt:]),
        "logprobs": tuple(logprobs),
        "loss_mask": (True,) * completion,
        "finish_reason": "stop",
        "version": 0,
    }
    return Rollout(**(values | changes))


def pack_items(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    *,
    old: Sequence[torch.Tensor | None] | None = None,
    reference: Sequence[torch.Tensor | None] | None = None,
    budget: int = 10**6,
    share: bool = False,
) -> list[Microbatch]:
    """`pack` on the CPU with advantages and weights of 1, and without other log-probs, unless given."""
    ones, none = [1.0] * len(rollouts), [None] * len(rollouts)
    columns = (advantages or ones, weights or ones, old or none, reference or none)
    items = [Item(*values) for values in zip(rollouts, *columns, strict=True)]
    return list(
        pack(
            items,
            max_tokens=budget,
            share_prompts=share,
            hidden_size=64,
            device=torch.device("cpu"),
        )
    )


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def make_model(model_type: str, *, tie: bool = False, seed: int = 0) -> PreTrainedModel:
    """A random decoder of two layers: fp32 tensors of bf16 numbers, norms and biases that are not trivial."""
    config = AutoConfig.for_model(
        model_type,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=259,
        tie_word_embeddings=tie,
        max_position_embeddings=512,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = noise * 0.08 if parameter.dim() > 1 else parameter + noise * 0.1
            parameter.copy_(value.bfloat16())
    return model


def save_model(folder: Path, model_type: str, **options) -> PreTrainedModel:
    """Write `make_model` as a safetensors checkpoint and return the model."""
    model = make_model(model_type, **options)
    model.save_pretrained(folder)
    return model


def load_policy(
    folder: Path,
    *,
    format: str = "nvfp4",
    rounding: str = "nearest",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    keep_initial: bool = False,
    **lora,
) -> Policy:
    """A policy over the checkpoint's packed base, on the CPU."""
    base = BaseWeights.load(
        folder, format=format, rounding=rounding, dtype=dtype, device=torch.device("cpu")
    )
    lora = {"lora_r": 4, "lora_alpha": 8} | lora
    return Policy(
        base, LoraConfig(**lora), model_name=str(folder), seed=seed, keep_initial=keep_initial
    )


def randomize_adapter(policy: Policy, scale: float = 0.05, seed: int = 1) -> None:
    """Give B, which starts at zero, random values, so that the adapter does something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
