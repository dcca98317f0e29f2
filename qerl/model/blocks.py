"""The two halves of a decoder layer, with the arithmetic of fused.py: attention and MLP.

They take the place of transformers' modules of the same families (Llama, Mistral, Qwen2, Qwen3), keep their children and
names, so that PEFT and checkpoints find everything where it was, and compute the same. Linears with one input (q, k and v;
gate and up) are one product with the matrix that they are rows of.
"""

# Children are modules; nn.Module declares its attributes as tensors or modules.
# pyright: reportCallIssue=false
from typing import Any, cast

import torch
from torch import Tensor, nn

from qerl.model.attention import attention
from qerl.model.frozen_linear import FrozenLinear, FrozenMatrix, side_by_side
from qerl.model.fused import rotate, swiglu
from qerl.model.recompute import TILE_TOKENS, is_recomputing, recomputed


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary embedding and, where the family has them, norms of queries and keys."""

    def __init__(self, original: nn.Module, qkv: FrozenMatrix):
        """Takes over the children of transformers' module; `qkv` is the fused matrix of three of them."""
        super().__init__()
        self.layer_idx: int = original.layer_idx  # pyright: ignore[reportAttributeAccessIssue]
        self.head_dim: int = original.head_dim  # pyright: ignore[reportAttributeAccessIssue]
        for name, child in original.named_children():
            self.add_module(name, child)
        self.has_norms = "q_norm" in dict(original.named_children())
        self.qkv = qkv

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
        linears = cast(tuple[nn.Linear, ...], (self.q_proj, self.k_proj, self.v_proj))
        fused = side_by_side(self.qkv, linears, hidden_states)
        parts = fused.split([linear.out_features for linear in linears], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        value = value.contiguous()  # or attention would keep all three for backward
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

    def __init__(self, original: nn.Module, gate_up: FrozenMatrix):
        """Takes over the children of transformers' module, frozen linears; `gate_up` is the fused matrix of two of them."""
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        assert isinstance(self.down_proj, FrozenLinear)
        self.down_proj.matrix.ends_layer = True
        self.gate_up = gate_up

    def forward(self, x: Tensor) -> Tensor:
        """[..., T, H] -> [..., T, H]"""
        keeps_activations = torch.is_grad_enabled() and not is_recomputing()
        if keeps_activations or x.shape[-2] <= TILE_TOKENS:
            return self._product(x)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return recomputed(self._product, x, trained, tile_tokens=TILE_TOKENS)

    def _product(self, x: Tensor) -> Tensor:
        linears = cast(tuple[nn.Linear, ...], (self.gate_proj, self.up_proj))
        return self.down_proj(swiglu(side_by_side(self.gate_up, linears, x)))
