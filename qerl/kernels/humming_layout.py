"""NVFP4 in the memory layout of Humming's GEMM, by plain torch: packing, unpacking, and the weight that holds it.

Humming (humming-kernels 0.1.10) multiplies bf16 activations with 4-bit weights on tensor cores. It wants the codes of a
tensor-core fragment next to each other, in the registers of the thread that multiplies them. For W [N, K] that is a
permutation of index bits; codes and scales keep their E2M1 and E4M3 bytes. With n = 64t + 16c + 8h + a (c < 4, h < 2,
a < 8) and k = 16r + 8j + 2b + p (j < 2, b < 4, p < 2):

    codes        int32 [K/16, 2N]   row r, word 128t + 16a + 4b + c     nibble h + 2j + 4p (WGMMA)   j + 2h + 4p (MMA)
    block_scales e4m3  [K/16, N]    row r, column 64t + 8a + 2c + h

A word holds 2 rows x 2 halves of a block x 2 neighbours along k. Nibbles i and i + 4 are neighbours, so `word >> 4i` masked
with 0x000F000F is two bf16 results waiting to be decoded at once. Hopper's WGMMA and the MMA of other architectures differ
in two nibble bits; block scales are the same. Because n's upper bits are the outermost of a row, a range of rows that starts at
a multiple of 64 is a range of columns here, a view without a copy; `first_row` takes care of any other start.

Humming's tiles need N % 256 == 0 and K % 128 == 0: smaller matrices are padded with zeros once, here, as vLLM does.
Byte order is little-endian, as on every host of an NVIDIA GPU. tests/golden/humming_*.txt holds bytes that Humming made.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from qerl.errors import UserError
from qerl.quant.nvfp4 import BLOCK_SIZE, Nvfp4Weight
from qerl.quant.packed import check_rows

Mma = Literal["wgmma", "mma"]
"""Tensor-core instruction that the layout is for: wgmma on compute capability 9.x, mma on every other from 8.0."""

TILE_ROWS = 64
"""Rows whose codes lie together; views start at its multiples."""
TILE_WORDS = 128
"""int32 words of one tile: 64 rows x 16 columns x 4 bits."""
PAD_ROWS, PAD_COLUMNS = 256, 128
_CHUNK_BYTES = 1 << 23
"""Bytes of codes permuted at a time; temporaries are a few times that."""


@dataclass(frozen=True)
class HummingWeight:
    """A matrix W [N, K] in Humming's layout (`qerl.quant.packed.PackedWeight`), padded to [N', K'] in memory."""

    codes: Tensor
    """int32 [K'/16, 2N'], Humming's `weight`; a view of its columns for a range of rows"""
    block_scales: Tensor
    """float8_e4m3fn [K'/16, N'], Humming's `weight_scale`"""
    dequant_scale: Tensor
    """float32 []: multiplies; Humming's `global_scale`"""
    shape: tuple[int, int]
    """(N, K) without padding"""
    mma: Mma
    first_row: int = 0
    """Where W's row 0 is in the stored tile: 0..63"""

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def is_whole(self) -> bool:
        """Whether this is a matrix as it was packed, which a GEMM can take, and not a range of its rows."""
        return self.first_row == 0 and self.codes.is_contiguous()

    def rows(self, start: int, stop: int) -> Self:
        check_rows(start, stop, self.shape[0])
        first, end = self.first_row + start, self.first_row + stop
        base = first // TILE_ROWS * TILE_ROWS
        # Up to the end of a tile, and for the last row all that is stored: then all rows are the whole matrix again.
        end = self.stored_shape[0] if stop == self.shape[0] else -(-end // TILE_ROWS) * TILE_ROWS
        return replace(
            self,
            codes=self.codes[:, 2 * base : 2 * end],
            block_scales=self.block_scales[:, base:end],
            shape=(stop - start, self.shape[1]),
            first_row=first - base,
        )

    @property
    def stored_shape(self) -> tuple[int, int]:
        """(N', K')"""
        return self.block_scales.shape[1], self.block_scales.shape[0] * BLOCK_SIZE

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Codes times block scales [N, K], exact in every float dtype: the reference, by way of the row-major layout."""
        return unpack(self).expand(dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "codes": self.codes,
            "block_scales": self.block_scales,
            "dequant_scale": self.dequant_scale,
        }

    def to(self, device: torch.device | str) -> Self:
        if torch.device(device) == self.device:
            return self
        return replace(self, **{name: part.to(device) for name, part in self.tensors().items()})


def mma_of(device: torch.device) -> Mma:
    """The instruction that Humming uses on this CUDA device. Raises UserError below compute capability 8.0."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise UserError(f"{device} has compute capability {major}.{minor}; bf16 kernels need 8.0")
    return "wgmma" if major == 9 else "mma"


def padded_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """(N', K') that a matrix [N, K] takes in memory."""
    num_rows, num_columns = shape
    return -(-num_rows // PAD_ROWS) * PAD_ROWS, -(-num_columns // PAD_COLUMNS) * PAD_COLUMNS


def pack(weight: Nvfp4Weight, mma: Mma) -> HummingWeight:
    """The same matrix in Humming's layout, on its own device; dequant_scale is shared.

    Takes the packed matrix once more in memory, and a few chunks of `_CHUNK_BYTES`.
    """
    num_rows, num_columns = weight.shape
    num_blocks = num_columns // BLOCK_SIZE
    stored_rows, stored_columns = padded_shape(weight.shape)
    stored_blocks = stored_columns // BLOCK_SIZE
    codes = torch.zeros(stored_blocks, 2 * stored_rows, dtype=torch.int32, device=weight.device)
    scales = torch.zeros(stored_blocks, stored_rows, dtype=torch.uint8, device=weight.device)
    step = _chunk_rows(num_columns)
    for start in range(0, num_rows, step):
        part = weight.codes[start : start + step]
        part_scales = weight.block_scales[start : start + step].view(torch.uint8)
        missing = -len(part) % TILE_ROWS
        part = functional.pad(part, (0, 0, 0, missing))
        part_scales = functional.pad(part_scales, (0, 0, 0, missing))
        stop = start + len(part)
        codes[:num_blocks, 2 * start : 2 * stop] = _permute_codes(part, mma)
        scales[:num_blocks, start:stop] = _permute_scales(part_scales)
    block_scales = scales.view(torch.float8_e4m3fn)
    return HummingWeight(codes, block_scales, weight.dequant_scale, weight.shape, mma)


def unpack(weight: HummingWeight) -> Nvfp4Weight:
    """The inverse of `pack`: row-major codes and scales without padding."""
    num_rows, num_columns = weight.shape
    num_blocks = num_columns // BLOCK_SIZE
    end = weight.first_row + num_rows
    codes = torch.empty(end, num_columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(end, num_blocks, dtype=torch.uint8, device=weight.device)
    step = _chunk_rows(num_columns)
    stored_scales = weight.block_scales.view(torch.uint8)
    for start in range(0, end, step):
        stop = min(start + step, -(-end // TILE_ROWS) * TILE_ROWS)
        part = weight.codes[:num_blocks, 2 * start : 2 * stop]
        codes[start:stop] = _restore_codes(part, weight.mma)[: end - start]
        part_scales = stored_scales[:num_blocks, start:stop]
        scales[start:stop] = _restore_scales(part_scales)[: end - start]
    first = weight.first_row
    block_scales = scales.view(torch.float8_e4m3fn)
    return Nvfp4Weight(codes[first:], block_scales[first:], weight.dequant_scale)


def _chunk_rows(num_columns: int) -> int:
    return max(1, _CHUNK_BYTES // (num_columns // 2) // TILE_ROWS) * TILE_ROWS


# In these four the axes have the letters of the module docstring: n = t c h a, k = r j b p.


def _permute_codes(codes: Tensor, mma: Mma) -> Tensor:
    """uint8 [64T, 8R], two codes a byte (p) -> int32 [R, 128T]."""
    bytes_tchajrb = codes.unflatten(1, (-1, 2, 4)).unflatten(0, (-1, 4, 2, 8))
    # A result byte holds two codes whose nibble numbers differ in bit 0: h for WGMMA, j for MMA.
    h, j = 2, 5
    inner, outer = (h, j) if mma == "wgmma" else (j, h)
    low, high = bytes_tchajrb.movedim((inner, outer), (0, 1)).unbind(
        0
    )  # each [outer, t, c, a, r, b]
    even = (low & 0xF) | (high << 4)
    odd = (low >> 4) | (high & 0xF0)
    words = torch.stack((even, odd))  # [p, outer, t, c, a, r, b]
    return words.permute(5, 2, 4, 6, 3, 0, 1).flatten(1).view(torch.int32)


def _restore_codes(words: Tensor, mma: Mma) -> Tensor:
    """int32 [R, 128T] -> uint8 [64T, 8R]."""
    parts = words.contiguous().view(torch.uint8).unflatten(1, (-1, 8, 4, 4, 2, 2))
    even, odd = parts.permute(5, 6, 1, 4, 2, 0, 3).unbind(0)  # each [outer, t, c, a, r, b]
    low = (even & 0xF) | (odd << 4)
    high = (even >> 4) | (odd & 0xF0)
    bytes_ = torch.stack((low, high))  # [inner, outer, t, c, a, r, b]
    h, j = 2, 5
    inner, outer = (h, j) if mma == "wgmma" else (j, h)
    return bytes_.movedim((0, 1), (inner, outer)).flatten(4).flatten(0, 3)


def _permute_scales(scales: Tensor) -> Tensor:
    """uint8 [64T, R] -> uint8 [R, 64T]."""
    return scales.unflatten(0, (-1, 8, 8)).permute(3, 0, 2, 1).flatten(1)


def _restore_scales(scales: Tensor) -> Tensor:
    """uint8 [R, 64T] -> uint8 [64T, R]."""
    return scales.unflatten(1, (-1, 8, 8)).permute(1, 3, 2, 0).flatten(0, 2)
