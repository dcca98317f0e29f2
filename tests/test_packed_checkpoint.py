"""The packed checkpoint on disk: written and read back, read by others, cached, and made by the command."""

import json
import os
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
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from qerl import quantize
from qerl.errors import UserError
from qerl.quant import checkpoint_writer, packed_cache
from qerl.quant.base_weights import BaseWeights
from qerl.quant.checkpoint_reader import Checkpoint
from qerl.quant.nvfp4 import ROUNDINGS, pack_nvfp4
from qerl.quant.packed import dequantize, sqnr_db
from qerl.quant.packed_files import repack

# ---- what is written ----


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_write_and_read_are_bit_identical(tmp_path: Path, rounding: str) -> None:
    folder = save_model(tmp_path / "m", "qwen2", tied=True)
    packed = write_nvfp4(folder, tmp_path / "packed", rounding=rounding)
    assert load(packed).checksum() == load(folder, rounding=rounding).checksum()


def test_written_shards_are_read_like_one_file(llama: Path, tmp_path: Path) -> None:
    packed = write_nvfp4(llama, tmp_path / "packed", max_shard_bytes=20_000)
    files = sorted(path.name for path in packed.glob("*.safetensors"))
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    total = sum(tensor.nbytes for tensor in source_tensors(packed).values())
    assert index["metadata"]["total_size"] == total
    assert load(packed).checksum() == load(llama).checksum()


def test_stated_space_is_enough_and_not_much_more(llama: Path, tmp_path: Path) -> None:
    packed = write_nvfp4(llama, tmp_path / "packed")
    source = Checkpoint(llama)
    stated = checkpoint_writer.packed_nbytes(source, load(llama).layout)
    written = sum(path.stat().st_size for path in packed.iterdir())
    assert written <= stated < written + 2**24


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True)])
def test_transformers_and_compressed_tensors_read_what_is_written(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    folder = save_model(tmp_path / "m", kind, tied=tied)
    packed = write_nvfp4(folder, tmp_path / "packed")
    with torch.compiler.set_stance("force_eager"):
        model = AutoModelForCausalLM.from_pretrained(
            packed, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    base, state = load(packed), model.state_dict()
    for fused in base.layout.linears:
        for member in fused.members:
            expected = dequantize(base.packed(member), torch.float32)
            # compressed-tensors rounds to bf16, and divides by its fp32 divisor where we multiply
            torch.testing.assert_close(
                state[f"{member}.weight"].float(), expected, rtol=2**-8, atol=0
            )
    for name, tensor in base.tensors.items():
        assert torch.equal(state[name].float(), tensor)
    ids = torch.arange(6)[None]
    assert torch.isfinite(model(ids).logits).all()


def test_tokenizer_and_generation_files_come_along(llama: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        (llama / name).write_text(name)
    (llama / "training_args.json").write_text("not ours")
    packed = write_nvfp4(llama, tmp_path / "packed")
    assert (packed / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (packed / "generation_config.json").is_file()
    assert not (packed / "training_args.json").exists()


# ---- fused members with different scales ----


def test_members_with_other_global_scales_are_repacked(llama: Path, tmp_path: Path) -> None:
    packed = write_nvfp4(llama, tmp_path / "packed")
    name = "model.layers.0.self_attn.k_proj.weight_global_scale"
    edit_tensors(packed, lambda tensors: tensors[name].mul_(3))
    before, after = load(llama), load(packed)
    reported = {linear.name: linear.sqnr_db for linear in after.report.linears}
    assert 25 < reported.pop("model.layers.0.self_attn.qkv_proj") < 60
    assert set(reported.values()) == {None}
    for member, factor in (("q", 1), ("k", 1 / 3), ("v", 1)):
        linear = f"model.layers.0.self_attn.{member}_proj"
        expected = dequantize(before.packed(linear), torch.float32) * factor
        assert sqnr_db(expected, dequantize(after.packed(linear), torch.float32)) > 25


def test_repacking_takes_the_largest_scale_and_measures_its_loss() -> None:
    torch.manual_seed(0)
    small, large = (pack_nvfp4([torch.randn(8, 64) * spread], "nearest") for spread in (0.7, 1.0))
    fused, reported = repack([small, large])
    expected = torch.cat([dequantize(w, torch.float32) for w in (small, large)])
    assert torch.equal(fused.dequant_scale, large.dequant_scale)
    assert torch.equal(fused.codes[8:], large.codes)
    assert reported == pytest.approx(sqnr_db(expected, dequantize(fused, torch.float32)), abs=1e-2)
    assert reported > 25


def test_members_too_far_apart_are_refused(llama: Path, tmp_path: Path) -> None:
    packed = write_nvfp4(llama, tmp_path / "packed")
    name = "model.layers.0.mlp.{}_proj.weight_global_scale"

    def spread(tensors: dict[str, Tensor]) -> None:
        # up: 2^-20 of its block scales would be below E4M3; gate's own weights are zero, so nothing hides the loss
        tensors[name.format("up")].mul_(2**20)
        tensors["model.layers.0.mlp.gate_proj.weight_packed"].zero_()

    edit_tensors(packed, spread)
    refused(packed, r"gate_proj, .*up_proj have global scales too far apart")


def test_scales_that_cannot_be_are_refused(llama: Path, tmp_path: Path) -> None:
    packed = write_nvfp4(llama, tmp_path / "packed")
    name = "model.layers.0.mlp.down_proj.weight_"
    edit_tensors(packed, lambda tensors: tensors[name + "global_scale"].zero_())
    refused(packed, "down_proj has a negative or NaN scale")
    edit_tensors(packed, lambda tensors: tensors[name + "global_scale"].fill_(1))
    edit_tensors(packed, lambda tensors: tensors[name + "scale"].view(torch.uint8).fill_(0xB0))
    refused(packed, "down_proj has a negative or NaN scale")


# ---- the cache ----


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were packed into, one entry a build."""
    built: list[Path] = []
    write = packed_cache.write_packed

    def counted(source: Checkpoint, folder: Path, **options):
        built.append(folder)
        return write(source, folder, **options)

    monkeypatch.setattr(packed_cache, "write_packed", counted)
    return built


def test_cache_is_reused_and_gives_the_same_bits(
    llama: Path, tmp_path: Path, builds: list[Path]
) -> None:
    direct = load(llama)
    first = load(llama, cache_dir=tmp_path / "cache")
    second = load(llama, cache_dir=tmp_path / "cache")
    assert len(builds) == 1
    assert direct.checksum() == first.checksum() == second.checksum()
    assert direct.report == first.report == second.report
    (folder,) = (p for p in (tmp_path / "cache" / "packed").iterdir() if p.is_dir())
    assert load(folder).checksum() == direct.checksum()


def test_cache_serves_another_compute_dtype(
    llama: Path, tmp_path: Path, builds: list[Path]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cached = load(llama, cache_dir=tmp_path / "cache", dtype=dtype)
        assert cached.checksum() == load(llama, dtype=dtype).checksum()
    assert len(builds) == 1


def test_cache_is_for_nvfp4_only(llama: Path, tmp_path: Path) -> None:
    load(llama, "nf4", cache_dir=tmp_path / "cache")
    load(llama, "bf16", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_cache_is_built_again_when_anything_it_depends_on_changes(
    llama: Path, tmp_path: Path, builds: list[Path]
) -> None:
    def load_again(**options) -> BaseWeights:
        return load(llama, cache_dir=tmp_path / "cache", **options)

    weights = llama / "model.safetensors"
    load_again()
    load_again(rounding="mse")
    assert len(builds) == 2
    os.utime(weights, ns=(0, 0))
    load_again()
    assert len(builds) == 3
    edit_tensors(llama, lambda tensors: tensors["model.norm.weight"].mul_(2))
    os.utime(
        weights, ns=(0, 0)
    )  # same name, size and time: an archive's finetune of the same model
    assert torch.equal(
        load_again().tensors["model.norm.weight"], load(llama).tensors["model.norm.weight"]
    )
    assert len(builds) == 4
    edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert load_again().config.rope_parameters["rope_theta"] == 5e5
    assert len(builds) == 5
    load_again()
    assert len(builds) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "record", "config"])
def test_damaged_cache_is_thrown_away(
    llama: Path, tmp_path: Path, builds: list[Path], damage: str
) -> None:
    expected = load(llama, cache_dir=tmp_path / "cache").checksum()
    (folder,) = (p for p in (tmp_path / "cache" / "packed").iterdir() if p.is_dir())
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-100])
    elif damage == "delete":
        weights.unlink()
    elif damage == "record":
        (folder / checkpoint_writer.PACKING_FILE).write_text("[]")
    else:
        (folder / "config.json").write_text("{}")
    assert load(llama, cache_dir=tmp_path / "cache").checksum() == expected
    assert len(builds) == 2
    assert load(llama, cache_dir=tmp_path / "cache").checksum() == expected
    assert len(builds) == 2
    assert [p for p in (tmp_path / "cache" / "packed").iterdir() if p.is_dir()] == [folder]


def test_a_killed_build_leaves_nothing_that_is_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"

    def die(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_writer, "quantization_config", die)  # after the weights
    with pytest.raises(KeyboardInterrupt):
        load(llama, cache_dir=cache)
    assert list(cache.rglob("*.safetensors"))
    monkeypatch.undo()
    assert load(llama, cache_dir=cache).checksum() == load(llama).checksum()


# ---- the command ----


def test_quantize_command(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "packed"
    assert quantize.main(["--model", str(llama), "--out", str(out), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert load(out).checksum() == load(llama).checksum()
    assert not list(out.parent.glob(".*"))
    worst = min(linear.sqnr_db for linear in load(llama).report.linears)
    (row,) = [line for line in printed.splitlines() if line.startswith("all ")]
    assert f"{worst:.2f}" in row
    assert "8 matrices" in printed
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        quantize.main(["--model", str(llama), "--out", str(out)])


def test_quantize_verbose_names_every_matrix(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(llama), "--out", str(tmp_path / "o"), "--rounding", "mse"]
    quantize.main([*arguments, "--device", "cpu", "--verbose"])
    printed = capsys.readouterr().out
    for linear in load(llama, rounding="mse").report.linears:
        assert f"{linear.name} " in printed
        assert f"{linear.sqnr_db:.2f}" in printed


def test_quantize_leaves_nothing_behind_when_it_fails(llama: Path, tmp_path: Path) -> None:
    edit_tensors(
        llama, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf)
    )
    with pytest.raises(UserError, match="gate_up_proj"):
        quantize.main(["--model", str(llama), "--out", str(tmp_path / "o"), "--device", "cpu"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]
