"""The frozen linear over packed weights, with the LoRA adapter computed in the same function.

    y = (x W'^T) * dequant_scale + bias + scaling * (x A^T) B^T

W' = codes x block scales is exact in bf16; dequant_scale is a factor of the product (the GEMM's alpha), as in the
engines' kernels, so rollout and trainer differ only by accumulation order. The base is never trained: backward gives
dX = (dY W') * dequant_scale + ... and expands W' again. Saved are the packed weight, x, x A^T and the adapter in the
activations' dtype: nothing dense, nothing in fp32. What is recomputed in backward (recompute.py) expands W' once for both:
there it is saved too. And there the product of a layer's last matrix, which no gradient needs, is left out.

The narrow products of the adapter are made first and the wide product is added to them inside its GEMM, so that no pass
over the wide activations is spent on sums or scales.

PEFT accepts a subclass of nn.Linear with in/out_features, bias and a `weight`; the packed codes stand in for it as a
non-persistent uint8 buffer, so PEFT can find the device but can neither cast, save nor merge it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qerl.kernels import expand
from qerl.model.recompute import is_recomputing
from qerl.quant.packed import PackedWeight


def frozen_product(x: Tensor, weight: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """scale * (x W^T) + bias; x [T, K], W [N, K] -> [T, N], one GEMM."""
    start = x.new_empty(1) if bias is None else bias
    return torch.addmm(start, x, weight.t(), beta=0 if bias is None else 1, alpha=scale)


class _FrozenLinear(torch.autograd.Function):
    """x [T, K], packed W [N, K], bias [N], A [r, K], B [N, r] -> [T, N]; differentiable in x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: PackedWeight,
        scale: float,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        ends_layer: bool,
    ) -> Tensor:
        expanded = expand(weight, x.dtype)
        ctx.weight, ctx.scale, ctx.scaling = weight, scale, scaling
        kept = expanded if is_recomputing() else None
        is_used = not (ends_layer and is_recomputing())
        if a is None or b is None:
            ctx.save_for_backward(kept)
            if is_used:
                return frozen_product(x, expanded, scale, bias)
            return x.new_empty(len(x), len(expanded))
        down = x @ a.t()
        ctx.save_for_backward(kept, x, down, a, b)
        if not is_used:
            return x.new_empty(len(x), len(expanded))
        y = frozen_product(down, b, scaling, bias)
        return y.addmm_(x, expanded.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, *adapted = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        if adapted:
            x, down, a, b = adapted
            grad_down = (grad @ b).mul_(ctx.scaling)
            grad_a = grad_down.t() @ x
            grad_b = (grad.t() @ down).mul_(ctx.scaling)
            if ctx.needs_input_grad[0]:
                grad_x = grad_down @ a
        if ctx.needs_input_grad[0]:
            expanded = expand(ctx.weight, grad.dtype) if kept is None else kept
            if grad_x is None:
                grad_x = torch.addmm(grad.new_empty(1), grad, expanded, beta=0, alpha=ctx.scale)
            else:
                grad_x.addmm_(grad, expanded, alpha=ctx.scale)
        return grad_x, None, None, None, grad_a, grad_b, None, None


class FrozenMatrix:
    """A packed matrix [N, K] that is never trained, of one linear or of several side by side, and its bias.

    `expanded` holds W' [N, K] for the length of a rollout phase when the policy chose to (`Policy.expanded`);
    `ends_layer` says that no gradient of the decoder layer depends on this product.
    """

    def __init__(self, packed: PackedWeight, bias: Tensor | None):
        self.packed, self.bias = packed, bias
        self.scale = 1.0 if packed.dequant_scale is None else packed.dequant_scale.item()
        self.expanded: Tensor | None = None
        self.ends_layer = False

    def __call__(
        self, x: Tensor, a: Tensor | None = None, b: Tensor | None = None, scaling: float = 1.0
    ) -> Tensor:
        """The base's output plus scaling * (x A^T) B^T; x [..., K], A [r, K], B [N, r] -> [..., N]."""
        flat = x.reshape(-1, x.shape[-1])
        if self.expanded is None or torch.is_grad_enabled():
            y = _FrozenLinear.apply(
                flat, self.packed, self.scale, self.bias, a, b, scaling, self.ends_layer
            )
        else:
            y = frozen_product(flat, self.expanded, self.scale, self.bias)
            if a is not None and b is not None:
                y.addmm_(flat @ a.t(), b.t(), alpha=scaling)
        return y.view(*x.shape[:-1], y.shape[-1])


class FrozenLinear(nn.Linear):
    """nn.Linear [N, K] over a frozen matrix, for PEFT to find and wrap."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = packed.shape
        self.matrix = FrozenMatrix(packed, bias)
        first = next(iter(packed.tensors().values()))
        self.register_buffer("weight", first.view(torch.uint8), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix(x)


class LoraLinear(PeftLoraLinear):
    """PEFT's LoRA layer with our forward: fp32 masters, multiplied in the activations' dtype, nothing saved in fp32.

    y = base(x) + scaling * (x A^T) B^T, A [r, K], B [N, r]; scaling is alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    def adapter(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float] | None:
        """A and B in `dtype`, and scaling; None while the adapter is switched off."""
        if self.disable_adapters:
            return None
        (name,) = self.active_adapters
        a, b = (cast(Tensor, matrices[name].weight) for matrices in (self.lora_A, self.lora_B))
        return a.to(dtype), b.to(dtype), self.scaling[name]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        matrix = cast(FrozenLinear, self.get_base_layer()).matrix
        return matrix(x, *(self.adapter(x.dtype) or (None, None, 1.0)))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "the base is packed: merging into 4-bit codes would lose most of what was learnt; "
            "merge the saved adapter into the bf16 model with PEFT instead"
        )


def side_by_side(matrix: FrozenMatrix, linears: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """The outputs of several linears with one input, end to end: x [..., K] -> [..., N_1 + N_2 + ...].

    `matrix` is theirs fused, row by row. One product does all: A is stacked, B block-diagonal. Some, or none, are adapted.
    """
    adapters = [i.adapter(x.dtype) if isinstance(i, LoraLinear) else None for i in linears]
    found = [adapter for adapter in adapters if adapter is not None]
    if not found:
        return matrix(x)
    (scaling,) = {scaling for _, _, scaling in found}
    blocks = [
        x.new_empty(linear.out_features, 0) if adapter is None else adapter[1]
        for linear, adapter in zip(linears, adapters, strict=True)
    ]
    return matrix(x, torch.cat([a for a, _, _ in found]), torch.block_diag(*blocks), scaling)
