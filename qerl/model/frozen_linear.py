"""The frozen linear over packed weights, and the LoRA layer that sits on it.

y = (x W'^T) * dequant_scale + bias, where W' = codes x block scales is exact in bf16 and dequant_scale is applied to
the product in fp32, as the GEMM kernels of the engines do; so rollout and trainer differ only by accumulation order.
The base is never trained: backward gives dX = (dY * dequant_scale) W' and expands W' again. Nothing dense is saved.

PEFT accepts a subclass of nn.Linear with in/out_features, bias and a `weight`; the packed codes stand in for it as a
non-persistent uint8 buffer, so PEFT can find the device but can neither cast, save nor merge it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as PeftLoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.quant.packed import PackedWeight


def _scaled(product: Tensor, dequant_scale: Tensor | None) -> Tensor:
    """product * dequant_scale, multiplied in at least fp32 and rounded once to the product's dtype."""
    if dequant_scale is None:
        return product
    if product.dtype in (torch.float32, torch.float64):
        return product * dequant_scale
    return (product.float() * dequant_scale).to(product.dtype)


class _FrozenLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return _scaled(F.linear(x, weight.expand(x.dtype)), weight.dequant_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        weight = ctx.weight
        return _scaled(grad_y, weight.dequant_scale) @ weight.expand(grad_y.dtype), None


class FrozenLinear(nn.Linear):
    """nn.Linear [N, K] whose weight is packed and never trained.

    `expanded` holds W' [N, K] for the length of a rollout phase when the policy chose to (`Policy.expanded`).
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = packed.shape
        self.packed = packed
        self.expanded: Tensor | None = None
        first = next(iter(packed.tensors().values()))
        self.register_buffer("weight", first.view(torch.uint8), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.expanded is not None and not torch.is_grad_enabled():
            y = _scaled(F.linear(x, self.expanded), self.packed.dequant_scale)
        else:
            y = _FrozenLinearFunction.apply(x, self.packed)
        return y if self.bias is None else y + self.bias


class LoraLinear(PeftLoraLinear):
    """PEFT's LoRA layer with our forward: fp32 masters, multiplied in the activations' dtype, nothing saved in fp32.

    y = base(x) + scaling * (x A^T) B^T, A [r, K], B [N, r]; scaling is alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.base_layer(x)
        if self.disable_adapters:
            return y
        for name in self.active_adapters:
            a, b = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
            y = y + F.linear(F.linear(x, a), b) * self.scaling[name]
        return y

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "the base is packed: merging into 4-bit codes would lose most of what was learnt; "
            "merge the saved adapter into the bf16 model with PEFT instead"
        )
