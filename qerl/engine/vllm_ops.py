"""The product with a packed matrix and its adapter, as operators that torch.compile does not look into.

A graph that vLLM compiles takes tensors, not Python objects. Of each packed weight it gets one tensor, its first one;
the storage address of that tensor finds the whole weight here. So every number format goes through the same operators,
all layers of a kind compile to the same graph, and kernels see the `PackedWeight` itself.

Weights are offered when an engine starts and withdrawn when it is closed; in between nobody may move them. Which kernel
multiplies is `qerl.kernels.gemm_for`'s choice: on a CPU the plain-torch reference. A bias is added outside, where the
compiler can fuse it with what follows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.kernels import gemm_for
from qerl.kernels.adapter import AdaptedGemm
from qerl.quant.layout import FusedLinear
from qerl.quant.packed import PackedWeight


@dataclass(frozen=True)
class _Offer:
    packed: PackedWeight
    scale: float
    """dequant_scale on the host: it cannot be read from the device inside a CUDA graph"""
    member_rows: tuple[int, ...]
    gemm: AdaptedGemm


_OFFERS: dict[int, _Offer] = {}


def key_of(packed: PackedWeight) -> Tensor:
    """The tensor that stands for a packed weight in a graph."""
    return next(iter(packed.tensors().values()))


def offer(
    linears: Iterable[FusedLinear],
    weights: Mapping[str, PackedWeight],
    dtype: torch.dtype,
    *,
    batch_invariant: bool,
) -> None:
    """Make packed weights of one format known to the operators, with one GEMM for all: an engine uses one stream.

    Raises UserError when there is no kernel for this format, device and activation dtype.
    """
    first = next(iter(weights.values()))
    gemm = gemm_for(first, dtype, batch_invariant=batch_invariant)
    adapted = AdaptedGemm(gemm, first.device, dtype)
    for fused in linears:
        packed = weights[fused.name]
        scale = 1.0 if packed.dequant_scale is None else packed.dequant_scale.item()
        member_rows = tuple(fused.member_rows)
        _OFFERS[key_of(packed).data_ptr()] = _Offer(packed, scale, member_rows, adapted)


def withdraw() -> None:
    """Forget all offered weights."""
    _OFFERS.clear()


def num_offered() -> int:
    """How many weights are on offer."""
    return len(_OFFERS)


def _found(key: Tensor) -> _Offer:
    found = _OFFERS.get(key.data_ptr())
    if found is None:
        raise RuntimeError("a packed weight was moved, or its engine is closed")
    return found


@torch.library.custom_op("qerl::packed_linear", mutates_args=())
def packed_linear(x: Tensor, key: Tensor, num_rows: int) -> Tensor:
    """x [..., K] -> x W^T [..., N] with the offered W that `key` stands for; `num_rows` is N."""
    found = _found(key)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return found.gemm.gemm(flat, found.packed, found.scale).view(*x.shape[:-1], num_rows)


@packed_linear.register_fake
def _(x: Tensor, key: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)


@torch.library.custom_op("qerl::adapted_linear", mutates_args=())
def adapted_linear(
    x: Tensor, key: Tensor, a: Tensor, b: Tensor, num_outputs: int, gated: bool
) -> Tensor:
    """x [..., K] -> x W^T + (x A^T) B^T member by member [..., N], or silu(gate) * up [..., N/2] of it if `gated`.

    A [n r, K] and B [N, r] are stacked as in vllm_adapter.py; `num_outputs` is the last size of the result.
    """
    found = _found(key)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y = found.gemm(flat, found.packed, found.scale, a, b, found.member_rows, gated=gated)
    return y.view(*x.shape[:-1], num_outputs)


@adapted_linear.register_fake
def _(x: Tensor, key: Tensor, a: Tensor, b: Tensor, num_outputs: int, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)
