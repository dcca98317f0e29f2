"""The NVFP4 checkpoints of NVIDIA's ModelOpt (TensorRT Model Optimizer): nvidia/...-FP4 on the hub, for example.

    NAME.weight           uint8 [N, K/2]           the same codes as everywhere, element 2i in the low half of a byte
    NAME.weight_scale     float8_e4m3fn [N, K/16]  block scales
    NAME.weight_scale_2   float32 []               dequant_scale itself: it MULTIPLIES, unlike compressed-tensors' divisor

What describes them is `quantization_config` in config.json (quant_method modelopt), or hf_quant_config.json beside it.
NVFP4 means that an engine may round activations to four bits too, with `input_scale`, and attention may keep its cache
in fp8, with `k_scale` and `v_scale`. qerl takes the weights only: those scales are left where they are, and that is said.
Formats that change the weights' meaning (AWQ's `pre_quant_scale`) are refused.
"""

from collections.abc import Iterable

from torch import Tensor

from qerl.errors import UserError
from qerl.quant.checkpoint_reader import Checkpoint
from qerl.quant.layout import Layout
from qerl.quant.nvfp4 import BLOCK_SIZE

QUANT_METHOD = "modelopt"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_IGNORED = {
    ".input_scale": "activation scales",
    ".k_scale": "KV cache scales",
    ".v_scale": "KV cache scales",
    ".q_scale": "KV cache scales",
}


def check_quantization(checkpoint: Checkpoint) -> None:
    """Raise UserError, naming what the checkpoint is, unless its weights are NVFP4 in blocks of 16."""
    config = checkpoint.quantization
    assert config is not None
    prefix = f"{checkpoint.folder}: already quantized by modelopt"
    algorithm = config.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise UserError(f"{prefix} as {algorithm!r}; qerl reads {' and '.join(ALGORITHMS)}")
    if (size := _group_size(config)) != BLOCK_SIZE:
        raise UserError(f"{prefix} in groups of {size}; NVFP4 has groups of {BLOCK_SIZE}")


def _group_size(config: dict) -> object:
    """Stated once for all, or in each group of a newer file; 16 where nothing is said."""
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        stated = {group["weights"].get("group_size", BLOCK_SIZE) for group in groups.values()}
        return stated.pop() if len(stated) == 1 else sorted(stated)
    return config.get("group_size", BLOCK_SIZE)


def packed_shapes(checkpoint: Checkpoint, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that packed linears have in a file; the scalar is [] or [1]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for fused in layout.linears:
        for member, rows in zip(fused.members, fused.member_rows, strict=True):
            shapes[f"{member}.weight"] = (rows, fused.num_columns // 2)
            shapes[f"{member}.weight_scale"] = (rows, fused.num_columns // BLOCK_SIZE)
            scalar = f"{member}.weight_scale_2"
            is_vector = scalar in checkpoint.names and checkpoint.shape(scalar) == (1,)
            shapes[scalar] = (1,) if is_vector else ()
    return shapes


def read_member(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and the fp32 dequant_scale [] of one linear, as views of the file."""
    return (
        checkpoint.tensor(f"{name}.weight"),
        checkpoint.tensor(f"{name}.weight_scale"),
        checkpoint.tensor(f"{name}.weight_scale_2").reshape(()),
    )


def is_ignored(name: str) -> bool:
    """Whether a tensor is a scale of activations or of the KV cache, which weight-only use does not need."""
    return name.endswith(tuple(_IGNORED))


def note_ignored(names: Iterable[str]) -> str | None:
    """What to say about the tensors that were left where they are; None if there are none."""
    ignored = sorted(name for name in names if is_ignored(name))
    if not ignored:
        return None
    kinds = sorted({_IGNORED["." + name.rpartition(".")[2]] for name in ignored}, key=str.lower)
    return (
        f"{len(ignored)} {' and '.join(kinds)} of the checkpoint are not used: activations and the KV cache stay "
        "unquantized"
    )
