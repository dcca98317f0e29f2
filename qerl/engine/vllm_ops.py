"""The product with a packed matrix, as one operator that torch.compile does not look into.

A graph that vLLM compiles takes tensors, not Python objects. Of each packed weight it gets one tensor, its first one;
the storage address of that tensor finds the whole weight here. So every number format goes through the same operator,
all layers of a kind compile to the same graph, and kernels see the `PackedWeight` itself.

Weights are offered when an engine starts and withdrawn when it is closed; in between nobody may move them. Which kernel
multiplies is `qerl.kernels.gemm_for`'s choice: on a CPU the plain-torch reference. Bias and adapter are added outside,
where the compiler can fuse them with what follows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.kernels import Gemm, gemm_for
from qerl.quant.packed import PackedWeight


@dataclass(frozen=True)
class _Offer:
    packed: PackedWeight
    scale: float
    """dequant_scale on the host: it cannot be read from the device inside a CUDA graph"""
    gemm: Gemm


_OFFERS: dict[int, _Offer] = {}


def key_of(packed: PackedWeight) -> Tensor:
    """The tensor that stands for a packed weight in a graph."""
    return next(iter(packed.tensors().values()))


def offer(weights: Iterable[PackedWeight], dtype: torch.dtype, *, batch_invariant: bool) -> None:
    """Make packed weights of one format known to the operator, with one GEMM for all: an engine uses one stream.

    Raises UserError when there is no kernel for this format, device and activation dtype.
    """
    weights = list(weights)
    gemm = gemm_for(weights[0], dtype, batch_invariant=batch_invariant)
    for packed in weights:
        scale = 1.0 if packed.dequant_scale is None else packed.dequant_scale.item()
        _OFFERS[key_of(packed).data_ptr()] = _Offer(packed, scale, gemm)


def withdraw() -> None:
    """Forget all offered weights."""
    _OFFERS.clear()


def num_offered() -> int:
    """How many weights are on offer."""
    return len(_OFFERS)


@torch.library.custom_op("qerl::packed_linear", mutates_args=())
def packed_linear(x: Tensor, key: Tensor, num_rows: int) -> Tensor:
    """x [..., K] -> x W^T [..., N] with the offered W that `key` stands for; `num_rows` is N."""
    found = _OFFERS.get(key.data_ptr())
    if found is None:
        raise RuntimeError("a packed weight was moved, or its engine is closed")
    y = found.gemm(x.reshape(-1, x.shape[-1]).contiguous(), found.packed, found.scale)
    return y.view(*x.shape[:-1], num_rows)


@packed_linear.register_fake
def _(x: Tensor, key: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)
