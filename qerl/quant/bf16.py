"""bf16: the matrix as it is, two bytes a weight. `expand` casts; there is no dequant_scale.

The format of the bf16-LoRA baseline. Sources in fp32 or fp16 are rounded to bf16 once, when they are packed.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from qerl.quant.packed import check_rows


@dataclass(frozen=True)
class Bf16Weight:
    """A dense matrix W [N, K] (`qerl.quant.packed.PackedWeight`)."""

    weight: Tensor
    """bfloat16 [N, K]"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def dequant_scale(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> Self:
        check_rows(start, stop, self.shape[0])
        return type(self)(self.weight[start:stop])

    def expand(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight}

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.weight.to(device))


def pack_bf16(members: list[Tensor]) -> Bf16Weight:
    """Lay the matrices [N_i, K] of one fused group into one bf16 matrix [sum N_i, K]."""
    num_rows, num_columns = sum(len(member) for member in members), members[0].shape[1]
    weight = torch.empty(num_rows, num_columns, dtype=torch.bfloat16, device=members[0].device)
    for part, member in zip(
        weight.split([len(member) for member in members]), members, strict=True
    ):
        part.copy_(member)
    return Bf16Weight(weight)
