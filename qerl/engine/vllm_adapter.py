"""The LoRA adapter inside the engine's fused linears: two buffers each, updated in place.

vLLM computes q, k and v (gate and up) with one matrix, PEFT holds one A [r, K] and B [N_i, r] for each of them. Stacked:

    A = [A_q; A_k; A_v]  [n r, K]        B = [s B_q; s B_k; s B_v]  [N, r]        y_i += (x A_i^T) B_i^T

with PEFT's scaling s (alpha / r, or alpha / sqrt(r)) folded into B: it is multiplied in fp32 and rounded once. Members
that the adapter leaves out are zeros in both; a fused matrix without any member has no buffers.
The buffers keep their addresses for the engine's life, so CUDA graphs see every update.
"""

from collections.abc import Iterable
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
    index: int
    """Which member it is"""
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
    members = zip(fused.members, fused.member_rows, strict=True)
    for index, (member, num_rows) in enumerate(members):
        if member in layers:
            found.append(Part(layers[member], index, slice(start, start + num_rows)))
        start += num_rows
    return tuple(found)


@dataclass(frozen=True)
class AdapterBuffers:
    """A [n r, K] and B [N, r] of one fused matrix of n members, and where their contents come from."""

    a: Tensor
    b: Tensor
    parts: tuple[Part, ...]

    @classmethod
    def empty(
        cls, parts: tuple[Part, ...], fused: FusedLinear, dtype: torch.dtype, device: torch.device
    ) -> "AdapterBuffers":
        """Zeros."""
        (rank,) = {part.rank for part in parts}
        width, num_rows = rank * len(fused.members), sum(fused.member_rows)
        a = torch.zeros(width, fused.num_columns, dtype=dtype, device=device)
        b = torch.zeros(num_rows, rank, dtype=dtype, device=device)
        return cls(a, b, parts)


@torch.no_grad()
def update(buffers: Iterable[AdapterBuffers]) -> None:
    """Copy the masters of all buffers as they are now, in a few launches."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for found in buffers:
        for part in found.parts:
            master_a = part.layer.lora_A[ADAPTER].get_parameter("weight")
            master_b = part.layer.lora_B[ADAPTER].get_parameter("weight")
            scaling = part.layer.scaling[ADAPTER]
            targets += [
                found.a[part.index * part.rank : (part.index + 1) * part.rank],
                found.b[part.rows],
            ]
            sources += [master_a, master_b if scaling == 1 else master_b * scaling]
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
