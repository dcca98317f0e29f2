"""BaseWeights from checkpoint folders: what is read, and what is refused in which words."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import (
    MODELS,
    SIZES,
    edit_config,
    edit_tensors,
    load,
    refused,
    save_model,
    source_tensors,
    write_nvfp4,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qerl.errors import UserError
from qerl.quant.compressed_tensors_format import quantization_config
from qerl.quant.nvfp4 import pack_nvfp4
from qerl.quant.packed import dequantize, sqnr_db

# ---- what is read ----


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_family_arrives(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = save_model(tmp_path / kind, kind, tied=tied)
    base, source = load(folder), source_tensors(folder)
    names = [name.removesuffix(".weight") for name in source if name.endswith("_proj.weight")]
    assert len(names) == 14
    for name in names:
        fused, start, stop = base.layout.locate(name)
        members = [source[f"{member}.weight"] for member in fused.members]
        alone = dequantize(pack_nvfp4(members, "four_over_six"), torch.float32)[start:stop]
        assert torch.equal(dequantize(base.packed(name), torch.float32), alone), name
    assert set(base.tensors) == {name for name in source if not name.endswith("_proj.weight")}
    assert ("lm_head.weight" in base.tensors) is not tied
    assert all(torch.equal(tensor, source[name].float()) for name, tensor in base.tensors.items())
    assert len(base.linears) == len(base.report.linears) == 8
    assert base.family.noise_norms == ("input_layernorm", "post_attention_layernorm")
    assert base.nbytes == base.report.packed_nbytes + base.report.dense_nbytes


def test_dtypes_norms_stay_fp32(tmp_path: Path) -> None:
    base = load(save_model(tmp_path / "m", "qwen3"), dtype=torch.bfloat16)
    for name, tensor in base.tensors.items():
        norm = name.endswith("norm.weight")
        assert tensor.dtype == (torch.float32 if norm else torch.bfloat16), name
    assert sum(name.endswith("norm.weight") for name in base.tensors) == 2 * 4 + 1


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
def test_sharded_and_whole_checkpoints_are_the_same(tmp_path: Path, format: str) -> None:
    whole = load(save_model(tmp_path / "whole"), format)
    sharded_folder = save_model(tmp_path / "sharded", max_shard_size="30KB")
    assert len(list(sharded_folder.glob("*.safetensors"))) > 3
    sharded = load(sharded_folder, format)
    assert sharded.checksum() == whole.checksum()
    assert sharded.format == format


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_source_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_model(tmp_path / "m", dtype=dtype)
    weight = load(folder).linears["model.layers.1.self_attn.o_proj"]
    source = source_tensors(folder)["model.layers.1.self_attn.o_proj.weight"]
    expected = pack_nvfp4([source.float()], "four_over_six")
    assert torch.equal(weight.expand(torch.float32), expected.expand(torch.float32))


def test_report_measures_each_matrix(llama: Path) -> None:
    base, source = load(llama), source_tensors(llama)
    reported = {linear.name: linear.sqnr_db for linear in base.report.linears}
    layer = "model.layers.0.mlp."
    members = torch.cat([source[f"{layer}{name}_proj.weight"] for name in ("gate", "up")])
    found = dequantize(base.linears[f"{layer}gate_up_proj"], torch.float32)
    assert reported[f"{layer}gate_up_proj"] == pytest.approx(sqnr_db(members, found), abs=1e-4)
    exact = load(llama, "bf16").report
    assert all(linear.sqnr_db == float("inf") for linear in exact.linears)


def test_config_describes_the_model_not_the_file(llama: Path, tmp_path: Path) -> None:
    dense = load(llama).config.to_dict()
    packed = load(write_nvfp4(llama, tmp_path / "packed")).config.to_dict()
    dense.pop("_name_or_path"), packed.pop("_name_or_path")
    assert packed == dense


def test_packed_names_are_checked(llama: Path) -> None:
    base = load(llama)
    assert base.packed("model.layers.0.self_attn.k_proj").shape == (32, 64)
    with pytest.raises(ValueError, match=r"nearest is 'model\.layers\.0\.self_attn\.k_proj'"):
        base.packed("model.layers.0.self_attn.k_prj")


def test_checksum_sees_every_tensor(llama: Path) -> None:
    base = load(llama)
    before = base.checksum()
    changed = [weight.tensors()["dequant_scale"] for weight in base.linears.values()]
    changed += list(base.tensors.values())
    for tensor in changed:
        flat = tensor.view(-1)[-1:]
        kept = flat.clone()
        flat.add_(1)
        assert base.checksum() != before
        flat.copy_(kept)
    assert base.checksum() == before


def test_nothing_depends_on_the_file_afterwards(llama: Path) -> None:
    """What is kept must not be a view of the mapped file, which somebody may overwrite."""
    base = load(llama, "bf16", dtype=torch.bfloat16)
    before = base.checksum()
    path = llama / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert base.checksum() == before


def test_rotary_buffers_and_an_equal_tied_head_are_tolerated(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", tied=True)
    before = load(folder).checksum()

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_tensors(folder, add)
    assert load(folder).checksum() == before
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        load(folder)


# ---- what is refused ----


def test_folders_that_are_no_checkpoint(llama: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", r"nowhere: no config\.json")
    weights = llama / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    refused(llama, r"model\.safetensors: damaged or cut off")
    weights.unlink()
    refused(llama, "no weights")
    (llama / "pytorch_model.bin").write_bytes(b"pickle")
    refused(llama, r"pickled weights \(pytorch_model\.bin\)")
    (llama / "config.json").write_text("{")
    refused(llama, "not valid JSON")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", max_shard_size="30KB")
    shard = sorted(folder.glob("*.safetensors"))[2]
    shard.unlink()
    refused(folder, f"1 of .* are missing: {shard.name}")


def test_unsupported_family_is_named_with_the_supported_ones(llama: Path) -> None:
    edit_config(llama, model_type="gpt2")
    refused(llama, r"'gpt2' is not supported; qerl knows llama, mistral, qwen2, qwen3")


def test_tensors_that_are_missing_misshapen_or_unread_are_named(llama: Path) -> None:
    original = (llama / "model.safetensors").read_bytes()
    name = "model.layers.1.mlp.up_proj.weight"

    def check(edit: Callable[[dict[str, Tensor]], None], match: str) -> None:
        edit_tensors(llama, edit)
        refused(llama, match)
        (llama / "model.safetensors").write_bytes(original)

    check(lambda tensors: tensors.pop(name), rf"{name} is missing")
    check(lambda tensors: tensors.update({name: torch.ones(96, 32)}), rf"{name} is \[96, 32\]")
    check(lambda tensors: tensors.update({"model.extra": torch.ones(1)}), r"reads model\.extra")
    check(lambda tensors: tensors[name].fill_(float("nan")), r"layers\.1\.mlp\.gate_up_proj: .*NaN")
    check(
        lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}),
        r"gate_up_proj is stored as torch\.float8_e4m3fn",
    )


def test_columns_that_nvfp4_cannot_hold(llama: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**(SIZES | {"intermediate_size": 88}))
    LlamaForCausalLM(config).save_pretrained(tmp_path / "odd")
    refused(tmp_path / "odd", r"down_proj has 88 columns; NVFP4 needs a multiple of 16")
    assert load(tmp_path / "odd", "bf16").linears


def test_other_quantizations_are_named(llama: Path, tmp_path: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(llama, "by 'gptq'")
    refused(llama, "by 'gptq'", format="nf4")
    packed = write_nvfp4(save_model(tmp_path / "m"), tmp_path / "packed")
    for other in ("bf16", "nf4"):
        refused(packed, f"quant={other} needs the unquantized model", format=other)
    with pytest.raises(UserError, match="already quantized"):
        write_nvfp4(packed, tmp_path / "again")
    changes = (
        ({"format": "pack-quantized"}, "'pack-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    )
    for change, match in changes:
        edit_config(packed, quantization_config=quantization_config() | change)
        refused(packed, match)
    for group_change, match in (
        ({"input_activations": {"num_bits": 4}}, "with input_activations"),
        ({"weights": {"num_bits": 8}}, "'num_bits': 8"),
    ):
        quantization = quantization_config()
        quantization["config_groups"]["group_0"] |= group_change
        edit_config(packed, quantization_config=quantization)
        refused(packed, match)


def test_a_full_disk_is_said_before_anything_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(llama, r"needs 16,\d+,\d+ bytes .* 1,000 free", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
