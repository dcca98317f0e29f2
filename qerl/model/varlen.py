"""Causal attention of packed rows on a GPU: flash attention over sequences of unequal length, nothing padded.

A row whose completions share a prompt becomes several sequences: the prompt, and each branch with the prompt's keys before its
own. Flash attention aligns the causal mask at the last token, so a branch of c queries over P + c keys sees the prompt and
itself. Keys and values of a shared prompt are gathered once for each branch; with grouped heads they are small. Their
gradients are added up in fp32.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.types import Row

DTYPES = (torch.bfloat16, torch.float16)
"""What flash attention takes."""


@dataclass(frozen=True)
class VarlenLayout:
    """Packed queries in order, and for each of S sequences which keys it sees."""

    key_index: Tensor | None
    """[Tk] int64 into the T tokens; None: the tokens themselves, in order"""
    query_ends: Tensor
    """[S + 1] int32: where each sequence's queries begin and end"""
    key_ends: Tensor
    """[S + 1] int32, likewise into the keys"""
    longest_query: int
    longest_key: int

    @staticmethod
    def of(rows: Sequence[Row], device: torch.device) -> "VarlenLayout":
        """Layout of these rows."""
        queries, keys, index, start = [], [], [], 0
        for row in rows:
            if len(row.branches) < 2:
                queries.append(row.num_tokens)
                keys.append(row.num_tokens)
                index.extend(range(start, start + row.num_tokens))
            else:
                prefix = range(start, start + row.prefix)
                queries.append(row.prefix)
                keys.append(row.prefix)
                index.extend(prefix)
                first = prefix.stop
                for length in row.branches:
                    if length:
                        queries.append(length)
                        keys.append(row.prefix + length)
                        index.extend((*prefix, *range(first, first + length)))
                    first += length
            start += row.num_tokens
        shared = len(index) > start
        return VarlenLayout(
            key_index=torch.tensor(index, device=device) if shared else None,
            query_ends=_ends(queries, device),
            key_ends=_ends(keys, device),
            longest_query=max(queries),
            longest_key=max(keys),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[T, Hq, D], [T, Hkv, D], [T, Hkv, D] -> [T, Hq, D]."""
        if self.key_index is not None:
            key, value = (_Gather.apply(t, self.key_index) for t in (key, value))
        return flash_attention(
            query,
            key,
            value,
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            scale=scaling,
            window_size=(-1, 0),
            **_grouped_heads(),
        )


def flash_attention(*args: Any, **keywords: Any) -> Any:
    """torch's `varlen_attn`, imported when it is first needed."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*args, **keywords)


@cache
def _grouped_heads() -> dict[str, bool]:
    """torch 2.11 takes fewer key heads than query heads as they are, later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if known else {}


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


class _Gather(torch.autograd.Function):
    """[T, ...] -> [Tk, ...]: rows by index, with repeats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        high = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.num_tokens, *grad.shape[1:], dtype=high, device=grad.device)
        total.index_add_(0, ctx.saved_tensors[0], grad.to(high))
        return total.to(grad.dtype), None
