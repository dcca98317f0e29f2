"""The product with a packed matrix, as one operator that torch.compile does not look into.

A graph that vLLM compiles takes tensors, not Python objects. Of each packed weight it gets one tensor, its first one;
the storage address of that tensor finds the whole weight here. So every number format goes through the same operator,
all layers of a kind compile to the same graph, and kernels see the `PackedWeight` itself.

Weights are offered when an engine starts and withdrawn when it is closed; in between nobody may move them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl.model.frozen_linear import frozen_product
from qerl.quant.packed import PackedWeight

KERNEL = "reference"
"""What computes the product; part of the compile cache's key."""


@dataclass(frozen=True)
class _Offer:
    packed: PackedWeight
    scale: float
    """dequant_scale on the host: reading it on the device inside a CUDA graph is not possible"""


_OFFERS: dict[int, _Offer] = {}


def key_of(packed: PackedWeight) -> Tensor:
    """The tensor that stands for a packed weight in a graph."""
    return next(iter(packed.tensors().values()))


def offer(weights: Iterable[PackedWeight]) -> None:
    """Make packed weights known to the operator."""
    for packed in weights:
        scale = 1.0 if packed.dequant_scale is None else packed.dequant_scale.item()
        _OFFERS[key_of(packed).data_ptr()] = _Offer(packed, scale)


def withdraw() -> None:
    """Forget all offered weights."""
    _OFFERS.clear()


def num_offered() -> int:
    """How many weights are on offer."""
    return len(_OFFERS)


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, scale: float) -> Tensor:
    """x [T, K] times a packed W [N, K] transposed, plus bias [N] -> [T, N] in x's dtype.

    THE one place where the engine multiplies with a packed matrix; a kernel for a device is called from here.
    """
    return frozen_product(x, packed.expand(x.dtype), scale, bias)


@torch.library.custom_op("qerl::packed_linear", mutates_args=())
def packed_linear(x: Tensor, key: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    """x [..., K] -> [..., N] with the offered weight that `key` stands for; `num_rows` is N."""
    found = _OFFERS.get(key.data_ptr())
    if found is None:
        raise RuntimeError("a packed weight was moved, or its engine is closed")
    y = linear(x.reshape(-1, x.shape[-1]), found.packed, bias, found.scale)
    return y.view(*x.shape[:-1], num_rows)


@packed_linear.register_fake
def _(x: Tensor, key: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_rows)
