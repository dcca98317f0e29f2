"""The LoRA adapter inside the engine's fused linears: two buffers each, updated in place.

vLLM computes q, k and v (gate and up) with one matrix, PEFT holds one A [r, K] and B [N_i, r] for each of them. Fused:

    A = [A_q; A_k; A_v]  [n r, K]        B = diag(s B_q, s B_k, s B_v)  [N, n r]        y += (x A^T) B^T

with PEFT's scaling s (alpha / r, or alpha / sqrt(r)) folded into B: it is multiplied in fp32 and rounded once. Members
that the adapter leaves out have no part in A and zero rows in B; a fused matrix without any member has no buffers.
The buffers keep their addresses for the engine's life, so CUDA graphs see every update.
"""

from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from qerl.errors import UserError
from qerl.model.frozen_linear import LoraLinear
from qerl.model.policy import ADAPTER
from qerl.quant.layout import FusedLinear, Layout


@dataclass(frozen=True)
class Part:
    """One adapted member of a fused matrix."""

    layer: LoraLinear
    """PEFT's layer, whose fp32 masters are copied from"""
    rows: slice
    """The member's rows of B"""

    @property
    def rank(self) -> int:
        return self.layer.r[ADAPTER]


def adapter_parts(model: nn.Module, layout: Layout) -> dict[str, tuple[Part, ...]]:
    """The adapted members of each fused matrix, by its name, in row order; matrices without any are left out.

    Raises UserError, by name, when the adapter sits on anything but the packed linears.
    """
    found = {n: m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    layers = {name: layer for name, layer in found.items() if isinstance(layer, LoraLinear)}
    foreign = [name for name in found if name not in layers]
    if foreign:
        raise UserError(
            f"engine=vllm adapts the decoder's linears only, not {', '.join(foreign[:3])}; "
            "change lora_target_modules, or use --engine transformers"
        )
    parts = {fused.name: _parts_of(fused, layers) for fused in layout.linears}
    return {name: members for name, members in parts.items() if members}


def _parts_of(fused: FusedLinear, layers: dict[str, LoraLinear]) -> tuple[Part, ...]:
    found, start = [], 0
    for member, num_rows in zip(fused.members, fused.member_rows, strict=True):
        if member in layers:
            found.append(Part(layers[member], slice(start, start + num_rows)))
        start += num_rows
    return tuple(found)


@dataclass(frozen=True)
class AdapterBuffers:
    """A [n r, K] and B [N, n r] of one fused matrix, and where their contents come from."""

    a: Tensor
    b: Tensor
    parts: tuple[Part, ...]

    @classmethod
    def empty(
        cls,
        parts: tuple[Part, ...],
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> "AdapterBuffers":
        """Zeros for a fused matrix of shape (N, K)."""
        num_rows, num_columns = shape
        width = sum(part.rank for part in parts)
        a = torch.zeros(width, num_columns, dtype=dtype, device=device)
        b = torch.zeros(num_rows, width, dtype=dtype, device=device)
        return cls(a, b, parts)

    @torch.no_grad()
    def update(self) -> None:
        """Copy the masters as they are now."""
        start = 0
        for part in self.parts:
            columns = slice(start, start + part.rank)
            start += part.rank
            master_a = part.layer.lora_A[ADAPTER].get_parameter("weight")
            master_b = part.layer.lora_B[ADAPTER].get_parameter("weight")
            scaling = part.layer.scaling[ADAPTER]
            self.a[columns].copy_(master_a)
            self.b[part.rows, columns].copy_(master_b if scaling == 1 else master_b * scaling)
