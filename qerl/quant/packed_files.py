"""NVFP4 checkpoints as files: which tool wrote one, and a fused matrix read from it, whoever it was.

Members of a fused group share one dequant_scale when qerl or the tools for vLLM wrote them. Where they do not, vLLM
takes one of them and decodes the others wrongly; here the group is re-packed under the largest and the loss reported.
"""

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.quant import compressed_tensors_format, modelopt_format
from qerl.quant.checkpoint_reader import Checkpoint, own_copy
from qerl.quant.layout import FusedLinear, Layout
from qerl.quant.nvfp4 import BLOCK_SIZE, E4M3_MAX, Nvfp4Weight, encode
from qerl.quant.packed import decibels, squared_sums
from qerl.quant.report import LinearReport

MIN_REPACK_SQNR_DB = 20.0
"""Re-packing below this is refused: it would cost as much as quantizing did."""
_SMALLEST_E4M3 = 2.0**-9


def check_quantization(checkpoint: Checkpoint) -> None:
    """Raise UserError, naming what the checkpoint is, unless it is NVFP4 that qerl reads."""
    config = checkpoint.quantization
    assert config is not None
    method = config.get("quant_method", config.get("quant_algo", "unknown"))
    if method == compressed_tensors_format.QUANT_METHOD:
        compressed_tensors_format.check_quantization(checkpoint)
    elif method == modelopt_format.QUANT_METHOD:
        modelopt_format.check_quantization(checkpoint)
    else:
        raise UserError(
            f"{checkpoint.folder}: already quantized by {method!r}, which qerl does not read; give the unquantized "
            f"model, or NVFP4 of compressed-tensors ({compressed_tensors_format.FORMAT}) or of modelopt"
        )


def _is_modelopt(checkpoint: Checkpoint) -> bool:
    config = checkpoint.quantization or {}
    return config.get("quant_method") == modelopt_format.QUANT_METHOD


def packed_shapes(checkpoint: Checkpoint, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the packed linears have in this checkpoint."""
    if _is_modelopt(checkpoint):
        return modelopt_format.packed_shapes(checkpoint, layout)
    return compressed_tensors_format.packed_shapes(layout)


def is_ignored(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor that is nobody's weight may be there all the same."""
    return _is_modelopt(checkpoint) and modelopt_format.is_ignored(name)


def reading_notes(checkpoint: Checkpoint, linears: list[LinearReport]) -> tuple[str, ...]:
    """What a user should know of how the checkpoint was read: scales not used, groups that were re-packed."""
    notes = []
    if _is_modelopt(checkpoint) and (note := modelopt_format.note_ignored(checkpoint.names)):
        notes.append(note)
    losses = [linear.sqnr_db for linear in linears if linear.sqnr_db is not None]
    if losses:
        notes.append(
            f"{len(losses)} fused matrices had members with different global scales and were re-packed under the "
            f"largest: worst SQNR {min(losses):.1f} dB"
        )
    return tuple(notes)


def read_fused(
    checkpoint: Checkpoint, fused: FusedLinear, device: torch.device
) -> tuple[Nvfp4Weight, float | None]:
    """A fused matrix from its members in a file, on `device`, and the SQNR in dB of re-packing it (None: not needed).

    Raises UserError when a tensor has values that NVFP4 cannot have, or re-packing would lose too much.
    """
    members = [_read_member(checkpoint, member, device) for member in fused.members]
    scales = torch.stack([member.dequant_scale for member in members])
    if torch.all(scales == scales[0]):
        return _stack(members, members[0].dequant_scale), None
    weight, sqnr_db = repack(members)
    if sqnr_db < MIN_REPACK_SQNR_DB:
        raise UserError(
            f"{checkpoint.folder}: {', '.join(fused.members)} have global scales too far apart to share one "
            f"({sqnr_db:.1f} dB < {MIN_REPACK_SQNR_DB:.0f} dB); quantize the model again with python -m qerl.quantize"
        )
    return weight, sqnr_db


def repack(members: list[Nvfp4Weight]) -> tuple[Nvfp4Weight, float]:
    """Members with different dequant_scales under the largest of them, and the SQNR in dB of doing so.

    Block scales take over the ratio and are rounded to E4M3 again; codes are rounded again to fit them. Members that
    have the largest scale keep their bits.
    """
    shared = torch.stack([member.dequant_scale for member in members]).max()
    repacked, signal, noise = [], 0.0, 0.0
    for member in members:
        ratio = member.dequant_scale / shared
        dense = member.expand(torch.float32).mul_(ratio)
        moved = member if ratio == 1 else _rescale(member, dense, ratio, shared)
        sums = squared_sums(dense, moved.expand(torch.float32))
        signal, noise = signal + sums[0], noise + sums[1]
        repacked.append(moved)
    return _stack(repacked, shared), decibels(signal, noise)


def _rescale(member: Nvfp4Weight, dense: Tensor, ratio: Tensor, shared: Tensor) -> Nvfp4Weight:
    """`dense` [N, K], the member's values in units of `shared`, with its block scales times `ratio`."""
    scales = (member.block_scales.float() * ratio).clamp(_SMALLEST_E4M3, E4M3_MAX)
    block_scales = scales.to(torch.float8_e4m3fn)
    codes = encode(dense.unflatten(1, (-1, BLOCK_SIZE)), block_scales.float())
    return Nvfp4Weight(codes, block_scales, shared)


def _read_member(checkpoint: Checkpoint, name: str, device: torch.device) -> Nvfp4Weight:
    read = modelopt_format if _is_modelopt(checkpoint) else compressed_tensors_format
    codes, block_scales, dequant_scale = read.read_member(checkpoint, name)
    types = (codes.dtype, block_scales.dtype, dequant_scale.dtype)
    if types != (torch.uint8, torch.float8_e4m3fn, torch.float32):
        raise UserError(
            f"{checkpoint.folder}: {name} is stored as {types}, not as uint8, float8_e4m3fn, float32"
        )
    if block_scales.view(torch.uint8).max() > 0x7E or not 0 < dequant_scale.item() < float("inf"):
        raise UserError(
            f"{checkpoint.folder}: {name} has a negative or NaN scale; the file is damaged"
        )
    return Nvfp4Weight(codes.to(device), block_scales.to(device), dequant_scale.to(device))


def _stack(members: list[Nvfp4Weight], dequant_scale: Tensor) -> Nvfp4Weight:
    """Members on top of each other in new storage."""
    device = members[0].device
    if len(members) == 1:
        codes, block_scales = members[0].codes, members[0].block_scales
        return Nvfp4Weight(
            own_copy(codes, device), own_copy(block_scales, device), dequant_scale.clone()
        )
    codes = torch.cat([member.codes for member in members])
    scale_bytes = torch.cat([member.block_scales.view(torch.uint8) for member in members])
    return Nvfp4Weight(codes, scale_bytes.view(torch.float8_e4m3fn), dequant_scale)
