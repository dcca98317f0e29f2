"""What differs between model families, as one table: which linears are fused and which norms carry noise.

A family that is not in the table is refused by name; nothing here is guessed from module classes.
Names are transformers' own, relative to a decoder layer (`model.layers.N.`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Layout of one decoder layer."""

    fused_linears: dict[str, tuple[str, ...]]
    """Fused matrix -> its members in row order. A matrix that stands alone is its only member."""
    noise_norms: tuple[str, ...]
    """RMSNorms whose weights carry adaptive quantization noise."""


_LLAMA_LIKE = Family(
    fused_linears={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.o_proj": ("self_attn.o_proj",),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj": ("mlp.down_proj",),
    },
    noise_norms=("input_layernorm", "post_attention_layernorm"),
)

FAMILIES: dict[str, Family] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA_LIKE)
"""Keyed by `model_type` of the model's config.json."""
