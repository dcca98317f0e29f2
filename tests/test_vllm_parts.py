"""The parts of the vLLM engine that need no vLLM: adapter buffers, sizes, messages."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import load_policy, randomize_adapter, save_model

from qerl.engine import vllm_ops, vllm_setup
from qerl.engine.vllm_adapter import AdapterBuffers, adapter_parts, update
from qerl.engine.vllm_arguments import (
    VllmOptions,
    capture_sizes,
    config_folder,
    graph_settings,
    kv_cache_bytes,
    llm_arguments,
)
from qerl.engine.vllm_engine import VllmEngine
from qerl.errors import UserError
from qerl.model.frozen_linear import LoraLinear
from qerl.quant.packed import dequantize

CPU = torch.device("cpu")
ADAPTERS = [
    {"lora_r": 4, "lora_alpha": 4},
    {"lora_r": 8, "lora_alpha": 24},
    {"lora_r": 48, "lora_alpha": 16, "use_rslora": True},
    {"lora_r": 64, "lora_alpha": 64, "use_rslora": True},
    {"lora_r": 1, "lora_alpha": 3, "lora_target_modules": ("v_proj", "gate_proj", "down_proj")},
    {"lora_r": 8, "lora_alpha": 8, "lora_target_modules": ("q_proj", "k_proj", "up_proj")},
]


def open_policy(folder: Path, **options):
    save_model(folder, "qwen2")
    policy = load_policy(folder, **options)
    randomize_adapter(policy)
    return policy


def updated_buffers(policy) -> dict[str, AdapterBuffers]:
    """The engine's buffers of every adapted matrix, filled."""
    layout = policy.base.layout
    fused = {linear.name: linear for linear in layout.linears}
    found = {
        name: AdapterBuffers.empty(parts, fused[name], torch.float32, CPU)
        for name, parts in adapter_parts(policy.causal_model, layout).items()
    }
    update(found.values())
    return found


def product(buffers: AdapterBuffers, member_rows: tuple[int, ...]) -> torch.Tensor:
    """B A [N, K], member by member."""
    members = zip(buffers.b.split(member_rows), buffers.a.chunk(len(member_rows)), strict=True)
    return torch.cat([b @ a for b, a in members])


@pytest.mark.parametrize("lora", ADAPTERS, ids=lambda lora: f"r{lora['lora_r']}")
def test_the_fused_adapter_is_pefts(tmp_path, lora):
    policy = open_policy(tmp_path / "m", **lora)
    buffers = updated_buffers(policy)
    num_members = 0
    for fused in policy.base.layout.linears:
        expected = torch.zeros(sum(fused.member_rows), fused.num_columns)
        start = 0
        for member, num_rows in zip(fused.members, fused.member_rows, strict=True):
            layer = policy.causal_model.get_submodule(member)
            if isinstance(layer, LoraLinear):
                expected[start : start + num_rows] = layer.get_delta_weight("default")
                num_members += 1
            start += num_rows
        if fused.name in buffers:
            found = product(buffers[fused.name], fused.member_rows)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        else:
            assert not expected.any()
    assert num_members == sum(isinstance(m, LoraLinear) for m in policy.causal_model.modules()) > 0


def test_buffers_follow_the_masters_in_place(tmp_path):
    policy = open_policy(tmp_path / "m")
    buffers = updated_buffers(policy)
    addresses = [(b.a.data_ptr(), b.b.data_ptr()) for b in buffers.values()]
    before = {name: found.b.clone() for name, found in buffers.items()}
    randomize_adapter(policy, seed=7)
    update(buffers.values())
    assert addresses == [(b.a.data_ptr(), b.b.data_ptr()) for b in buffers.values()]
    assert all(not torch.equal(before[name], found.b) for name, found in buffers.items())
    other = updated_buffers(policy)
    assert all(torch.equal(found.b, other[name].b) for name, found in buffers.items())


def test_an_adapter_outside_the_decoders_linears_is_refused_by_name(tmp_path):
    policy = open_policy(tmp_path / "m", lora_target_modules=("q_proj", "lm_head"))
    with pytest.raises(UserError, match="not lm_head"):
        adapter_parts(policy.causal_model, policy.base.layout)


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
def test_the_operator_multiplies_with_the_offered_weight(tmp_path, format):
    policy = open_policy(tmp_path / "m", format=format)
    name = "model.layers.1.mlp.gate_up_proj"
    packed = policy.base.linears[name]
    x = torch.randn(2, 3, packed.shape[1], generator=torch.Generator().manual_seed(0))
    key = vllm_ops.key_of(packed)
    try:
        vllm_ops.offer(
            policy.base.layout.linears, policy.base.linears, torch.float32, batch_invariant=False
        )
        y = torch.ops.qerl.packed_linear(x, key, packed.shape[0])
        torch.testing.assert_close(y, x @ dequantize(packed, torch.float32).t())
        compiled = torch.compile(torch.ops.qerl.packed_linear, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, key, packed.shape[0]), y)
    finally:
        vllm_ops.withdraw()
    with pytest.raises(RuntimeError, match="its engine is closed"):
        torch.ops.qerl.packed_linear(x, key, packed.shape[0])


def test_graph_sizes_cover_the_concurrency():
    assert capture_sizes(1) == [1]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]


def test_the_cache_holds_every_sequence_or_what_is_given(tmp_path):
    base = open_policy(tmp_path / "m").base
    # Two blocks of 128 tokens and a spare one, two layers, keys and values of one head of 32, fp32.
    least = 3 * 128 * 2 * 2 * 32 * 4
    assert kv_cache_bytes(base, VllmOptions(200, 5), torch.float32) == 5 * least
    assert kv_cache_bytes(base, VllmOptions(200, 5, least), torch.float32) == least
    with pytest.raises(UserError, match=f"the least that would do is {least:,}"):
        kv_cache_bytes(base, VllmOptions(200, 5, least - 1), torch.float32)


def test_vllm_sees_a_config_and_nothing_of_the_models_folder(tmp_path):
    policy = open_policy(tmp_path / "m")
    folder = config_folder(policy.base)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert config_folder(policy.base) == folder
    parts = adapter_parts(policy.causal_model, policy.base.layout)
    options = VllmOptions(64, 4)
    arguments = llm_arguments(policy, options, graph_settings(parts, policy, options))
    assert arguments["model"] == str(folder)
    assert arguments["generation_config"] == "vllm"
    assert str(tmp_path) not in str(arguments)


def test_no_vllm_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_setup, "installed_version", lambda: None)
    with pytest.raises(UserError, match=r"not installed.*--engine transformers"):
        VllmEngine(open_policy(tmp_path / "m"), VllmOptions(64, 4))


@pytest.mark.parametrize(
    ("version", "message"), [("0.25.1", "0.26 or newer; 0.25.1"), ("main", "'main' is no version")]
)
def test_an_old_or_unknown_vllm_is_refused(monkeypatch, version, message):
    monkeypatch.setattr(vllm_setup, "installed_version", lambda: version)
    with pytest.raises(UserError, match=message):
        vllm_setup.require_vllm(CPU)


def test_versions_are_compared_as_numbers():
    assert vllm_setup.parse_version("0.32.0+cpu") == (0, 32)
    assert vllm_setup.parse_version("1.0rc1") == (1, 0) > vllm_setup.OLDEST


def test_the_engine_can_be_imported_without_vllm():
    assert "vllm" not in sys.modules or vllm_setup.installed_version() is not None
