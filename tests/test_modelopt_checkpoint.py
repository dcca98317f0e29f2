"""ModelOpt's NVFP4 checkpoints as bases: made here from our own packer, in that tool's layout, and read back equal."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import (
    edit_config,
    edit_tensors,
    load,
    refused,
    save_model,
    source_tensors,
    write_nvfp4,
)
from safetensors.torch import save_file
from torch import Tensor

from qerl import quantize
from qerl.errors import UserError
from qerl.quant.packed import dequantize, sqnr_db

CONFIG = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
FROM_COMPRESSED = {
    "weight_packed": "weight",
    "weight_scale": "weight_scale",
    "weight_global_scale": "weight_scale_2",
}


def write_modelopt(
    source: Path, out: Path, *, inline: bool = True, algorithm: str = "NVFP4"
) -> Path:
    """The checkpoint as ModelOpt exports it; `inline`: described in config.json, else in hf_quant_config.json."""
    write_nvfp4(source, out)
    tensors = {}
    for name, tensor in source_tensors(out).items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "weight_global_scale":
            tensor = (1 / tensor).reshape(())
            tensors[f"{stem}.input_scale"] = torch.tensor(0.01)
        tensors[f"{stem}.{FROM_COMPRESSED.get(leaf, leaf)}"] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config")
    quantization = CONFIG["quantization"] | {"quant_algo": algorithm}
    if inline:
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    else:
        (out / "hf_quant_config.json").write_text(
            json.dumps(CONFIG | {"quantization": quantization})
        )
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture
def modelopt(llama: Path, tmp_path: Path) -> Path:
    return write_modelopt(llama, tmp_path / "modelopt")


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_read_back_equal_to_our_own_packing(
    llama: Path, tmp_path: Path, inline: bool, algorithm: str
) -> None:
    folder = write_modelopt(llama, tmp_path / "m", inline=inline, algorithm=algorithm)
    base = load(folder)
    assert base.checksum() == load(llama).checksum()
    assert all(linear.sqnr_db is None for linear in base.report.linears)
    assert base.report.notes == (
        "14 activation scales of the checkpoint are not used: activations and the KV cache stay unquantized",
    )
    assert not hasattr(base.config, "quantization_config")


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen3", False), ("mistral", False)])
def test_other_families(tmp_path: Path, kind: str, tied: bool) -> None:
    source = save_model(tmp_path / "source", kind, tied=tied)
    folder = write_modelopt(source, tmp_path / "m")
    assert load(folder).checksum() == load(source).checksum()


def test_the_scale_multiplies(modelopt: Path) -> None:
    """Written down as numbers, not by way of the other format: code 2 is 1.0, code 15 is -6."""
    name = "model.layers.0.self_attn.o_proj"

    def known(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"].fill_(0xF2)
        tensors[f"{name}.weight_scale"].copy_(torch.full((64, 4), 2.0).to(torch.float8_e4m3fn))
        tensors[f"{name}.weight_scale_2"].fill_(0.25)

    edit_tensors(modelopt, known)
    dense = dequantize(load(modelopt).packed(name), torch.float32)
    assert torch.equal(dense[:, 0::2], torch.full((64, 32), 0.5))
    assert torch.equal(dense[:, 1::2], torch.full((64, 32), -3.0))


def test_a_scalar_of_one_element_is_a_scalar(llama: Path, modelopt: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_scale_2"):
                tensors[name] = tensors[name].reshape(1)

    edit_tensors(modelopt, widen)
    assert load(modelopt).checksum() == load(llama).checksum()


def test_members_with_other_global_scales_are_repacked_and_that_is_said(
    llama: Path, modelopt: Path
) -> None:
    name = "model.layers.1.self_attn.v_proj"
    edit_tensors(modelopt, lambda tensors: tensors[f"{name}.weight_scale_2"].mul_(0.3))
    base = load(modelopt)
    assert "1 fused matrices had members with different global scales" in base.report.notes[1]
    expected = dequantize(load(llama).packed(name), torch.float32) * 0.3
    assert sqnr_db(expected, dequantize(base.packed(name), torch.float32)) > 25
    edit_tensors(
        modelopt,
        lambda tensors: (
            tensors[f"{name}.weight_scale_2"].mul_(2.0**20),
            tensors["model.layers.1.self_attn.q_proj.weight"].zero_(),
            tensors["model.layers.1.self_attn.v_proj.weight"].zero_(),
        ),
    )
    refused(modelopt, "global scales too far apart")


def test_kv_cache_scales_are_left_and_said(modelopt: Path) -> None:
    before = load(modelopt).checksum()

    def add(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            for scale in ("k_proj.k_scale", "v_proj.v_scale"):
                tensors[f"model.layers.{layer}.self_attn.{scale}"] = torch.tensor(0.5)

    edit_tensors(modelopt, add)
    base = load(modelopt)
    assert base.checksum() == before
    assert base.report.notes[0].startswith("18 activation scales and KV cache scales of the")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"quant_algo": "NVFP4_AWQ"},
            "by modelopt as 'NVFP4_AWQ'; qerl reads NVFP4 and W4A16_NVFP4",
        ),
        ({"quant_algo": "FP8"}, "as 'FP8'"),
        ({"quant_algo": None}, "as None"),
        ({"group_size": 32}, "in groups of 32; NVFP4 has groups of 16"),
        ({"config_groups": {"group_0": {"weights": {"group_size": 32}}}}, "in groups of 32"),
    ],
)
def test_other_algorithms_are_refused_in_one_line(modelopt: Path, change: dict, match: str) -> None:
    quantization = {"quant_method": "modelopt", **CONFIG["quantization"]} | change
    edit_config(modelopt, quantization_config=quantization)
    refused(modelopt, match)


def spoil(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        value = change(tensors.pop(name))
        if value is not None:
            tensors[name] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (spoil("model.layers.0.mlp.up_proj.weight_scale", lambda t: None), "up_proj.weight_scale is missing"),
        (spoil("model.layers.0.mlp.up_proj.weight_scale_2", lambda t: -t), "negative or NaN scale"),
        (spoil("model.layers.0.mlp.up_proj.weight_scale_2", lambda t: t.double()), "is stored as"),
        (spoil("model.layers.0.mlp.up_proj.weight", lambda t: t[:, :8].contiguous()), r"is \[96, 8\]"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.pre_quant_scale": torch.ones(64)}), "reads .*pre_quant_scale"),
    ],
    ids=["missing", "negative", "dtype", "shape", "awq"],
)  # fmt: skip
def test_damage_is_named(modelopt: Path, edit: Callable[[dict], None], match: str) -> None:
    edit_tensors(modelopt, edit)
    refused(modelopt, match)


def test_damaged_description_and_other_formats(llama: Path, modelopt: Path, tmp_path: Path) -> None:
    refused(modelopt, "quant=nf4 needs the unquantized model", format="nf4")
    folder = write_modelopt(llama, tmp_path / "other", inline=False)
    (folder / "hf_quant_config.json").write_text("{}")
    refused(folder, r"hf_quant_config\.json: damaged")
    with pytest.raises(UserError, match="already quantized"):
        quantize.main(["--model", str(modelopt), "--out", str(tmp_path / "o"), "--device", "cpu"])
