"""The file format `nvfp4-pack-quantized` of compressed-tensors (llm-compressor's NVFP4A16), which vLLM loads.

Every linear has its own three tensors, fused ones too:

    NAME.weight_packed        uint8 [N, K/2]           our codes
    NAME.weight_scale         float8_e4m3fn [N, K/16]  our block scales
    NAME.weight_global_scale  float32 [1]              a DIVISOR: 1 / dequant_scale

This file is the boundary at which the divisor becomes the multiplier and back. Both ways round in fp32, and
1/(1/(1/x)) == 1/x there for every x: what was written is read back bit for bit.

Members of a fused group share one divisor when qerl or vLLM's tools wrote them. Where they do not, vLLM takes one of
them and decodes the others wrongly; here the group is re-packed under the largest dequant_scale and the loss reported.
"""

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.quant.checkpoint_reader import Checkpoint, own_copy
from qerl.quant.layout import FusedLinear, Layout
from qerl.quant.nvfp4 import BLOCK_SIZE, E4M3_MAX, Nvfp4Weight, encode
from qerl.quant.packed import decibels, squared_sums

QUANT_METHOD = "compressed-tensors"
FORMAT = "nvfp4-pack-quantized"
MIN_REPACK_SQNR_DB = 20.0
"""Re-packing below this is refused: it would cost as much as quantizing did."""

_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": BLOCK_SIZE,
    "symmetric": True,
    "dynamic": False,
}
_SMALLEST_E4M3 = 2.0**-9


def quantization_config() -> dict:
    """The `quantization_config` of config.json that describes what qerl writes: weights only, head left alone."""
    weights = _WEIGHTS | {"scale_dtype": "torch.float8_e4m3fn"}
    return {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def check_quantization(checkpoint: Checkpoint) -> None:
    """Raise UserError, naming what the checkpoint is, unless it is weight-only NVFP4 of compressed-tensors."""
    config = checkpoint.quantization
    assert config is not None
    method = config.get("quant_method", config.get("quant_algo", "unknown"))
    prefix = f"{checkpoint.folder}: already quantized"
    if method != QUANT_METHOD:
        raise UserError(
            f"{prefix} by {method!r}, which qerl does not read; give the unquantized model, "
            f"or one in {QUANT_METHOD} {FORMAT}"
        )
    groups = list(config.get("config_groups", {}).values())
    if config.get("format") != FORMAT or len(groups) != 1:
        raise UserError(
            f"{prefix} as {QUANT_METHOD} {config.get('format')!r} with {len(groups)} groups; qerl reads one group of {FORMAT}"
        )
    group = groups[0]
    other = {
        key: group["weights"].get(key)
        for key, value in _WEIGHTS.items()
        if group["weights"].get(key) != value
    }
    if other:
        raise UserError(f"{prefix} with weights {other}; qerl reads {_WEIGHTS}")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise UserError(f"{prefix} with {key}; qerl reads weight-only NVFP4 (NVFP4A16)")
    if config.get("kv_cache_scheme") is not None:
        raise UserError(f"{prefix} with a kv_cache_scheme; qerl reads weight-only NVFP4 (NVFP4A16)")


def packed_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that packed linears have in a file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for fused in layout.linears:
        for member, rows in zip(fused.members, fused.member_rows, strict=True):
            shapes[f"{member}.weight_packed"] = (rows, fused.num_columns // 2)
            shapes[f"{member}.weight_scale"] = (rows, fused.num_columns // BLOCK_SIZE)
            shapes[f"{member}.weight_global_scale"] = (1,)
    return shapes


def file_tensors(fused: FusedLinear, weight: Nvfp4Weight) -> dict[str, Tensor]:
    """The tensors of a fused matrix as the file has them, by name, on the CPU; codes and scales without a copy there."""
    tensors: dict[str, Tensor] = {}
    codes = weight.codes.cpu().split(fused.member_rows)
    block_scales = weight.block_scales.cpu().split(fused.member_rows)
    for member, member_codes, member_scales in zip(fused.members, codes, block_scales, strict=True):
        tensors[f"{member}.weight_packed"] = member_codes
        tensors[f"{member}.weight_scale"] = member_scales
        tensors[f"{member}.weight_global_scale"] = (1 / weight.dequant_scale).cpu().reshape(1)
    return tensors


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
    codes = checkpoint.tensor(f"{name}.weight_packed")
    block_scales = checkpoint.tensor(f"{name}.weight_scale")
    divisor = checkpoint.tensor(f"{name}.weight_global_scale")
    types = (codes.dtype, block_scales.dtype, divisor.dtype)
    if types != (torch.uint8, torch.float8_e4m3fn, torch.float32):
        raise UserError(
            f"{checkpoint.folder}: {name} is stored as {types}, not as uint8, float8_e4m3fn, float32"
        )
    if block_scales.view(torch.uint8).max() > 0x7E or not 0 < divisor.item() < float("inf"):
        raise UserError(
            f"{checkpoint.folder}: {name} has a negative or NaN scale; the file is damaged"
        )
    return Nvfp4Weight(
        codes.to(device), block_scales.to(device), (1 / divisor).reshape(()).to(device)
    )


def _stack(members: list[Nvfp4Weight], dequant_scale: Tensor) -> Nvfp4Weight:
    """Members on top of each other in new storage."""
    device = members[0].device
    if len(members) == 1:
        codes, block_scales = members[0].codes, members[0].block_scales
        return Nvfp4Weight(own_copy(codes, device), own_copy(block_scales, device), dequant_scale)
    codes = torch.cat([member.codes for member in members])
    scale_bytes = torch.cat([member.block_scales.view(torch.uint8) for member in members])
    return Nvfp4Weight(codes, scale_bytes.view(torch.float8_e4m3fn), dequant_scale)
