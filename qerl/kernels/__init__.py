"""Which function expands or multiplies a packed weight where: two tables, and no other place that chooses a kernel.

A weight's own `expand` is the plain-torch reference, and a kernel equals it bit for bit. On a GPU fp16, fp32 and fp64
take that reference, on purpose: they are for checks, not for training. Nothing falls back: what is not in a table raises,
and the message names what is. NF4's own `expand` is bitsandbytes' kernel, bf16's a cast.

triton and humming are imported when a kernel of theirs is first used: they take seconds, and a CPU has neither.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.kernels.humming_layout import HummingWeight
from qerl.quant.nvfp4 import Nvfp4Weight
from qerl.quant.packed import PackedWeight

if TYPE_CHECKING:
    from qerl.quant.nf4 import Nf4Weight  # imports bitsandbytes: seconds

Gemm = Callable[[Tensor, PackedWeight, float], Tensor]
"""(x [M, K], W [N, K], dequant_scale as a number) -> (x W'^T) * dequant_scale, [M, N] in x's dtype"""

MAX_PACKED_TOKENS = 2048
"""Most tokens that Humming multiplies. On an H200 a 32B layer takes 3.27 ms with it and 3.31 ms expanded at 2048 tokens,
12.9 and 12.2 ms at 8192 (docs/kernels.md)."""
MAX_FUSED_NF4_TOKENS = 512
"""Most tokens for which bitsandbytes 0.50 may take a fused kernel on Hopper; above, it would expand each member by itself."""

_BF16 = (torch.bfloat16,)
_OTHERS = (torch.float16, torch.float32, torch.float64)
_ANY = _BF16 + _OTHERS


def expand(weight: PackedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Dense W' [N, K] in `dtype`, without `dequant_scale`: `weight.expand(dtype)` by the kernel for its device.

    Args:
        weight: any packed weight; a range of rows costs what these rows cost.
        dtype: of the result.
        out: [N, K] of `dtype` to write into, rows contiguous and, for a Triton kernel, 16-byte aligned;
            they may lie further apart than K. Without it, a format without scales may return its own storage.

    Raises:
        UserError: no kernel for this format on this device.
        ValueError: `out` does not fit.
    """
    run = _find(EXPANSIONS, type(weight).__name__, weight.device, dtype)
    return run(weight, dtype, out)


def gemm_for(weight: PackedWeight, dtype: torch.dtype, *, batch_invariant: bool = False) -> Gemm:
    """A GEMM for weights like this one. It belongs to the caller: do not use it on two streams at a time.

    Args:
        weight: says format and device.
        dtype: of activations and results.
        batch_invariant: no split of K whose parts are added in an order that differs from run to run. Results for
            different token counts may still differ.

    Raises UserError when there is no kernel, or the package it needs is not installed.
    """
    make = _find(PRODUCTS, type(weight).__name__, weight.device, dtype)
    return make(weight.device, batch_invariant)


def prepare(weights: Iterable[PackedWeight], *, batch_invariant: bool = False) -> None:
    """Compile now, many at a time, the kernels that a GEMM for these weights would compile one by one when first called."""
    packed = [weight for weight in weights if isinstance(weight, HummingWeight)]
    if packed and packed[0].device.type == "cuda":
        from qerl.kernels.gemm import HummingGemm

        gemm = HummingGemm(packed[0].device, batch_invariant=batch_invariant)
        gemm.prepare(packed, range(1, MAX_PACKED_TOKENS + 1))


def _reference(weight: PackedWeight, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    dense = weight.expand(dtype)
    if out is None:
        return dense
    if out.shape != dense.shape or out.dtype != dtype:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, it has to be {dtype} {tuple(dense.shape)}"
        )
    return out.copy_(dense)


def _triton_nvfp4(weight: Nvfp4Weight, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    from qerl.kernels.triton_expand import expand_nvfp4

    return expand_nvfp4(weight, _empty(weight, dtype) if out is None else out)


def _triton_humming(weight: HummingWeight, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    from qerl.kernels.triton_expand import expand_humming

    return expand_humming(weight, _empty(weight, dtype) if out is None else out)


def _empty(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype, device=weight.device)


def _dense_gemm(device: torch.device, batch_invariant: bool) -> Gemm:
    """Expand, then torch's GEMM, whose order of summation is fixed for a shape."""

    def multiply(x: Tensor, weight: PackedWeight, scale: float) -> Tensor:
        return torch.addmm(x.new_empty(1), x, expand(weight, x.dtype).t(), beta=0, alpha=scale)

    return multiply


def _humming_gemm(device: torch.device, batch_invariant: bool) -> Callable:
    from qerl.kernels.gemm import HummingGemm

    gemm = HummingGemm(device, batch_invariant=batch_invariant)
    dense = _dense_gemm(device, batch_invariant)

    def multiply(x: Tensor, weight: HummingWeight, scale: float) -> Tensor:
        if x.shape[0] > MAX_PACKED_TOKENS:
            return dense(x, weight, scale)
        return gemm(x, weight)  # the kernel reads dequant_scale where it lies, on the device

    return multiply


def _bitsandbytes_gemm(device: torch.device, batch_invariant: bool) -> Callable:
    """bitsandbytes' own product, member by member: it chooses between its fused kernel and expanding."""
    from bitsandbytes import matmul_4bit  # pyright: ignore[reportPrivateImportUsage]

    dense = _dense_gemm(device, batch_invariant)

    def multiply(x: Tensor, weight: "Nf4Weight", scale: float) -> Tensor:
        if x.shape[0] > MAX_FUSED_NF4_TOKENS:
            return dense(x, weight, scale)
        outputs = [matmul_4bit(x, member.codes, member.state) for member in weight.members]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    return multiply


@dataclass(frozen=True)
class Kernel:
    """A row of a table: what runs for a format on a device. The first row that fits is taken."""

    weight: str
    """Name of the weight's class: naming it must not import its format"""
    device: str
    dtypes: tuple[torch.dtype, ...]
    run: Callable
    capability: tuple[int, int] = (0, 0)
    """Least CUDA compute capability"""

    def __str__(self) -> str:
        names = ", ".join(_name(dtype) for dtype in self.dtypes)
        least = f" from {_sm(self.capability)}" if any(self.capability) else ""
        return f"{self.weight} on {self.device}{least} ({names})"


EXPANSIONS = (
    Kernel("Nvfp4Weight", "cpu", _ANY, _reference),
    Kernel("Nvfp4Weight", "cuda", _BF16, _triton_nvfp4, (8, 0)),
    Kernel("Nvfp4Weight", "cuda", _OTHERS, _reference),
    Kernel("HummingWeight", "cpu", _ANY, _reference),
    Kernel("HummingWeight", "cuda", _BF16, _triton_humming, (8, 0)),
    Kernel("HummingWeight", "cuda", _OTHERS, _reference),
    Kernel("Nf4Weight", "cpu", _ANY, _reference),
    Kernel("Nf4Weight", "cuda", _ANY, _reference),
    Kernel("Bf16Weight", "cpu", _ANY, _reference),
    Kernel("Bf16Weight", "cuda", _ANY, _reference),
)
"""`run(weight, dtype, out)` writes W'."""

PRODUCTS = (
    Kernel("HummingWeight", "cuda", _BF16, _humming_gemm, (8, 0)),
    Kernel("HummingWeight", "cpu", _ANY, _dense_gemm),
    Kernel("Nvfp4Weight", "cpu", _ANY, _dense_gemm),
    Kernel("Nvfp4Weight", "cuda", _ANY, _dense_gemm),
    Kernel("Nf4Weight", "cpu", _ANY, _dense_gemm),
    Kernel("Nf4Weight", "cuda", _BF16, _bitsandbytes_gemm),
    Kernel("Nf4Weight", "cuda", _OTHERS, _dense_gemm),
    Kernel("Bf16Weight", "cpu", _ANY, _dense_gemm),
    Kernel("Bf16Weight", "cuda", _ANY, _dense_gemm),
)
"""`run(device, batch_invariant)` makes a `Gemm`."""


@cache
def _find(
    table: tuple[Kernel, ...], weight: str, device: torch.device, dtype: torch.dtype
) -> Callable:
    """What to run. Raises UserError when no row fits."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    for row in table:
        known = (row.weight, row.device) == (weight, device.type) and dtype in row.dtypes
        if known and capability >= row.capability:
            return row.run
    where = f"cuda {_sm(capability)}" if device.type == "cuda" else device.type
    raise UserError(
        f"no kernel for {weight} on {where} in {_name(dtype)}; there are: {'; '.join(map(str, table))}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
