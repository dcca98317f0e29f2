"""Triton kernels that turn packed NVFP4 into dense bf16 W' = codes x block scales, exactly, near copy bandwidth.

The trainer's backward needs W itself (dX = dY W), and above some 2000 tokens a dense GEMM on an expanded matrix beats a packed one.
Expanding reads 0.56 bytes and writes 2 bytes a weight; everything here is about not adding to that. `dequant_scale` is left out,
as in `PackedWeight.expand`.

Decoding. A 32-bit word of results holds two bf16 neighbours along k. An E2M1 code `s eem` becomes a bf16 by moving
its sign to bit 15 and its three magnitude bits to bits 8..6: that is the value times 2^-126 (bf16's exponent bias is
127, E2M1's 1), subnormal 0.5 included. An E4M3 scale moved to bits 10..4 is its value times 2^-120. Multiplying by
those powers and then with each other is exact: 2 + 4 significant bits. One instruction, fma.bf16x2, multiplies both halves (and
keeps subnormals). Triton's CPU interpreter has no inline assembly: there the halves are multiplied as fp32, which is exact too.

Humming's layout (`humming_layout`): a program reads tiles of 128 words, 16 bytes a thread, decodes each word into
the four pairs it holds and lets Triton reorder them through shared memory, so that a row is written 16 bytes a thread.
"""

# triton is optional; `kernel[grid](...)` is its own use of the brackets; its constexpr parameters take plain values.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl.kernels.humming_layout import TILE_ROWS, HummingWeight
from qerl.quant.nvfp4 import BLOCK_SIZE, Nvfp4Weight

_ROW_MULTIPLE = 8
"""Rows of the output start at multiples of 8 bf16: 16 bytes, one store of a thread."""


def expand_humming(weight: HummingWeight, out: Tensor) -> Tensor:
    """Write W' [N, K] of a matrix or a range of its rows into `out`, and return it.

    Args:
        weight: in Humming's layout, on a CUDA device of capability 8.0 or above.
        out: bfloat16 [N, K], rows contiguous and 16-byte aligned; they may lie further apart than K.

    Raises:
        ValueError: `out` has another shape, dtype or alignment.
    """
    pairs = _pairs(weight.shape, out)
    num_rows, num_columns = weight.shape
    num_blocks = num_columns // BLOCK_SIZE
    config = HUMMING_LAUNCH
    tiles = triton.cdiv(weight.first_row + num_rows, TILE_ROWS)
    grid = (triton.cdiv(num_blocks, config["BLOCKS"]), triton.cdiv(tiles, config["TILES"]))
    # Neighbouring bytes 2c and 2c + 1 are the scales of the two rows (h) in a word: read them as one number.
    scales = weight.block_scales.view(torch.int16)
    _expand_humming[grid](
        weight.codes,
        scales,
        pairs,
        weight.first_row,
        num_rows,
        num_blocks,
        weight.codes.stride(0),
        scales.stride(0),
        out.stride(0) // _ROW_MULTIPLE,
        MMA=weight.mma == "mma",
        PTX=not _INTERPRETED,
        **config,
    )
    return out


def expand_nvfp4(weight: Nvfp4Weight, out: Tensor) -> Tensor:
    """The same from row-major codes. Arguments and errors as in `expand_humming`."""
    pairs = _pairs(weight.shape, out)
    num_rows, num_columns = weight.shape
    num_blocks = num_columns // BLOCK_SIZE
    config = NVFP4_LAUNCH
    grid = (triton.cdiv(num_blocks, config["BLOCKS"]), triton.cdiv(num_rows, config["ROWS"]))
    codes = weight.codes.view(torch.int32)
    _expand_nvfp4[grid](
        codes,
        weight.block_scales.view(torch.uint8),
        pairs,
        num_rows,
        num_blocks,
        codes.stride(0),
        weight.block_scales.stride(0),
        out.stride(0) // _ROW_MULTIPLE,
        PTX=not _INTERPRETED,
        **config,
    )
    return out


def _pairs(shape: tuple[int, int], out: Tensor) -> Tensor:
    """`out` as int32 [N, K/2], two bf16 neighbours each; raises ValueError when it cannot take W' [N, K]."""
    if out.shape != shape or out.dtype != torch.bfloat16:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, it has to be bfloat16 {tuple(shape)}"
        )
    aligned = out.data_ptr() % 16 == 0 and out.stride(0) % _ROW_MULTIPLE == 0
    if out.stride(1) != 1 or not aligned:
        raise ValueError(
            f"out has strides {out.stride()}; rows have to be contiguous and to start at multiples of 16 bytes"
        )
    return out.view(torch.int32)


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""What Triton itself looks at when it meets `@triton.jit`."""

HUMMING_LAUNCH = {"BLOCKS": 8, "TILES": 1, "num_warps": 4}
"""Blocks of 16 columns and tiles of 64 rows a program. In `benchmarks/gpu_kernels.py --sweep` on an H200 the fastest of nine at
5120x5120 (3400 GB/s); at 55296x5120 (3929) two tiles and 8 warps gain 0.5 % and lose 5 % at the small one."""
NVFP4_LAUNCH = {"BLOCKS": 32, "ROWS": 8, "num_warps": 4}
"""Blocks of 16 columns and rows a program; the fastest of seven at both sizes (3486 and 3984 GB/s)."""


@triton.jit
def _expand_humming(
    codes,
    scales,
    out,
    first_row,
    num_rows,
    num_blocks,
    codes_stride,
    scales_stride,
    out_stride,
    MMA: tl.constexpr,
    PTX: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    """codes int32 [num_blocks, 2N'], scales int16 [num_blocks, N'/2] -> out int32 [num_rows, 8 num_blocks].

    Strides of codes and scales in their elements, of out in 4 elements (16 bytes).
    """
    first_block = tl.program_id(0) * BLOCKS
    first_tile = tl.program_id(1) * TILES
    # Axes are r, (t a), b, c of the layout's index; a word's nibbles add j and h.
    r = tl.arange(0, BLOCKS)[:, None, None, None]
    ta = tl.arange(0, 8 * TILES)[None, :, None, None]
    b = tl.arange(0, 4)[None, None, :, None]
    c = tl.arange(0, 4)[None, None, None, :]
    block = (first_block + r).to(tl.int64)
    here = (first_block + r < num_blocks) & (first_tile * 64 + ta // 8 * 64 < first_row + num_rows)
    tile = first_tile * 8 + ta
    word = tl.load(codes + block * codes_stride + (tile * 16 + b * 4 + c), mask=here, other=0)
    scale = tl.load(scales + block * scales_stride + (tile * 4 + c), mask=here, other=0)
    scale = scale.to(tl.int32)
    scale_0 = _scale_pair(scale & 0xFF, PTX)
    scale_1 = _scale_pair((scale >> 8) & 0xFF, PTX)
    # pair_hj: rows h, halves j of the block. Nibble numbers are h + 2j (WGMMA) or j + 2h (MMA).
    pair_00 = _decode(word, 12, PTX)
    pair_11 = _decode(word, 0, PTX)
    if MMA:
        pair_01, pair_10 = _decode(word, 8, PTX), _decode(word, 4, PTX)
    else:
        pair_01, pair_10 = _decode(word, 4, PTX), _decode(word, 8, PTX)
    row_0 = tl.join(_multiply(pair_00, scale_0, PTX), _multiply(pair_01, scale_0, PTX))
    row_1 = tl.join(_multiply(pair_10, scale_1, PTX), _multiply(pair_11, scale_1, PTX))
    pairs = tl.join(row_0, row_1)  # r, (t a), b, c, j, h
    pairs = tl.reshape(pairs, (BLOCKS, TILES, 8, 4, 4, 2, 2))
    pairs = tl.permute(pairs, (1, 4, 6, 2, 0, 5, 3))  # t, c, h, a, r, j, b
    pairs = tl.reshape(pairs, (TILES * 64, BLOCKS * 8))

    row = first_tile * 64 - first_row + tl.arange(0, TILES * 64)[:, None]
    column = first_block * 8 + tl.arange(0, BLOCKS * 8)[None, :]
    inside = (row >= 0) & (row < num_rows) & (column < num_blocks * 8)
    tl.store(out + row.to(tl.int64) * (out_stride * 4) + column, pairs, mask=inside)


@triton.jit
def _expand_nvfp4(
    codes,
    scales,
    out,
    num_rows,
    num_blocks,
    codes_stride,
    scales_stride,
    out_stride,
    PTX: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """codes int32 [num_rows, 2 num_blocks], scales uint8 [num_rows, num_blocks] -> out int32 [num_rows, 8 num_blocks]."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    long_row = row.to(tl.int64)
    first_block = tl.program_id(0) * BLOCKS
    block = first_block + tl.arange(0, BLOCKS)[None, :]
    scale_here = (row < num_rows) & (block < num_blocks)
    scale = tl.load(scales + long_row * scales_stride + block, mask=scale_here, other=0)
    scale = _scale_pair(scale.to(tl.int32), PTX)
    half = first_block * 2 + tl.arange(0, BLOCKS * 2)[None, :]
    half_here = (row < num_rows) & (half < num_blocks * 2)
    word = tl.load(codes + long_row * codes_stride + half, mask=half_here, other=0)
    word = tl.reshape(word, (ROWS, BLOCKS, 2))
    scale = tl.expand_dims(scale, 2)
    # Byte i holds columns 2i (low nibble) and 2i + 1: spread them to the halves of a word, then decode.
    pair_0 = _multiply(_decode((word & 0xF) | ((word & 0xF0) << 12), 12, PTX), scale, PTX)
    word >>= 8
    pair_1 = _multiply(_decode((word & 0xF) | ((word & 0xF0) << 12), 12, PTX), scale, PTX)
    word >>= 8
    pair_2 = _multiply(_decode((word & 0xF) | ((word & 0xF0) << 12), 12, PTX), scale, PTX)
    word >>= 8
    pair_3 = _multiply(_decode((word & 0xF) | ((word & 0xF0) << 12), 12, PTX), scale, PTX)
    pairs = tl.join(tl.join(pair_0, pair_2), tl.join(pair_1, pair_3))
    pairs = tl.reshape(pairs, (ROWS, BLOCKS * 8))
    column = first_block * 8 + tl.arange(0, BLOCKS * 8)[None, :]
    inside = (row < num_rows) & (column < num_blocks * 8)
    tl.store(out + long_row * (out_stride * 4) + column, pairs, mask=inside)


@triton.jit
def _decode(word, shift: tl.constexpr, PTX: tl.constexpr):
    """Two E2M1 codes as two bf16 in int32: those at bits (12 - shift) and (28 - shift) of `word`."""
    sign = (word << shift) & -0x7FFF8000  # 0x80008000 as a signed number
    if shift >= 6:
        magnitude = word << (shift - 6)
    else:
        magnitude = word >> (6 - shift)
    bits = sign | (magnitude & 0x01C001C0)
    return _multiply(bits, tl.full(bits.shape, 0x7E807E80, tl.int32), PTX)  # 2^126


@triton.jit
def _scale_pair(byte, PTX: tl.constexpr):
    """An E4M3 byte without sign as two equal bf16 in int32."""
    bits = byte * 0x00100010
    return _multiply(bits, tl.full(bits.shape, 0x7B807B80, tl.int32), PTX)  # 2^120


@triton.jit
def _multiply(a, b, PTX: tl.constexpr):
    """Products of the two bf16 in each int32; exact ones only (the other branch cuts instead of rounding)."""
    if PTX:
        # c = -0: unlike +0 it leaves -0 as it is. fma.bf16x2 exists from sm_80, mul.bf16x2 from sm_90.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, $1, $2, c; }",
            "=r,r,r",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    a, b = tl.broadcast(a, b)
    low = (a << 16).to(tl.float32, bitcast=True) * (b << 16).to(tl.float32, bitcast=True)
    high_a = (a & -0x10000).to(tl.float32, bitcast=True)
    high = high_a * (b & -0x10000).to(tl.float32, bitcast=True)
    return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | high.to(tl.int32, bitcast=True)
