"""The sizes of a run that memory decides, and the words in which a footprint is counted."""

from dataclasses import dataclass
from typing import Literal

import torch

from qerl.quant.layout import EMBEDDING, Layout

GIB = 2**30

Phase = Literal["always", "rollout", "update"]


@dataclass(frozen=True)
class Place:
    """Where a run happens."""

    device_type: str
    dtype: torch.dtype
    """Compute type"""
    engine: str
    longest_prompt: int
    """In tokens; max_prompt_length where the prompts are not known yet"""


@dataclass(frozen=True)
class Sizes:
    """How much is done at once. The plan chooses it, engine and trainer keep to it."""

    max_num_seqs: int
    """Most completions decoded at once"""
    max_tokens_per_microbatch: int
    """Most packed tokens in one forward and backward; a longer sequence goes alone"""
    kv_cache_bytes: int = 0
    """vLLM's key/value cache; 0 where the engine has none of a fixed size"""
    max_num_batched_tokens: int = 0
    """Most tokens in one forward pass of vLLM"""
    releases_cache: bool = False
    """Whether the key/value cache is given back during the update"""
    kept_layers: int = 0
    """Layers whose activations are kept for backward although it may recompute: as many as fit"""
    offloaded_layers: int = 0
    """Recomputed layers whose inputs wait in the host's memory: as few as must"""


@dataclass(frozen=True)
class Part:
    """One thing that takes memory."""

    name: str
    num_bytes: int
    phase: Phase
    """When it is there; rollout and update alternate."""


@dataclass(frozen=True)
class Dims:
    """Widths of one decoder layer, read off its matrices."""

    num_layers: int
    hidden: int
    query: int
    key: int
    intermediate: int
    vocab: int


def dims_of(layout: Layout) -> Dims:
    """The layer's widths; all layers of the supported families are alike."""
    rows = {
        member.removeprefix("model.layers.0."): num_rows
        for fused in layout.linears
        for member, num_rows in zip(fused.members, fused.member_rows, strict=True)
    }
    vocab, hidden = layout.dense[EMBEDDING]
    num_layers = sum("self_attn.q_proj" in member for f in layout.linears for member in f.members)
    query, key = rows["self_attn.q_proj"], rows["self_attn.k_proj"]
    return Dims(num_layers, hidden, query, key, rows["mlp.up_proj"], vocab)
