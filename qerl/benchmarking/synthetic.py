"""Models of random weights in the shape of real ones: right for speed and memory, made on the device without a file.

A 32B checkpoint is 65 GB; here each fused matrix is drawn in bf16, packed and forgotten. Magnitudes are a trained model's
roughly, so that next-token distributions are neither flat nor certain and rounding errors do not grow through the layers.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qerl.errors import UserError
from qerl.families import FAMILIES
from qerl.kernels.humming_layout import mma_of, pack
from qerl.model.tiny import byte_tokenizer
from qerl.planning.known_models import known_config
from qerl.quant import FORMATS
from qerl.quant.base_weights import BaseWeights
from qerl.quant.checkpoint_writer import ShardWriter
from qerl.quant.compressed_tensors_format import file_tensors, quantization_config
from qerl.quant.layout import FusedLinear, Layout, build_layout, is_norm
from qerl.quant.packed import PackedWeight
from qerl.quant.report import LinearReport, PackingReport
from qerl.settings.presets import preset_folder, preset_names, read_toml

SHAPES = {  # hidden, intermediate, layers, query heads, key heads, vocabulary
    "tiny": (256, 512, 2, 4, 2, 1024),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "14b": (5120, 13824, 48, 40, 8, 152064),
    "32b": (5120, 27648, 64, 40, 8, 152064),
}
_LOGIT_STD = 1.0
"""Of the next-token logits. Nearly flat: with peaks, bf16 errors that grow through random layers make log-probs differ more between
any two implementations than a trained model does (2.5 gave mean exp|delta| 1.076 at 32B)"""


def model_config(name: str, num_layers: int = 0) -> PreTrainedConfig:
    """The config of a shape (Qwen2.5's architecture) or of a preset's model; fewer layers on request.

    Raises UserError for other names, and for more layers than the model has.
    """
    config = _shape_config(name) if name in SHAPES else _preset_config(name)
    if not 0 <= num_layers <= config.num_hidden_layers:
        raise UserError(
            f"--layers {num_layers}: {name} has {config.num_hidden_layers} layers; give 1 to {config.num_hidden_layers}"
        )
    if num_layers:
        values = config.to_dict() | {"num_hidden_layers": num_layers, "layer_types": None}
        config = type(config).from_dict(values)
    return config


def _shape_config(shape: str) -> PreTrainedConfig:
    hidden, intermediate, layers, heads, key_heads, vocab = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocab,
        max_position_embeddings=131072,
        rope_theta=1e6,  # pyright: ignore[reportCallIssue]
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=0,
        eos_token_id=1,
    )


def _preset_config(name: str) -> PreTrainedConfig:
    known = None
    if name in preset_names():
        known = known_config(read_toml(preset_folder() / f"{name}.toml")["model"])
    if known is None:
        raise UserError(
            f"--model {name}: neither a shape ({', '.join(SHAPES)}) nor a preset whose sizes are known, such as qwen2.5-7b or qwen3-8b"
        )
    return known


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU, fp32 on a CPU, as in training."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_base(config: PreTrainedConfig, format: str, device: torch.device) -> BaseWeights:
    """A packed base; NVFP4 on a GPU in the layout of its kernel."""
    layout = build_layout(config)
    linears, reports = {}, []
    for fused, weight in _random_linears(layout, format, device):
        if format == "nvfp4" and device.type == "cuda":
            weight = pack(weight, mma_of(device))  # pyright: ignore[reportArgumentType]
        linears[fused.name] = weight
        reports.append(LinearReport(fused.name, weight.shape, weight.nbytes, None))
    tensors = _random_tensors(layout, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dense_nbytes = sum(tensor.nbytes for tensor in tensors.values())
    report = PackingReport(tuple(reports), dense_nbytes)
    family = FAMILIES[config.model_type]
    return BaseWeights(config, family, format, layout, linears, tensors, report)


def write_checkpoint(
    folder: Path, config: PreTrainedConfig, device: torch.device, format: str = "nvfp4"
) -> None:
    """The same as an NVFP4 or bf16 checkpoint with a tokenizer of one token a byte; the vocabulary's other tokens mean nothing."""
    layout = build_layout(config)
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder)
    dense = _random_tensors(layout, device)
    writer.add({name: tensor.bfloat16().cpu() for name, tensor in dense.items()})
    del dense
    for fused, weight in _random_linears(layout, format, device):
        weight = weight.to("cpu")
        if format == "nvfp4":
            writer.add(file_tensors(fused, weight))  # pyright: ignore[reportArgumentType]
        else:
            members = weight.expand(torch.bfloat16).split(fused.member_rows)
            names = [f"{member}.weight" for member in fused.members]
            writer.add({n: m.clone() for n, m in zip(names, members, strict=True)})
    writer.finish()
    byte_tokenizer().save_pretrained(folder)
    extra = {"quantization_config": quantization_config()} if format == "nvfp4" else {}
    write_config(folder, config, **extra)


def write_outline(folder: Path, config: PreTrainedConfig) -> None:
    """A model folder whose weights take no room: a bf16 checkpoint's header over a hole in the file, config, tokenizer.

    A run can be prepared from it; its weights, if they were read, would be zeros.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
    byte_tokenizer().save_pretrained(folder)
    write_config(folder, config)


@torch.no_grad()
def _random_linears(
    layout: Layout, format: str, device: torch.device
) -> Iterator[tuple[FusedLinear, PackedWeight]]:
    generator = torch.Generator(device).manual_seed(0)
    # What a layer adds to the residual stream shrinks with depth, as GPT-2's initialization has it.
    depth = math.sqrt(2 * _depth(layout))
    for fused in layout.linears:
        adds = fused.name.endswith(("o_proj", "down_proj"))
        std = fused.num_columns**-0.5 / (depth if adds else 1)
        members = [_normal((rows, fused.num_columns), std, generator) for rows in fused.member_rows]
        yield fused, FORMATS[format](members, "four_over_six")


def _depth(layout: Layout) -> int:
    """Decoder layers."""
    return len({fused.name.split(".")[2] for fused in layout.linears})


def _random_tensors(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    tensors, dtype = {}, compute_dtype(device)
    for name, shape in layout.dense.items():
        if is_norm(name):
            tensors[name] = torch.ones(shape, dtype=torch.float32, device=device)
        elif name.endswith(".bias"):
            tensors[name] = _normal(shape, 0.02, generator).to(dtype)
        else:
            std = 1.0 if "embed" in name else _LOGIT_STD * shape[1] ** -0.5
            tensors[name] = _normal(shape, std, generator).to(dtype)
    return tensors


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(0, std, generator=generator)


def write_config(folder: Path, config: PreTrainedConfig, **extra: object) -> Path:
    """config.json alone, for an engine that makes up weights by itself; `extra` keys are added to it."""
    folder.mkdir(parents=True, exist_ok=True)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    content = config.to_dict() | {"architectures": [architecture], **extra}
    (folder / "config.json").write_text(json.dumps(content, default=str))
    return folder
