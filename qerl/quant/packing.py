"""From a checkpoint's tensors to packed matrices, one fused group at a time.

`check_tensors` compares the file's headers with the model's layout before any weight is read: every tensor must be
there in its shape, and every tensor in the file must have been expected. `pack_linear` then reads the members of one
group, packs them and measures what that cost.
"""

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.heartbeat import beat
from qerl.quant import FORMATS
from qerl.quant.checkpoint_reader import Checkpoint
from qerl.quant.layout import HEAD, FusedLinear, Layout
from qerl.quant.nvfp4 import BLOCK_SIZE, Rounding
from qerl.quant.packed import PackedWeight, decibels, dequantize, squared_sums
from qerl.quant.packed_files import is_ignored, packed_shapes
from qerl.quant.report import LinearReport

_NAMES_SHOWN = 4
_SQNR_ROWS = 256
"""Rows expanded at a time to be compared."""


def check_tensors(checkpoint: Checkpoint, layout: Layout, *, packed: bool) -> None:
    """Raise UserError, by name, for tensors that are missing, have another shape, or that nobody would read.

    Rotary `inv_freq` buffers, and a head that equals the embedding it is tied to, are tolerated.
    """
    expected = dict(layout.dense) | (
        packed_shapes(checkpoint, layout) if packed else _dense_shapes(layout)
    )
    missing = [name for name in expected if name not in checkpoint.names]
    if missing:
        raise UserError(f"{checkpoint.folder}: {_some(missing)} missing from the weight files")
    wrong = [name for name, shape in expected.items() if checkpoint.shape(name) != shape]
    if wrong:
        raise UserError(
            f"{checkpoint.folder}: {wrong[0]} is {list(checkpoint.shape(wrong[0]))} in the file and "
            f"{list(expected[wrong[0]])} by config.json ({len(wrong)} such tensors)"
        )
    unread = sorted(
        name
        for name in checkpoint.names - expected.keys()
        if not name.endswith("rotary_emb.inv_freq") and not is_ignored(checkpoint, name)
    )
    if layout.tied and HEAD in unread:
        _check_tied_head(checkpoint)
        unread.remove(HEAD)
    if unread:
        raise UserError(
            f"{checkpoint.folder}: nothing in this model reads {_some(unread)}; wrong config.json?"
        )


def check_columns(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raise UserError naming a matrix that NVFP4 cannot hold."""
    for fused in layout.linears:
        if fused.num_columns % BLOCK_SIZE:
            raise UserError(
                f"{checkpoint.folder}: {fused.name} has {fused.num_columns} columns; NVFP4 needs a multiple of "
                f"{BLOCK_SIZE}. Use nf4 or bf16"
            )


def pack_linear(
    checkpoint: Checkpoint,
    fused: FusedLinear,
    format: str,
    rounding: Rounding,
    device: torch.device,
) -> tuple[PackedWeight, LinearReport]:
    """Read, pack on `device` and measure one fused matrix of a dense checkpoint."""
    beat()
    members = [checkpoint.tensor(f"{member}.weight").to(device) for member in fused.members]
    other = [member.dtype for member in members if member.dtype not in _SOURCE_DTYPES]
    if other:
        raise UserError(
            f"{checkpoint.folder}: {fused.name} is stored as {other[0]}; qerl packs bf16, fp16 or fp32"
        )
    try:
        weight = FORMATS[format](members, rounding)
    except UserError as error:
        raise UserError(f"{checkpoint.folder}: {fused.name}: {error}") from error
    sqnr_db = _measure(members, weight, format)
    return weight, LinearReport(fused.name, weight.shape, weight.nbytes, sqnr_db)


_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _measure(members: list[Tensor], weight: PackedWeight, format: str) -> float:
    """SQNR in dB of the whole group, a few rows at a time; NF4, which cannot be cut there, a member at a time."""
    row, signal, noise = 0, 0.0, 0.0
    for member in members:
        for part in member.split(len(member) if format == "nf4" else _SQNR_ROWS):
            sums = squared_sums(part, dequantize(weight.rows(row, row + len(part)), torch.float32))
            signal, noise = signal + sums[0], noise + sums[1]
            row += len(part)
    return decibels(signal, noise)


def _dense_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {
        f"{member}.weight": (rows, fused.num_columns)
        for fused in layout.linears
        for member, rows in zip(fused.members, fused.member_rows, strict=True)
    }


def _check_tied_head(checkpoint: Checkpoint) -> None:
    if not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor("model.embed_tokens.weight")):
        raise UserError(
            f"{checkpoint.folder}: {HEAD} differs from the embedding, but config.json has tie_word_embeddings = true; "
            "set it to false if the head is meant"
        )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (
        f" and {more} more tensors are" if more > 0 else " is" if len(names) == 1 else " are"
    )
