"""The plan counts what the run really allocates, and refuses what does not fit with the settings to lower."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from qerl.config import Config
from qerl.engine.choice import EngineChoice
from qerl.engine.transformers_engine import TransformersEngine
from qerl.errors import UserError
from qerl.memory import GIB
from qerl.optim import make_optimizer, optimizer_tensors
from qerl.plan import main
from qerl.planning.footprint import (
    adapter_shapes,
    dense_bytes,
    footprint,
    microbatch_tokens,
    num_parameters,
    optimizer_bytes,
    packed_bytes,
    peak_bytes,
    recomputed_layers,
)
from qerl.planning.memory_plan import SLACK_SHARE, Budget, budget_of, make_memory_plan
from qerl.planning.run_plan import check_plan, format_plan, make_plan
from qerl.planning.sizes import Part, Place, dims_of
from qerl.planning.step_time import Speed, measure_speed
from qerl.quant.base_weights import BaseWeights
from qerl.quant.layout import build_layout
from qerl.types import GenerationRequest, Sampling
from tests.helpers import load_policy, make_rollout, pack_items

CPU = torch.device("cpu")
QWEN_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def tiny_layout(folder):
    return build_layout(AutoConfig.from_pretrained(folder))


def plan_of(
    tmp_path, memory_gib=None, device=CPU, model=QWEN_32B, engine="transformers", **settings
):
    config = Config(model="qwen2.5-32b", memory_gib=memory_gib, device=device.type, **settings)
    layout = build_layout(AutoConfig.for_model("qwen2", **model))
    place = Place(device.type, torch.bfloat16, engine, longest_prompt=512)
    budget = budget_of(config, device)
    memory = make_memory_plan(config, layout, place, budget, context_limit=32768)
    return make_plan(
        config,
        layout,
        memory,
        origin="Qwen/Qwen2.5-32B-Instruct",
        download="17 files, 65.53 GB",
        download_bytes=65_530_000_000,
        num_steps=100,
        engine=EngineChoice(engine, "as asked"),
        run_dir=tmp_path / "run",
        speed=Speed(1e14, 1e12),
    )


@pytest.mark.parametrize("quant", ["nvfp4", "nf4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_bytes_are_what_base_weights_holds(tiny_folder, quant, dtype):
    layout = tiny_layout(tiny_folder)
    base = BaseWeights.load(tiny_folder, format=quant, dtype=dtype, device=CPU)
    assert packed_bytes(layout, quant) == sum(weight.nbytes for weight in base.linears.values())
    assert dense_bytes(layout, dtype) == sum(tensor.nbytes for tensor in base.tensors.values())


def test_parameters_of_known_models():
    layout = build_layout(AutoConfig.for_model("qwen2", **QWEN_32B))
    assert num_parameters(layout) == 32_763_876_352  # the count on the model's card: 32.8 B
    # 64 layers of q, k, v, o, gate, up, down in 4.5 bits, and one fp32 scale for each of four fused matrices
    per_layer = 5120 * (5120 + 2 * 1024) + 5120 * 5120 + 3 * 5120 * 27648
    assert packed_bytes(layout, "nvfp4") == 64 * (per_layer * 9 // 16 + 4 * 4)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_adapter_and_optimizer_bytes_are_what_they_hold(tiny_folder, targets, optim):
    policy = load_policy(tiny_folder, lora_r=48, lora_target_modules=targets)
    parameters = policy.trainable_parameters()
    config = Config(model="tiny", lora={"lora_r": 48, "lora_target_modules": targets})
    config = config.model_copy(update={"train": config.train.model_copy(update={"optim": optim})})
    shapes = adapter_shapes(tiny_layout(tiny_folder), config)
    assert sorted(shapes) == sorted(tuple(parameter.shape) for _, parameter in parameters)

    optimizer = make_optimizer(parameters, config.train)
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors, _ = optimizer_tensors(optimizer, [name for name, _ in parameters])
    held = [
        t
        for name, t in tensors.items()
        if name.rpartition("/")[2] not in ("step", "qmap1", "qmap2")
    ]
    assert optimizer_bytes(shapes, optim) == sum(tensor.nbytes for tensor in held)
    assert optim == "adamw" or any(tensor.dtype == torch.uint8 for tensor in held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(tiny_folder, dtype):
    """Counted with hooks on every saved tensor, each storage once, weights left out."""
    policy = load_policy(tiny_folder, dtype=dtype, lora_r=8)
    (batch,) = pack_items([make_rollout(33, 32, seed=i, vocab=250) for i in range(4)])
    weights = {t.untyped_storage().data_ptr() for t in policy.base.tensors.values()}
    weights |= {p.untyped_storage().data_ptr() for _, p in policy.trainable_parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() > 1:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(batch, 1.0)
    held = sum(num_bytes for num_bytes, _ in saved.values())

    config = Config(
        model="tiny",
        lora={"lora_r": 8},
        rollout={"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 32},
        train={"gradient_checkpointing": False},
    )
    tokens = config.train.max_tokens_per_microbatch
    assert microbatch_tokens(config, 32, tokens) == len(batch.token_ids)
    parts = footprint(config, tiny_layout(tiny_folder), Place("cpu", dtype, "transformers", 32))
    assert named(parts, "activations") == pytest.approx(held, rel=0.2)


def test_kv_cache_is_what_the_engine_holds(tiny_folder, monkeypatch):
    policy = load_policy(tiny_folder)
    engine = TransformersEngine(policy, max_batch_size=6)
    seen = []
    step = engine._step

    def watch(tokens, cache):
        seen.append(sum(t.nbytes for tensors in (cache.keys, cache.values) for t in tensors))
        return step(tokens, cache)

    monkeypatch.setattr(engine, "_step", watch)
    requests = [GenerationRequest(str(i), (1, 2, 3, 4, i), (1, 2, 3)) for i in range(2)]
    engine.generate(requests, Sampling(1.0, 7, eos_token_ids=(10**6,)))
    config = Config(
        model="tiny",
        rollout={"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 7},
        log={"eval_size": 0},
    )
    parts = footprint(
        config, tiny_layout(tiny_folder), Place("cpu", torch.float32, "transformers", 5)
    )
    assert named(parts, "KV cache") == max(seen)


def named(parts: tuple[Part, ...], name: str) -> int:
    (part,) = [part for part in parts if part.name == name]
    return part.num_bytes


def test_phases_alternate_so_only_the_larger_counts():
    parts = (Part("a", 10, "always"), Part("b", 3, "rollout"), Part("c", 5, "update"))
    assert peak_bytes(parts) == 15


def test_the_plan_prints_every_part(tmp_path):
    plan = plan_of(tmp_path, memory_gib=1.0)
    assert plan.memory.budget.gib == 1.0
    text = format_plan(plan)
    for part in plan.memory.parts:
        assert part.name in text
    assert "32.76 B parameters" in text and "65.53 GB" in text
    assert "8 prompts x 8 completions = 64 of up to 512 tokens (65,536 with prompts)" in text


def test_the_time_counts_what_is_computed(tmp_path):
    def update_s(**settings):
        return plan_of(tmp_path, memory_gib=80.0, **settings).update_s

    usual = update_s()
    assert (
        update_s(train={"share_prompts": False}) > 1.4 * usual
    )  # 512 of 1,024 tokens are a prompt
    assert update_s(algo={"num_iterations": 2}) > 2 * usual
    assert 1.2 * usual < update_s(algo={"beta": 0.1}) < 1.6 * usual


def test_the_message_names_what_to_lower_and_the_least_that_would_do(tmp_path):
    settings = {"train": {"max_tokens_per_microbatch": 65536}}
    full = plan_of(tmp_path, **settings)
    need, least = full.memory.peak_bytes / GIB, full.memory.least_bytes / GIB
    assert least < need
    # The budget is at most what is free here, so the same plan is judged against made-up budgets.
    between = replace_budget(full, (need + least) / 2)
    with pytest.raises(UserError) as caught:
        check_plan(between)
    message = str(caught.value)
    assert f"{need:.1f} GiB" in message and f"{least:.1f} GiB" in message
    assert "--max-tokens-per-microbatch (65536)" in message
    assert "--gradient-checkpointing" in message
    check_plan(replace_budget(full, need + 0.01))
    with pytest.raises(UserError, match=r"smaller model$"):
        check_plan(replace_budget(full, least - 0.1))
    check_plan(replace_budget(full, need + 1e-6))


def replace_budget(plan, budget_gib):
    return replace(plan, memory=replace(plan.memory, budget=Budget(budget_gib, "a test's")))


def test_following_the_advice_gives_a_plan_that_fits(tmp_path):
    full = plan_of(tmp_path, train={"max_tokens_per_microbatch": 65536})
    budget = full.memory.least_bytes / GIB * 1.001
    lowered = plan_of(
        tmp_path,
        rollout={"max_batch_size": 1},
        train={"max_tokens_per_microbatch": 1, "gradient_checkpointing": True},
    )
    check_plan(replace_budget(lowered, budget))


def test_microbatches_hold_one_sequence_at_least_and_the_batch_at_most():
    rollout = {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 100}

    def tokens(budget):
        return microbatch_tokens(Config(model="m", rollout=rollout), 50, budget)

    assert [tokens(1), tokens(400), tokens(10**6)] == [150, 400, 1200]


def test_32b_with_nvfp4_fits_80_gib_on_cuda_and_bf16_does_not():
    """The point of the project, in the plan's arithmetic: rank 32, 8k tokens a microbatch, recomputation."""
    layout = build_layout(AutoConfig.for_model("qwen2", **QWEN_32B))

    def gib(quant):
        config = Config(model="m", quant=quant, rollout={"max_batch_size": 64})
        place = Place("cuda", torch.bfloat16, "transformers", 512)
        return peak_bytes(footprint(config, layout, place)) / GIB

    assert gib("nvfp4") < 60 < 80 < gib("bf16")


def test_an_unsupported_family_is_named(tmp_path):
    with pytest.raises(UserError, match="gpt2"):
        build_layout(AutoConfig.for_model("gpt2"))


def test_dims_are_read_off_the_matrices():
    dims = dims_of(build_layout(AutoConfig.for_model("qwen2", **QWEN_32B)))
    assert (dims.num_layers, dims.hidden, dims.query, dims.key) == (64, 5120, 5120, 1024)
    assert (dims.intermediate, dims.vocab) == (27648, 152064)


def test_speed_is_measured():
    speed = measure_speed(CPU, torch.float32)
    assert 1e8 < speed.flops_per_s < 1e15
    assert 1e8 < speed.bytes_per_s < 1e14


def test_longer_completions_take_longer(tmp_path):
    short = plan_of(tmp_path, rollout={"max_completion_length": 256})
    long = plan_of(tmp_path, rollout={"max_completion_length": 1024})
    assert 0 < 2 * short.step_s < long.step_s


CHURN = """
import torch
from qerl.memory import current_gib, return_freed_memory

def churn():
    before = current_gib(torch.device("cpu"))
    kept = [torch.ones(2**19) for _ in range(300)][::10]
    taken = (current_gib(torch.device("cpu")) - before) * 2**30
    print(round(taken / sum(t.nbytes for t in kept), 2))

torch.ones(2**20)  # its release teaches glibc to keep blocks of this size
churn()
return_freed_memory()
churn()
"""


def test_freed_tensors_go_back_to_the_system():
    """Of 300 tensors of 2 MiB every tenth is kept. glibc alone holds on to the memory of all."""
    command = [sys.executable, "-c", CHURN]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    without, with_return = map(float, result.stdout.split())
    assert without > 5
    assert with_return < 1.3


def test_the_command_prints_the_plan_and_refuses_what_does_not_fit(tmp_path, capsys):
    command = ["--model", "tiny", "--task", "reasoning-gym/chain_sum", "--max-steps", "3"]
    command += ["--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "tiny (random Qwen2" in text and "\nsteps     3, each" in text
    with pytest.raises(UserError, match=r"0\.0 GiB is memory_gib"):
        main([*command, "--memory-gib", "0.01"])
    assert not (tmp_path / "run").exists()


def test_a_model_out_of_reach_has_no_plan():
    with pytest.raises(UserError, match="its sizes are not known"):
        main(["--model", "nobody/nothing", "--task", "reasoning-gym/chain_sum", "--device", "cpu"])


def test_what_fits_is_kept_from_recomputation(tiny_folder):
    """On a card with room no layer is recomputed, on a tight one some are, and a setting decides alone."""
    layout = tiny_layout(tiny_folder)
    place = Place("cuda", torch.bfloat16, "transformers", 32)

    def kept(gib, **train):
        config = Config(model="tiny", train=train)
        budget = Budget(gib, "test")
        plan = make_memory_plan(config, layout, place, budget, context_limit=4096)
        sizes, num_layers = plan.sizes, dims_of(layout).num_layers
        assert plan.fits
        return recomputed_layers(config, num_layers, "cuda", sizes), plan.peak_bytes / GIB

    none, roomy = kept(8)
    all_layers, least = kept(8, gradient_checkpointing=True)
    assert (none, all_layers) == (0, 2)
    assert least < roomy
    some, _ = kept(roomy / (1 - SLACK_SHARE) - 1e-6)
    assert some == 1
    assert kept(8, gradient_checkpointing=False)[0] == 0
