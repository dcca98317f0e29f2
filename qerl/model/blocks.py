"""The two halves of a decoder layer, with the arithmetic of fused.py: attention and MLP.

They take the place of transformers' modules of the same families (Llama, Mistral, Qwen2, Qwen3), keep their children and
names, so that PEFT and checkpoints find everything where it was, and compute the same.
"""

# Children are modules; nn.Module declares its attributes as tensors or modules.
# pyright: reportCallIssue=false
from typing import Any

import torch
from torch import Tensor, nn

from qerl.model.attention import attention
from qerl.model.frozen_linear import FrozenLinear
from qerl.model.fused import rotate, swiglu
from qerl.model.recompute import TILE_TOKENS, is_recomputing, recomputed


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary embedding and, where the family has them, norms of queries and keys."""

    def __init__(self, original: nn.Module):
        """Takes over the children of transformers' module."""
        super().__init__()
        self.layer_idx: int = original.layer_idx  # pyright: ignore[reportAttributeAccessIssue]
        self.head_dim: int = original.head_dim  # pyright: ignore[reportAttributeAccessIssue]
        for name, child in original.named_children():
            self.add_module(name, child)
        self.has_norms = "q_norm" in dict(original.named_children())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layout: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[B, T, H] -> ([B, T, H], None). Either `layout` says who sees whom, or `attention_mask` and a cache do."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape)
        if self.has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = position_embeddings
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, _weights = attention(
            self, query, key, value, attention_mask, self.head_dim**-0.5, layout=layout
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), the end of a decoder layer.

    Its activations are the widest of the model. Where they are not kept for backward, a long sequence goes through in tiles.
    """

    def __init__(self, original: nn.Module):
        """Takes over the children of transformers' module, which are frozen linears."""
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        if isinstance(self.down_proj, FrozenLinear):
            self.down_proj.ends_layer = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, H] -> [..., T, H]"""
        keeps_activations = torch.is_grad_enabled() and not is_recomputing()
        if keeps_activations or x.shape[-2] <= TILE_TOKENS:
            return self._product(x)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return recomputed(self._product, x, trained, tile_tokens=TILE_TOKENS)

    def _product(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
