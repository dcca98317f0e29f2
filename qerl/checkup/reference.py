"""What kernels are compared with: random operands, and results in float64 by other means than the code under test.

Used by the doctor, the tests and the benchmarks alike.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from qerl.quant.nvfp4 import BLOCK_SIZE, E2M1_VALUES, Nvfp4Weight
from qerl.types import Row

if TYPE_CHECKING:
    from qerl.quant.nf4 import Nf4Weight

ROUNDED_ONCE = 2.5e-3
"""Relative error allowed to sums in fp32 that are rounded to bf16 once; 0.0017 is usual."""
ROUNDED_PARTS = 8e-3
"""The same for bf16 partial sums added in bf16: 0.0061 for 24 parts (docs/kernels.md)."""
_ROWS = 4096
"""Rows compared at a time in float64"""
_NF4_BLOCK, _ABSMAX_BLOCK = 64, 256
"""Weights of NF4 that share a maximum, and maxima that share one of the second level"""


def generator(device: torch.device, seed: int = 0) -> torch.Generator:
    """Random numbers that are the same at every call."""
    return torch.Generator(device).manual_seed(seed)


def random_nvfp4(
    num_rows: int, num_columns: int, device: torch.device, scale: float = 1e-4
) -> Nvfp4Weight:
    """Every code and every block scale from 0 and 2^-9 to 448, at random."""
    rng = generator(device)
    codes = torch.randint(0, 256, (num_rows, num_columns // 2), generator=rng, device=device)
    scales = torch.randint(
        0, 127, (num_rows, num_columns // BLOCK_SIZE), generator=rng, device=device
    )
    return Nvfp4Weight(
        codes.to(torch.uint8),
        scales.to(torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor(scale, device=device),
    )


def every_nvfp4(device: torch.device) -> Nvfp4Weight:
    """Every pair of codes under every block scale: [127, 512]."""
    codes = torch.arange(256, device=device).repeat(127, 1).to(torch.uint8)
    scales = torch.arange(127, device=device).to(torch.uint8)[:, None].repeat(1, 32)
    scale = torch.tensor(1.0, device=device)
    return Nvfp4Weight(codes, scales.view(torch.float8_e4m3fn), scale)


def is_expansion(weight: Nvfp4Weight, out: Tensor) -> bool:
    """Whether `out` is codes times block scales to the last bit, the sign of zero included."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=out.device)
    for start in range(0, len(out), _ROWS):
        codes = weight.codes[start : start + _ROWS]
        values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1)
        scales = weight.block_scales[start : start + _ROWS].double()
        exact = values.flatten(1).unflatten(1, (-1, BLOCK_SIZE)) * scales.unsqueeze(-1)
        exact, got = exact.flatten(1), out[start : start + _ROWS].double()
        if not (torch.equal(got, exact) and torch.equal(got.signbit(), exact.signbit())):
            return False
    return True


def exact_nf4(weight: "Nf4Weight") -> Tensor:
    """NF4's formula (`qerl.quant.nf4`) in float64 [N, K], by table lookups instead of bitsandbytes' kernels."""
    members = []
    for member in weight.members:
        state, nested = member.state, member.state.state2
        assert nested is not None and state.offset is not None and state.code is not None
        assert nested.code is not None
        codes = member.codes.flatten()
        values = state.code.double()[torch.stack((codes >> 4, codes & 15), -1).flatten().int()]
        maxima = nested.code.double()[state.absmax.flatten().int()]
        coarse = nested.absmax.double().repeat_interleave(_ABSMAX_BLOCK)[: len(maxima)]
        maxima = maxima * coarse + state.offset.double()
        dense = values.view(-1, _NF4_BLOCK) * maxima[:, None]
        members.append(dense.view(member.shape))
    return torch.cat(members)


def with_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor, members: tuple[int, ...]) -> Tensor:
    """y + (x A^T) B^T member by member in float64, x A^T rounded to x's dtype as PEFT's is."""
    out, start, rank = y.double(), 0, b.shape[1]
    for member, num_rows in enumerate(members):
        down = (x.double() @ a[member * rank : (member + 1) * rank].double().t()).to(x.dtype)
        out[:, start : start + num_rows] += down.double() @ b[start : start + num_rows].double().t()
        start += num_rows
    return out


def gated(exact: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up] in float64."""
    gate, up = exact.double().chunk(2, dim=1)
    return functional.silu(gate) * up


def attention(query: Tensor, key: Tensor, value: Tensor, rows: list[Row]) -> Tensor:
    """Causal attention of packed rows in float64 [T, Hq, D], row by row, with every mask written out."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (t.double().transpose(0, 1) for t in (query, key, value))
    key, value = (t.repeat_interleave(groups, 0) for t in (key, value))
    outputs, start = [], 0
    for row in rows:
        stop = start + row.num_tokens
        branch = [0] * row.prefix
        for number, length in enumerate(row.branches, start=1):
            branch += [number] * length
        owner = torch.tensor(branch, device=query.device)
        sees = (owner[:, None] == owner[None]) | (owner[None] == 0)
        scores = query[:, start:stop] @ key[:, start:stop].mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~sees.tril(), -torch.inf)
        outputs.append(scores.softmax(-1) @ value[:, start:stop])
        start = stop
    return torch.cat(outputs, dim=1).transpose(0, 1)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||; not a number where `found` has one that is none."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()
