"""Which engine a run takes and why, and that the trainer works over the layout that the engine's kernel wants."""

import re

import pytest
import torch
from helpers import load_policy, make_rollout, pack_items, randomize_adapter

from qerl import build
from qerl.config import Config, LoraConfig
from qerl.engine import choice, vllm_setup
from qerl.engine.choice import choose_engine
from qerl.engine.transformers_engine import TransformersEngine
from qerl.errors import UserError
from qerl.kernels.humming_layout import HummingWeight, pack
from qerl.model.policy import Policy
from qerl.quant.base_weights import BaseWeights
from qerl.quant.nvfp4 import Nvfp4Weight
from qerl.types import GenerationRequest, Sampling

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def pretend_gpu(monkeypatch, *, version="0.26.0", capability=(9, 0), count=1, humming=True):
    """A machine with these GPUs and packages, as far as the choice looks."""

    def require_humming():
        if not humming:
            raise UserError("the packed GEMM needs humming-kernels")
        return "0.1.10"

    for module in (choice, vllm_setup):
        monkeypatch.setattr(module, "installed_version", lambda: version)
    monkeypatch.setattr(choice, "require_humming", require_humming)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("device", "machine", "name", "reason"),
    [
        (CPU, {}, "transformers", "no GPU is used"),
        (CUDA, {}, "vllm", "vLLM 0.26.0 on NVIDIA H200"),
        (CUDA, {"count": 4}, "vllm", "the first of 4 visible GPUs"),
        (CUDA, {"version": "0.99.1"}, "vllm", "newer than any that qerl was run with"),
        (CUDA, {"version": None}, "transformers", r"not installed: pip install '\.\[gpu\]'"),
        (CUDA, {"version": "0.25.0"}, "transformers", "needs vLLM 0.26 or newer; 0.25.0"),
        (CUDA, {"version": "main"}, "transformers", "'main' is no version"),
        (CUDA, {"capability": (7, 5)}, "transformers", "compute capability 8.0; this one has 7.5"),
        (CUDA, {"humming": False}, "transformers", "needs humming-kernels"),
    ],
)
def test_auto_takes_vllm_where_it_can_run_and_says_why(monkeypatch, device, machine, name, reason):
    pretend_gpu(monkeypatch, **machine)
    chosen = choose_engine("auto", device, "nvfp4")
    assert chosen.name == name
    assert re.search(reason, chosen.reason)
    assert chosen.name in chosen.line() and chosen.reason in chosen.line()


def test_what_is_asked_for_is_taken_or_refused(monkeypatch):
    pretend_gpu(monkeypatch, version=None)
    assert choose_engine("transformers", CUDA, "nvfp4").reason == "as asked"
    with pytest.raises(UserError, match="needs vLLM, which is not installed"):
        choose_engine("vllm", CUDA, "nvfp4")
    pretend_gpu(monkeypatch, humming=False)
    with pytest.raises(UserError, match="humming-kernels"):
        choose_engine("vllm", CUDA, "nvfp4")
    assert choose_engine("vllm", CUDA, "nf4").name == "vllm"


def test_only_nvfp4_for_vllm_on_a_gpu_is_laid_out_anew(monkeypatch, tiny_folder):
    pretend_gpu(monkeypatch)
    for quant, engine, device in (
        ("nvfp4", "transformers", CUDA),
        ("nvfp4", "vllm", CPU),
        ("nf4", "vllm", CUDA),
        ("bf16", "vllm", CUDA),
    ):
        assert build.kernel_layout(quant, engine, device) is None
    relayout = build.kernel_layout("nvfp4", "vllm", CUDA)
    base = BaseWeights.load(
        tiny_folder, format="nvfp4", dtype=torch.float32, device=CPU, relayout=relayout
    )
    assert {type(weight) for weight in base.linears.values()} == {HummingWeight}
    assert {weight.mma for weight in base.linears.values()} == {"wgmma"}


def test_the_cache_on_disk_is_the_same_for_every_layout(tiny_folder, tmp_path):
    def load(relayout):
        return BaseWeights.load(
            tiny_folder,
            format="nvfp4",
            dtype=torch.float32,
            device=CPU,
            cache_dir=tmp_path,
            relayout=relayout,
        )

    laid_out = load(lambda weight: pack(weight, "mma"))
    (folder,) = (tmp_path / "packed").glob("[!.]*")
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    plain = load(None)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == written
    assert {type(weight) for weight in plain.linears.values()} == {Nvfp4Weight}
    for name, weight in laid_out.linears.items():
        assert torch.equal(weight.expand(torch.float32), plain.linears[name].expand(torch.float32))


@pytest.mark.parametrize("mma", ["wgmma", "mma"])
def test_trainer_and_transformers_engine_do_the_same_over_a_kernels_layout(tiny_folder, mma):
    plain = load_policy(tiny_folder, rounding="four_over_six")
    base = BaseWeights.load(
        tiny_folder,
        format="nvfp4",
        dtype=torch.float32,
        device=CPU,
        relayout=lambda weight: pack(weight, mma),
    )
    lora = LoraConfig(lora_r=4, lora_alpha=8)
    laid_out = Policy(base, lora, model_name=str(tiny_folder), seed=0)
    (batch,) = pack_items([make_rollout(7, 9, seed=seed, vocab=250) for seed in range(3)])
    results = []
    for policy in (plain, laid_out):
        randomize_adapter(policy)
        logprobs, _ = policy.logprobs(batch, 1.0)
        logprobs.sum().backward()
        gradients = [parameter.grad for _, parameter in policy.trainable_parameters()]
        engine = TransformersEngine(policy, max_batch_size=4)
        request = GenerationRequest("a", (5, 6, 7), (1, 2, 3))
        results.append((logprobs, gradients, engine.generate([request], Sampling(1.0, 6, ()))))
    (logprobs, gradients, rollouts), (others, other_gradients, other_rollouts) = results
    assert torch.equal(logprobs, others)
    assert all(torch.equal(*pair) for pair in zip(gradients, other_gradients, strict=True))
    assert rollouts == other_rollouts


def test_the_default_is_auto():
    assert Config(model="tiny").engine == "auto"
