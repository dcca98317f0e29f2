"""Chains of element-wise operations that run as one kernel on a GPU: norm, rotary embedding, SwiGLU.

Each is written once, in plain torch. On CUDA torch.compile makes one kernel of it, and one of its gradient, so the
widest activations are read and written once instead of once an operation; elsewhere it runs as written. All of them
compute in fp32 (fp64 for fp64) and round once, at the end.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def one_kernel(function: Callable) -> Callable:
    """Decorator: compiled where the first argument is a CUDA tensor, as written elsewhere."""

    @cache
    def compiled() -> Callable:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(first: Tensor, *others: Any) -> Any:
        return (compiled() if first.is_cuda else function)(first, *others)

    return call


@one_kernel
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    high = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(high), weight.shape, weight.to(high), eps).to(x.dtype)


@one_kernel
def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 I], the gate first (Shazeer, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    high = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(high)) * up.to(high)).to(gate.dtype)


@one_kernel
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864), halves as in transformers: x [..., heads, D], cos and sin [..., D]."""
    high = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(high).chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.to(high) * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)
