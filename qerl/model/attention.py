"""Causal attention for packed rows and for decoding, behind transformers' attention interface.

Packed: [1, heads, T, head_dim] holds rows end to end. On a GPU flash attention takes them as they are (varlen.py). Elsewhere
they are laid out right-padded, [B, L]: where no row has several branches plain causal attention is exact, for a real
token never sees a pad, which stands to its right, and what pads compute is dropped; branches that share a prefix need a mask.
Decoding: one new token a row against that row's cache, with an explicit [B, 1, 1, L] mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl.model.varlen import DTYPES, VarlenLayout
from qerl.types import Row

ATTENTION_NAME = "qerl_packed"
"""Name under which the function is registered; transformers builds no mask for names it does not know."""


@dataclass(frozen=True)
class PackedLayout:
    """Where each packed token sits among right-padded rows."""

    to_rows: Tensor
    """[B * L] int64: packed index at each padded place; pads point at token 0."""
    to_packed: Tensor
    """[T] int64: padded place of each packed token."""
    num_rows: int
    row_length: int
    mask: Tensor | None
    """[B, 1, L, L] bool, True where the query (third) may see the key (last); None: causal."""

    @staticmethod
    def of(rows: Sequence[Row], device: torch.device) -> "PackedLayout":
        """Layout of these rows."""
        lengths = torch.tensor([row.num_tokens for row in rows])
        row_length = int(lengths.max())
        places = torch.arange(row_length)
        is_token = places < lengths[:, None]
        starts = lengths.cumsum(0) - lengths
        to_rows = torch.where(is_token, starts[:, None] + places, 0).flatten()
        branched = any(len(row.branches) > 1 for row in rows)
        return PackedLayout(
            to_rows=to_rows.to(device),
            to_packed=is_token.flatten().nonzero()[:, 0].to(device),
            num_rows=len(rows),
            row_length=row_length,
            mask=_branch_mask(rows, row_length).to(device) if branched else None,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[T, Hq, D], [T, Hkv, D], [T, Hkv, D] -> [T, Hq, D]."""
        query, key, value = (pad(t, self) for t in (query, key, value))
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.mask,
            is_causal=self.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return unpad(output, self)


def layout_for(
    rows: Sequence[Row], device: torch.device, dtype: torch.dtype
) -> PackedLayout | VarlenLayout:
    """How the packed rows attend on this device."""
    if device.type == "cuda" and dtype in DTYPES:
        return VarlenLayout.of(rows, device)
    return PackedLayout.of(rows, device)


def _branch_mask(rows: Sequence[Row], row_length: int) -> Tensor:
    """[B, 1, L, L]: causal, and between tokens of one branch or towards the prefix only (branch 0)."""
    branch = torch.zeros(len(rows), row_length, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = row.prefix
        for number, length in enumerate(row.branches, start=1):
            branch[index, place : place + length] = number
            place += length
    query, key = branch[:, :, None], branch[:, None, :]
    causal = torch.ones(row_length, row_length, dtype=torch.bool).tril()
    return (((query == key) | (key == 0)) & causal)[:, None]


class _Pad(torch.autograd.Function):
    """[T, ...] -> [B * L, ...]: a gather; its gradient is the gather back, since pads are used for nothing."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, to_rows: Tensor, to_packed: Tensor) -> Tensor:
        ctx.save_for_backward(to_packed)
        return packed.index_select(0, to_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """[B * L, ...] -> [T, ...]: a gather; its gradient puts zeros at the pads, whose queries saw real keys."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to_packed: Tensor) -> Tensor:
        ctx.save_for_backward(to_packed)
        ctx.num_places = rows.shape[0]
        return rows.index_select(0, to_packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.new_zeros(ctx.num_places, *grad.shape[1:])
        return rows.index_copy_(0, ctx.saved_tensors[0], grad), None


def pad(x: Tensor, layout: PackedLayout) -> Tensor:
    """[T, heads, D] -> [B, heads, L, D]."""
    rows = _Pad.apply(x, layout.to_rows, layout.to_packed)
    return rows.view(layout.num_rows, layout.row_length, *x.shape[1:]).transpose(1, 2)


def unpad(x: Tensor, layout: PackedLayout) -> Tensor:
    """[B, heads, L, D] -> [T, heads, D]."""
    flat = x.transpose(1, 2).reshape(layout.num_rows * layout.row_length, x.shape[1], x.shape[3])
    return _Unpad.apply(flat, layout.to_packed)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: PackedLayout | VarlenLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; q [B, Hq, Lq, D], k and v [B, Hkv, Lk, D] -> ([B, Lq, Hq, D], None)."""
    if (layout is None) == (attention_mask is None):
        raise ValueError("attention needs either a packed layout or a mask")
    if layout is not None:
        query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
        return layout.attend(query, key, value, scaling)[None], None
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def register() -> str:
    """Make the function known to transformers and return its name."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)
    return ATTENTION_NAME
