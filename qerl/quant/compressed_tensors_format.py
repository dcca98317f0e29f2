"""The file format `nvfp4-pack-quantized` of compressed-tensors (llm-compressor's NVFP4A16), which vLLM loads.

Every linear has its own three tensors, fused ones too:

    NAME.weight_packed        uint8 [N, K/2]           our codes
    NAME.weight_scale         float8_e4m3fn [N, K/16]  our block scales
    NAME.weight_global_scale  float32 [1]              a DIVISOR: 1 / dequant_scale

This file is the boundary at which the divisor becomes the multiplier and back. Both ways round in fp32, and
1/(1/(1/x)) == 1/x there for every x: what was written is read back bit for bit.
"""

from torch import Tensor

from qerl.errors import UserError
from qerl.quant.checkpoint_reader import Checkpoint
from qerl.quant.layout import FusedLinear, Layout
from qerl.quant.nvfp4 import BLOCK_SIZE, Nvfp4Weight

QUANT_METHOD = "compressed-tensors"
FORMAT = "nvfp4-pack-quantized"

_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": BLOCK_SIZE,
    "symmetric": True,
    "dynamic": False,
}


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
    """Raise UserError, naming what the checkpoint is, unless it is weight-only NVFP4."""
    config = checkpoint.quantization
    assert config is not None
    prefix = f"{checkpoint.folder}: already quantized"
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


def read_member(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and the fp32 dequant_scale [] of one linear, as views of the file where they can be."""
    divisor = checkpoint.tensor(f"{name}.weight_global_scale")
    return (
        checkpoint.tensor(f"{name}.weight_packed"),
        checkpoint.tensor(f"{name}.weight_scale"),
        (1 / divisor).reshape(()),
    )
