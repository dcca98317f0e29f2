"""Random little checkpoints of every family, and ways to read, pack and spoil them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qerl.errors import UserError
from qerl.quant import checkpoint_writer
from qerl.quant.base_weights import BaseWeights
from qerl.quant.checkpoint_reader import Checkpoint

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def save_model(
    folder: Path,
    kind: str = "llama",
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **saving,
) -> Path:
    """A random model of a family, biases and norms included, as transformers saves it."""
    model_class, config_class = MODELS[kind]
    torch.manual_seed(1)
    model = model_class(config_class(**SIZES, tie_word_embeddings=tied))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
    model.to(dtype).save_pretrained(folder, **saving)
    return folder


def load(folder: Path, format: str = "nvfp4", **options) -> BaseWeights:
    return BaseWeights.load(
        folder, **({"format": format, "dtype": torch.float32, "device": CPU} | options)
    )


def source_tensors(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_nvfp4(source: Path, out: Path, **options) -> Path:
    out.mkdir()
    options = {"rounding": "four_over_six", "device": CPU} | options
    checkpoint_writer.write_packed(Checkpoint(source), out, **options)
    return out


def refused(folder: Path, match: str, **options) -> None:
    with pytest.raises(UserError, match=match):
        load(folder, **options)
