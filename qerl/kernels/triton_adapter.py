"""Triton kernels for a LoRA adapter beside a packed product: y += (x A^T) B^T.

With the few tokens of a decode step an adapter costs launches and latency, not bytes. Two launches do all of it for a fused matrix of up to three
members (q, k, v), each with its own A_i [r, K] and B_i [N_i, r]:

    shrink   parts[s] = x[:, K_s] A[:, K_s]^T        [S, M, n r] fp32: K is cut into S ranges, so that many SMs read
    grow     y[:, N_i] += bf16(sum_s parts[s][:, i r : (i + 1) r]) B_i^T

A = [A_1; ...] is stacked, B = [B_1; ...] too: [N, r], not block-diagonal, so nothing is multiplied with zeros. Parts are
added in a fixed order: the result is the same at every call, and the sum over K is rounded to bf16 once, as in PEFT.
`grow_gated` finishes an MLP's gate and up in the same launch, silu(gate) * up, and saves a pass over both; so growing serves a prefill too.

Both launches are programmatic dependents (PDL) where asked: their grids are set up while the kernel before them ends.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_MEMBERS = 3
"""Members of a fused matrix: q, k and v"""
_LEAST = 16
"""Least size of an operand of `tl.dot`"""


@dataclass(frozen=True)
class Launch:
    """How a call is cut. Sizes are powers of two."""

    splits: int
    """S: ranges of K"""
    columns: int
    """Columns of A in one step of a program"""
    shrink_tokens: int
    grow_tokens: int
    """Tokens a program"""
    grow_rows: int
    """Rows of B a program; they are one member's"""
    beside: bool = False
    """Shrink on a stream of its own, beside the packed product"""
    shrink_warps: int = 4
    grow_warps: int = 4
    dependent: bool = True
    """Programmatic dependent launch: compute capability 9.0 and above"""


def launch_for(num_tokens: int, shape: tuple[int, int]) -> Launch:
    """How to cut for M tokens and a matrix [N, K]: near the fastest of those tried on an H200 (docs/kernels.md).

    Beside the product, shrinking has time: few ranges of K, which make growing fast. It gains nothing where K is long or the product
    needs the whole GPU. After the product more ranges make it faster, and growing slower, the more so the more rows and tokens
    read all parts.
    """
    num_rows, num_columns = shape
    if num_tokens > 512:
        return Launch(1, 128, 64, 64, 128, grow_warps=8)
    shrink_tokens = min(64, max(_LEAST, triton.next_power_of_2(num_tokens)))
    few = num_tokens <= 32
    if num_columns <= 8192 and (few or (num_rows <= 8192 and num_tokens <= 128)):
        splits = triton.next_power_of_2(triton.cdiv(num_columns, 4096 if few else 2048))
        return Launch(splits, 128, shrink_tokens, _LEAST, 128, beside=True)
    splits = triton.next_power_of_2(triton.cdiv(num_columns, 1024))
    if num_tokens > 128:
        splits = triton.cdiv(splits, 4)
    splits = max(min(splits, 4), splits if num_rows <= 16384 else 0)
    return Launch(splits, 128, shrink_tokens, _LEAST, 128)


def shrink(x: Tensor, a: Tensor, launch: Launch) -> Tensor:
    """x [M, K], A [n r, K] -> [S, M, n r] fp32: the parts of x A^T over S ranges of K.

    x in bf16 (fp32 in the interpreter), its rows contiguous; A in the same dtype, contiguous.
    """
    (num_tokens, num_columns), width = x.shape, a.shape[0]
    parts = torch.empty(launch.splits, num_tokens, width, dtype=torch.float32, device=x.device)
    columns = min(launch.columns, triton.next_power_of_2(num_columns))
    block_width = min(64, max(_LEAST, triton.next_power_of_2(width)))
    grid = (
        launch.splits,
        triton.cdiv(width, block_width),
        triton.cdiv(num_tokens, launch.shrink_tokens),
    )
    _shrink[grid](
        x,
        a,
        parts,
        num_tokens,
        num_columns,
        width,
        x.stride(0),
        STEPS=triton.cdiv(triton.cdiv(num_columns, launch.splits), columns),
        TOKENS=launch.shrink_tokens,
        WIDTH=block_width,
        COLUMNS=columns,
        DEPENDENT=launch.dependent,
        num_warps=launch.shrink_warps,
        num_stages=4,
        launch_pdl=launch.dependent,
    )
    return parts


def grow(
    y: Tensor, parts: Tensor, b: Tensor, member_rows: tuple[int, ...], launch: Launch
) -> Tensor:
    """y [M, N] += bf16(sum of parts) B^T, member by member, in place.

    Args:
        y: rows contiguous.
        parts: [S, M, n r] of `shrink`.
        b: [N, r] in y's dtype, contiguous: B of each member, one below the other.
        member_rows: N_i, at most three.

    Raises ValueError for members that do not fit or that it cannot take.
    """
    check_members(parts.shape[2], b, member_rows)
    num_rows = b.shape[0]
    block_rows = _tile_of(member_rows[:-1], launch.grow_rows)
    first = member_rows[0]
    second = sum(member_rows[:2])  # of one or two members the end, where no tile starts
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(y.shape[0], launch.grow_tokens))
    _grow[grid](
        y,
        parts,
        b,
        y.shape[0],
        num_rows,
        parts.shape[2],
        y.stride(0),
        first,
        second,
        ROWS=block_rows,
        **_grow_constants(parts, b, launch),
    )
    return y


def grow_gated(
    y: Tensor, parts: Tensor, b: Tensor, member_rows: tuple[int, ...], launch: Launch
) -> Tensor:
    """silu(gate) * up [M, N/2] of y = [gate, up] [M, N] with the adapter added; arguments as in `grow`; y stays as it is.

    Rounded where the trainer rounds: gate, up and the product.
    """
    check_members(parts.shape[2], b, member_rows)
    if len(member_rows) != 2 or member_rows[0] != member_rows[1]:
        raise ValueError(f"gate and up are two members of equal size, not {member_rows}")
    half = member_rows[0]
    out = torch.empty(y.shape[0], half, dtype=y.dtype, device=y.device)
    block_rows = min(launch.grow_rows, max(_LEAST, triton.next_power_of_2(half)))
    grid = (triton.cdiv(half, block_rows), triton.cdiv(y.shape[0], launch.grow_tokens))
    _grow_gated[grid](
        y,
        parts,
        b,
        out,
        y.shape[0],
        half,
        parts.shape[2],
        y.stride(0),
        ROWS=block_rows,
        **_grow_constants(parts, b, launch),
    )
    return out


def check_members(width: int, b: Tensor, member_rows: tuple[int, ...]) -> None:
    """Raise ValueError when A [n r, K] and B [N, r] are not of these members, or are more than the kernels take."""
    num_rows, rank = b.shape
    if sum(member_rows) != num_rows or width != rank * len(member_rows):
        raise ValueError(
            f"A has {width} rows and B is {num_rows} x {rank}: not {len(member_rows)} members of {member_rows} rows"
        )
    if len(member_rows) > MAX_MEMBERS:
        raise ValueError(f"{len(member_rows)} members; the kernels take {MAX_MEMBERS}")


def _tile_of(boundaries: tuple[int, ...], most: int) -> int:
    """Largest power of two up to `most` that divides all; below 16 ValueError."""
    tile = most
    while any(rows % tile for rows in boundaries):
        tile //= 2
    if tile < _LEAST:
        raise ValueError(f"members of {boundaries} rows; each has to be a multiple of {_LEAST}")
    return tile


def _grow_constants(parts: Tensor, b: Tensor, launch: Launch) -> dict:
    return {
        "SPLITS": parts.shape[0],
        "BLOCK_SPLITS": triton.next_power_of_2(parts.shape[0]),
        "RANK": b.shape[1],
        "BLOCK_RANK": max(_LEAST, triton.next_power_of_2(b.shape[1])),
        "TOKENS": launch.grow_tokens,
        "DEPENDENT": launch.dependent,
        "num_warps": launch.grow_warps,
        "launch_pdl": launch.dependent,
    }


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink(
    x,
    a,
    parts,
    num_tokens,
    num_columns,
    width,
    x_stride,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    split = tl.program_id(0)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    column = split * STEPS * COLUMNS + tl.arange(0, COLUMNS)
    x_at = x + token[:, None] * x_stride + column[None, :]
    a_at = a + row[None, :] * num_columns + column[:, None]
    total = tl.zeros((TOKENS, WIDTH), dtype=tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for step in range(STEPS):
        inside = column < num_columns - step * COLUMNS
        x_tile = tl.load(x_at, mask=(token < num_tokens)[:, None] & inside[None, :], other=0.0)
        a_tile = tl.load(a_at, mask=(row < width)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
        x_at += COLUMNS
        a_at += COLUMNS
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    at = parts + (split * num_tokens + token[:, None]) * width + row[None, :]
    tl.store(at, total, mask=(token < num_tokens)[:, None] & (row < width)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _grow(
    y,
    parts,
    b,
    num_tokens,
    num_rows,
    width,
    y_stride,
    first,
    second,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    start = tl.program_id(0) * ROWS
    member = (start >= first).to(tl.int32) + (start >= second).to(tl.int32)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = start + tl.arange(0, ROWS)
    b_tile = _load_b(b, row, num_rows, RANK, BLOCK_RANK)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    inside = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    at = y + token[:, None].to(tl.int64) * y_stride + row[None, :]
    base = tl.load(at, mask=inside, other=0.0)
    down = _sum_parts(
        parts + member * RANK, token, num_tokens, width, SPLITS, BLOCK_SPLITS, RANK, BLOCK_RANK
    )
    delta = tl.dot(down.to(b_tile.dtype), b_tile, input_precision="ieee")
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(at, (base.to(tl.float32) + delta).to(base.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _grow_gated(
    y,
    parts,
    b,
    out,
    num_tokens,
    half,
    width,
    y_stride,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_gate = _load_b(b, row, half, RANK, BLOCK_RANK)
    b_up = _load_b(b + half * RANK, row, half, RANK, BLOCK_RANK)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    inside = (token < num_tokens)[:, None] & (row < half)[None, :]
    long_token = token[:, None].to(tl.int64)
    at = y + long_token * y_stride + row[None, :]
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + half, mask=inside, other=0.0)
    down_gate = _sum_parts(parts, token, num_tokens, width, SPLITS, BLOCK_SPLITS, RANK, BLOCK_RANK)
    down_up = _sum_parts(
        parts + RANK, token, num_tokens, width, SPLITS, BLOCK_SPLITS, RANK, BLOCK_RANK
    )
    dtype = gate.dtype
    delta = tl.dot(down_gate.to(dtype), b_gate, input_precision="ieee")
    gate = (gate.to(tl.float32) + delta).to(dtype).to(tl.float32)
    delta = tl.dot(down_up.to(dtype), b_up, input_precision="ieee")
    up = (up.to(tl.float32) + delta).to(dtype).to(tl.float32)
    activated = gate / (1 + tl.exp(-gate))
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + long_token * half + row[None, :], (activated * up).to(dtype), mask=inside)


@triton.jit
def _load_b(b, row, num_rows, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr):
    """[BLOCK_RANK, ROWS]: rows of B, transposed."""
    k = tl.arange(0, BLOCK_RANK)
    at = b + row[None, :] * RANK + k[:, None]
    return tl.load(at, mask=(row < num_rows)[None, :] & (k < RANK)[:, None], other=0.0)


@triton.jit
def _sum_parts(
    parts,
    token,
    num_tokens,
    width,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """[TOKENS, BLOCK_RANK]: one member's sum over all parts, loaded at once so that their latencies overlap."""
    k = tl.arange(0, BLOCK_RANK)
    split = tl.arange(0, BLOCK_SPLITS)
    at = parts + (split[:, None, None] * num_tokens + token[None, :, None]) * width + k[None, None]
    inside = (split < SPLITS)[:, None, None] & (token < num_tokens)[None, :, None]
    return tl.sum(tl.load(at, mask=inside & (k < RANK)[None, None], other=0.0), axis=0)
