"""NF4 with double quantization: bitsandbytes' 4-bit format, the base of QLoRA (arXiv 2305.14314).

    W.flat[i] = NF4(codes[i]) * (MAP(absmax[i // 64]) * absmax2[i // 64 // 256] + offset)      (4.13 bits a weight)

NF4's 16 values are quantiles of a Gaussian. Blocks of 64 run through the flattened matrix; their maxima are themselves
8-bit, relative to the matrix's mean maximum. All of it is bitsandbytes' arithmetic; this file only keeps it together.

`offset` and the blocks of 256 belong to a matrix, so a fused group keeps one quant state PER MEMBER: quantizing q, k
and v as one would give other numbers than every QLoRA run has. For the same reason `rows` cuts only between members.
There is no dequant_scale: block maxima are applied in `expand`, which rounds to the asked dtype once.
"""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit, quantize_blockwise
from torch import Tensor

from qerl.quant.packed import check_rows

BLOCK_SIZE = 64
_ABSMAX_BLOCK_SIZE = 256
_CHUNK_ELEMENTS = 1 << 18
"""Weights quantized at a time, rounded down to 64 rows so that no block is cut."""


@dataclass(frozen=True)
class Nf4Matrix:
    """One quantized matrix [N, K]."""

    codes: Tensor
    """uint8 [N*K/2, 1], the first of two values in the HIGH nibble"""
    state: QuantState
    """bitsandbytes' description: absmax uint8 [N*K/64], state2.absmax float32 [N*K/64/256], offset float32 []"""
    shape: tuple[int, int]


@dataclass(frozen=True)
class Nf4Weight:
    """The matrices of one fused group, [sum N_i, K] (`qerl.quant.packed.PackedWeight`)."""

    members: tuple[Nf4Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(member.shape[0] for member in self.members), self.members[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.members[0].codes.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def dequant_scale(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop, which must begin and end where members do."""
        check_rows(start, stop, self.shape[0])
        row, chosen, bounds = 0, [], [0]
        for member in self.members:
            if start <= row < stop:
                chosen.append(member)
            row += member.shape[0]
            bounds.append(row)
        if start not in bounds or stop not in bounds:
            raise ValueError(f"NF4 rows can be cut only at {bounds}, not at {start}..{stop}")
        return type(self)(tuple(chosen))

    def expand(self, dtype: torch.dtype) -> Tensor:
        if len(self.members) == 1:
            return _dequantize(self.members[0], dtype)
        dense = torch.empty(self.shape, dtype=dtype, device=self.device)
        parts = dense.split([member.shape[0] for member in self.members])
        for member, part in zip(self.members, parts, strict=True):
            _dequantize(member, dtype, part)
        return dense

    def tensors(self) -> dict[str, Tensor]:
        """Stored tensors as `INDEX.FIELD`. The two constant value tables, shared by all weights, are not among them."""
        found = {}
        for index, member in enumerate(self.members):
            state, nested = member.state, member.state.state2
            assert nested is not None and state.offset is not None
            found[f"{index}.codes"] = member.codes
            found[f"{index}.absmax"] = state.absmax
            found[f"{index}.absmax2"] = nested.absmax
            found[f"{index}.offset"] = state.offset
        return found

    def to(self, device: torch.device | str) -> Self:
        if torch.device(device) == self.device:
            return self
        moved = []
        for member in self.members:
            state = copy.deepcopy(member.state)
            state.to(device)
            moved.append(Nf4Matrix(member.codes.to(device), state, member.shape))
        return type(self)(tuple(moved))


def pack_nf4(members: list[Tensor]) -> Nf4Weight:
    """Quantize the matrices [N_i, K] (fp32, fp16 or bf16) of one fused group, each by itself."""
    return Nf4Weight(tuple(_quantize(member) for member in members))


def _quantize(member: Tensor) -> Nf4Matrix:
    """What `quantize_4bit(member, compress_statistics=True)` gives, in parts: on the CPU that takes 12 bytes a weight.

    Blocks are independent of each other; the second quantization, of their maxima, sees all of them.
    """
    num_rows, num_columns = member.shape
    step = max(BLOCK_SIZE, _CHUNK_ELEMENTS // num_columns // BLOCK_SIZE * BLOCK_SIZE)
    parts = [
        quantize_4bit(part.contiguous(), blocksize=BLOCK_SIZE, quant_type="nf4")
        for part in member.split(step)
    ]
    codes = torch.cat([codes for codes, _ in parts])
    absmax = torch.cat([state.absmax for _, state in parts])
    offset = absmax.mean()
    absmax_codes, absmax_state = quantize_blockwise(absmax - offset, blocksize=_ABSMAX_BLOCK_SIZE)
    state = QuantState(
        absmax=absmax_codes,
        shape=member.shape,
        dtype=member.dtype,
        blocksize=BLOCK_SIZE,
        code=parts[0][1].code,
        quant_type="nf4",
        offset=offset,
        state2=absmax_state,
    )
    return Nf4Matrix(codes, state, (num_rows, num_columns))


def _dequantize(member: Nf4Matrix, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Dense [N, K], written into `out` if there is one. bitsandbytes knows no fp64: that is cast from fp32."""
    num_rows, num_columns = member.shape
    state = copy.copy(member.state)
    state.dtype = torch.float32 if dtype == torch.float64 else dtype
    # bitsandbytes 0.50's CPU kernel starts a new block at each row, which not every shape has (K = 96).
    cut = num_columns % BLOCK_SIZE > 0
    shape = (1, num_rows * num_columns) if cut else (num_rows, num_columns)
    state.shape = torch.Size(shape)
    if out is not None and out.is_cuda and state.dtype == dtype:
        return dequantize_4bit(member.codes, state, out=out.view(shape))
    dense = dequantize_4bit(member.codes, state).view(member.shape)
    return dense.to(dtype) if out is None else out.copy_(dense)
