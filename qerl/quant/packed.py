"""What every number format gives the rest of the package: the `PackedWeight` contract.

A packed weight stands for one matrix W [N, K] of a frozen linear (y = x W^T), or for several that engines fuse
along N (q/k/v, gate/up). It knows how to become dense again and nothing about models:

    W = expand(dtype) * dequant_scale

`expand` returns codes times block scales, which a format may make exact in bf16; `dequant_scale` is the one fp32
factor that remains. It is kept apart because the GEMM kernels apply it to the product, in fp32: a trainer that does
the same differs from them by summation order only. It ALWAYS multiplies; files that store a divisor are converted
where they are read. A format without such a factor has `dequant_scale = None`.
"""

import math
from typing import Protocol, Self

import torch
from torch import Tensor

_ROWS = 256
"""Rows compared at a time: fp32 temporaries of a few MB."""


class PackedWeight(Protocol):
    """A frozen weight matrix [N, K] in some storage format. Immutable; `rows` shares its storage."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the dense matrix."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        ...

    @property
    def dequant_scale(self) -> Tensor | None:
        """float32 [], multiplies `expand`; None where the format has no such factor."""
        ...

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop as a packed weight that shares this one's storage (no copy).

        Raises ValueError outside 0 <= start < stop <= N, or where the format cannot be cut there.
        """
        ...

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Dense [N, K] in `dtype`, WITHOUT `dequant_scale`.

        A format that has no dequant_scale may return its own storage: do not write to the result.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Every stored tensor by field name, for checksums and for handing over to an engine."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another device; itself when it is there already."""
        ...


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The dense matrix [N, K] that `weight` stands for: computed in fp32 (fp64 if asked), rounded once to `dtype`."""
    scale = weight.dequant_scale
    if scale is None:
        return weight.expand(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return weight.expand(wide).mul_(scale.to(wide)).to(dtype)


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise in dB: 10 log10(sum r^2 / sum (r - a)^2). Infinite when they are equal."""
    signal, noise = squared_sums(reference, approximation)
    return decibels(signal, noise)


def squared_sums(reference: Tensor, approximation: Tensor) -> tuple[float, float]:
    """(sum r^2, sum (r - a)^2) of matrices, a few rows at a time; parts of a larger matrix can be added up."""
    signal, noise = 0.0, 0.0
    for part, other in zip(reference.split(_ROWS), approximation.split(_ROWS), strict=True):
        part = part.float()
        signal += _sum_of_squares(part)
        noise += _sum_of_squares(part - other.float())
    return signal, noise


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); +inf without noise, -inf for noise on a zero signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def check_rows(start: int, stop: int, num_rows: int) -> None:
    """Raise ValueError unless 0 <= start < stop <= num_rows."""
    if not 0 <= start < stop <= num_rows:
        raise ValueError(f"rows {start}..{stop} are not inside a matrix of {num_rows} rows")


def _sum_of_squares(values: Tensor) -> float:
    """Row sums in fp32, their total in fp64: accurate, and no fp64 copy of the matrix."""
    return values.square().sum(dim=-1, dtype=torch.float32).sum(dtype=torch.float64).item()
