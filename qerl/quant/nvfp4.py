"""NVFP4: 4-bit values, one 8-bit scale for 16 of them, one fp32 scale for the matrix. docs/nvfp4.md works an example.

    W[n, k] = E2M1(codes[n, k]) * E4M3(block_scales[n, k // 16]) * dequant_scale          (4.5 bits a weight)

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 of the code is the sign. Two codes share a byte, element 2i
in the LOW nibble. E4M3 reaches 448, so `dequant_scale = amax / (448 * 6)` lets the block with the largest weight use
the whole range. A value times its block scale has at most 2 + 4 significant bits: exact in bf16, fp16 and fp32.

Packing, all in fp32 and a few rows at a time: block scale = E4M3(block amax / 6 / dequant_scale), code = nearest E2M1
of w / (block scale * dequant_scale), ties to even. What remains to be chosen is the block scale:

* `nearest` puts the block's maximum on 6. Bit for bit what compressed-tensors 0.17 writes (it counts with the
  divisor 448 * 6 / amax; so do we, inside this file), its 0.125 for a scale that rounds to 0 included.
* `four_over_six` (arXiv 2512.02010) also tries the maximum on 4, where the grid is finer near the maximum, and keeps
  whichever has the smaller squared error. A scale for 4 is 1.5 times larger, so dequant_scale is amax / (256 * 6).
* `mse` tries every E4M3 neighbour from about 0.75 to 1.75 times the scale of `nearest`, with four_over_six's dequant_scale.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.quant.packed import check_rows

BLOCK_SIZE = 16
E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""Value of each of the 16 codes."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MAX_FOUR_OVER_SIX = 256.0
"""Largest block scale for a maximum on 6 when 1.5 times that must fit too: 384 is an E4M3 number, 1.5 * 448 is not."""

Rounding = Literal["nearest", "mse", "four_over_six"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "mse", "four_over_six")

_ZERO_BLOCK_SCALE = 0.125
"""Stands in for a block scale that rounds to 0 (compressed-tensors' choice)."""
_MSE_SEARCH_STEPS = range(-2, 7)
"""E4M3 neighbours that `mse` tries. Bytes of positive E4M3 numbers are ordered as their values: byte + 1 is the next.
On Gaussian weights further ones are never better, and 1.5 times the scale is always among these."""
_E4M3_MAX_BYTE = 0x7E
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Weights packed at a time: fp32 temporaries that stay in a CPU's cache, and enough to fill a GPU."""
_EXPAND_ELEMENTS = 1 << 22
"""Weights that `expand` looks up at a time."""
_EIGHT_TIMES = 0x0101010101010101
"""Times a byte gives eight copies of it in one int64: the block scale beside each of its block's 8 code bytes."""
_PAIR_DTYPE = {
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}
"""A dtype as wide as two values, to look up both values of a byte at once."""


@dataclass(frozen=True)
class Nvfp4Weight:
    """A matrix W [N, K] in NVFP4 (`qerl.quant.packed.PackedWeight`)."""

    codes: Tensor
    """uint8 [N, K/2]: E2M1 codes, element 2i in the low nibble"""
    block_scales: Tensor
    """float8_e4m3fn [N, K/16], none negative or NaN"""
    dequant_scale: Tensor
    """float32 []: multiplies"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def rows(self, start: int, stop: int) -> Self:
        check_rows(start, stop, self.shape[0])
        return type(self)(self.codes[start:stop], self.block_scales[start:stop], self.dequant_scale)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Codes times block scales [N, K], exact in bf16, fp16, fp32 and fp64.

        Large matrices go in parts, because the lookup's index is as large as a bf16 result.
        """
        num_rows, num_columns = self.shape
        step = max(1, _EXPAND_ELEMENTS // num_columns)
        if num_rows <= step:
            return _expand(self.codes, self.block_scales, dtype)
        dense = torch.empty(self.shape, dtype=dtype, device=self.device)
        parts = zip(self.codes.split(step), self.block_scales.split(step), strict=True)
        for part, (codes, block_scales) in zip(dense.split(step), parts, strict=True):
            part.copy_(_expand(codes, block_scales, dtype))
        return dense

    def tensors(self) -> dict[str, Tensor]:
        return {
            "codes": self.codes,
            "block_scales": self.block_scales,
            "dequant_scale": self.dequant_scale,
        }

    def to(self, device: torch.device | str) -> Self:
        if torch.device(device) == self.device:
            return self
        return type(self)(*(tensor.to(device) for tensor in self.tensors().values()))


def pack_nvfp4(members: list[Tensor], rounding: Rounding) -> Nvfp4Weight:
    """Pack the matrices [N_i, K] of one fused group into one weight [sum N_i, K] with one shared dequant_scale.

    Any float dtype and device; temporary memory is a few fp32 copies of `_CHUNK_ELEMENTS` weights.
    Raises UserError when K is not a multiple of 16 or a weight is not finite.
    """
    num_rows, num_columns = sum(len(member) for member in members), members[0].shape[1]
    if num_columns % BLOCK_SIZE:
        raise UserError(
            f"NVFP4 needs a multiple of {BLOCK_SIZE} columns; this matrix has {num_columns}"
        )
    divisor = global_divisor(_amax(members), rounding)
    device = members[0].device
    codes = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8, device=device)
    block_scales = torch.empty(
        num_rows, num_columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=device
    )
    chunk_rows = max(1, _CHUNK_ELEMENTS[device.type] // num_columns)
    row = 0
    for member in members:
        for chunk in member.split(chunk_rows):
            blocks = chunk.float().unflatten(1, (-1, BLOCK_SIZE))
            scales = choose_block_scales(blocks, divisor, rounding)
            stop = row + len(chunk)
            codes[row:stop] = encode(blocks, scales / divisor)
            block_scales[row:stop] = scales.to(torch.float8_e4m3fn)
            row = stop
    return Nvfp4Weight(codes, block_scales, 1 / divisor)


def global_divisor(amax: Tensor, rounding: Rounding) -> Tensor:
    """float32 []: what block scales are multiplied by before E4M3 (compressed-tensors' `weight_global_scale`).

    1 where the quotient is not a number, as for a matrix of zeros.
    """
    largest_scale = E4M3_MAX if rounding == "nearest" else E4M3_MAX_FOUR_OVER_SIX
    amax = amax.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(largest_scale * E2M1_MAX / amax, nan=1.0, posinf=1.0)


def choose_block_scales(blocks: Tensor, divisor: Tensor, rounding: Rounding) -> Tensor:
    """Block scales of blocks [R, K/16, 16] as float32 [R, K/16], each an E4M3 number above 0.

    Among candidates with equal squared error the first wins, and the first is the scale of `nearest`.
    """
    ideal = divisor * (blocks.abs().amax(dim=-1) / E2M1_MAX)
    nearest = _round_to_e4m3(ideal)
    if rounding == "nearest":
        return nearest
    if rounding == "four_over_six":
        candidates = [_round_to_e4m3(ideal * 1.5)]
    else:
        first = ideal.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).int()
        steps = [(first + step).clamp(1, _E4M3_MAX_BYTE) for step in _MSE_SEARCH_STEPS]
        candidates = [step.to(torch.uint8).view(torch.float8_e4m3fn).float() for step in steps]
    best, least_error = nearest, _squared_error(blocks, nearest / divisor)
    for candidate in candidates:
        error = _squared_error(blocks, candidate / divisor)
        best = torch.where(error < least_error, candidate, best)
        least_error = torch.minimum(error, least_error)
    return best


def encode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Nearest codes of blocks [R, K/16, 16] divided by scales [R, K/16], two a byte: uint8 [R, K/2].

    A negative weight that rounds to zero keeps its sign bit (code 8, -0), as in compressed-tensors.
    """
    magnitude = _round_to_e2m1(blocks.abs().div_(scales.unsqueeze(-1)))
    # The code of a magnitude, 0 .5 1 1.5 2 3 4 6 -> 0 .. 7, is concave and piecewise linear: a minimum of its lines.
    code = torch.minimum(2 * magnitude, magnitude + 2)
    code = torch.minimum(code, magnitude.div_(2).add_(4))
    code = code.to(torch.uint8).add_(blocks < 0, alpha=8).flatten(1)
    return code[:, 0::2] | (code[:, 1::2] << 4)


def _expand(codes: Tensor, block_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dense [N, K] by one table lookup a byte: the index is a code byte and its block's scale byte, the entry both products.

    On the CPU a broadcast multiply by the scales alone would cost as much.
    """
    scale_bytes = (block_scales.view(torch.uint8).long() * _EIGHT_TIMES).view(torch.uint8)
    index = codes.int().add_(scale_bytes.int(), alpha=256)
    pairs = _pair_table(dtype, codes.device).index_select(0, index.view(-1))
    values = torch.view_as_real(pairs) if pairs.is_complex() else pairs.view(dtype)
    return values.view(len(codes), -1)


def _round_to_e2m1(magnitude: Tensor) -> Tensor:
    """Nearest E2M1 magnitude of float32 values >= 0, ties to even, 6 above the range.

    The grid's step is half the leading power of two, at least 0.5. Adding 1.5 * 2^22 times that power leaves fp32
    exactly this step for its last bit, so the addition itself rounds.
    """
    magnitude = magnitude.clamp(max=E2M1_MAX)
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=1.0)
    anchor = power.mul_(1.5 * 2**22)
    return magnitude.add_(anchor).sub_(anchor)


def _round_to_e4m3(scales: Tensor) -> Tensor:
    """Nearest E4M3 number as float32; 448 above the range, 0.125 for what would be 0."""
    rounded = scales.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(rounded == 0, _ZERO_BLOCK_SCALE, rounded)


def _squared_error(blocks: Tensor, scales: Tensor) -> Tensor:
    """Sum of squared rounding errors of each block [R, K/16] under scales [R, K/16]."""
    scaled = blocks.abs().div_(scales.unsqueeze(-1))
    squares = _round_to_e2m1(scaled).sub_(scaled).square_()
    while squares.shape[-1] > 1:  # halves, so that every device adds in the same order
        low, high = squares.chunk(2, dim=-1)
        squares = low + high
    return squares.squeeze(-1).mul_(scales.square())


def _amax(members: list[Tensor]) -> Tensor:
    """Largest magnitude of all members, float32 []. Raises UserError when it is not finite."""
    extremes = [extreme.float().abs() for member in members for extreme in member.aminmax()]
    amax = torch.stack(extremes).max()
    if not torch.isfinite(amax):
        raise UserError("the matrix holds NaN or infinite weights; the checkpoint is damaged")
    return amax


@cache
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[128 * 256] of `_PAIR_DTYPE`: entry 256 * s + c is both values of code byte c times E4M3 byte s."""
    # On the CPU whatever the default device is: the result is kept.
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64, device="cpu")
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    scale_bytes = torch.arange(128, dtype=torch.uint8, device="cpu")
    scales = scale_bytes.view(torch.float8_e4m3fn).double()
    table = (scales[:, None, None] * pairs).to(dtype)
    packed = (
        torch.view_as_complex(table) if dtype == torch.float64 else table.view(_PAIR_DTYPE[dtype])
    )
    return packed.flatten().to(device)
