"""Real vLLM on a CPU: that it runs on the trainer's tensors, and samples what the trainer scores.

`make test-vllm` installs vLLM's CPU build in an environment of its own and runs this file there.
"""

import dataclasses
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import MODEL_TYPES, load_policy, pack_items, randomize_adapter, save_model
from peft import PeftModel
from test_training import arguments, numbers, prompts  # noqa: F401 (a fixture)
from transformers import AutoModelForCausalLM

from qerl.checkpoint import find_latest_checkpoint
from qerl.config import LoraConfig
from qerl.engine import vllm_ops
from qerl.engine.vllm_adapter import update
from qerl.engine.vllm_arguments import VllmOptions, graph_settings, llm_arguments
from qerl.engine.vllm_engine import VllmEngine
from qerl.engine.vllm_setup import installed_version, require_vllm
from qerl.errors import RunError, UserError
from qerl.kernels import humming_layout
from qerl.metrics import read_metrics
from qerl.model.policy import Policy
from qerl.quant.base_weights import BaseWeights
from qerl.train import main
from qerl.types import GenerationRequest, NoiseDraw, Sampling

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        installed_version() is None, reason="vLLM is not installed here: make test-vllm"
    ),
]

CPU = torch.device("cpu")
OPTIONS = VllmOptions(max_model_len=256, max_num_seqs=8)
REQUESTS = [
    GenerationRequest("a", tuple(range(40, 52)), (1, 2, 3)),
    GenerationRequest("b", tuple(range(70, 75)), (4, 2**63 - 1)),
    GenerationRequest("c", (9,), (6, 7, 8, 9)),
]
LONG = [GenerationRequest("long", tuple(i % 250 for i in range(150)), (1, 2))]
"""Longer than a cache block of 128 tokens, so that its second sample and its next generation can reuse it."""
SAMPLING = Sampling(1.0, 12, (258, 17))
DRAW = NoiseDraw(sigma=0.05, seed=0, step=4)


@pytest.fixture
def open_engine():
    """Starts engines; one is open at a time, and none after the test."""
    opened = []

    def start(policy, options=OPTIONS):
        while opened:
            opened.pop().close()
        opened.append(VllmEngine(policy, options))
        return opened[-1]

    yield start
    while opened:
        opened.pop().close()


def make_policy(folder, model_type="qwen2", *, tie=False, **options):
    save_model(folder, model_type, tie=tie)
    return load_policy(folder, **options)


def flat(groups):
    return list(itertools.chain.from_iterable(groups))


def largest_difference(policy, rollouts, temperature=1.0):
    """Largest |log p_trainer - log p_rollout|, in nats."""
    (batch,) = pack_items(rollouts, share=True)
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch, temperature)
    return (logprobs - batch.rollout_logprobs).abs().max().item()


def vllm_model(engine):
    (model,) = engine.llm.apply_model(lambda model: model)
    return model


def addresses(tensors):
    return {tensor.data_ptr() for tensor in tensors}


@pytest.mark.parametrize(
    ("model_type", "format", "tie"),
    [
        *((model_type, "nvfp4", False) for model_type in MODEL_TYPES),
        ("qwen2", "nf4", True),
        ("llama", "bf16", True),
    ],
)
def test_every_parameter_is_the_bases_and_every_logprob_the_trainers(
    tmp_path, open_engine, model_type, format, tie
):
    policy = make_policy(tmp_path / "m", model_type, format=format, tie=tie)
    checksum = policy.base.checksum()
    engine = open_engine(policy)
    check_adoption(policy, engine)
    for scale, temperature, draw in itertools.product((0.0, 0.3), (1.0, 0.7), (None, DRAW)):
        if scale:
            randomize_adapter(policy, scale)
        engine.sync(3, draw)
        rollouts = flat(engine.generate(REQUESTS, Sampling(temperature, 12, (258, 17))))
        assert {rollout.version for rollout in rollouts} == {3}
        with policy.noise(draw):
            assert largest_difference(policy, rollouts, temperature) < 1e-4
        if draw is not None:
            assert largest_difference(policy, rollouts, temperature) > 1e-3
    assert policy.base.checksum() == checksum


def check_adoption(policy, engine):
    """By addresses: what is shared, what exists twice, and that nothing else is there."""
    base, model = policy.base, vllm_model(engine)
    found = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
    for name, packed in base.linears.items():
        own = addresses(packed.tensors().values())
        assert {a for n, a in found.items() if n.startswith(f"{name}.qerl_")} == own
    head = base.tensors.get("lm_head.weight", base.tensors["model.embed_tokens.weight"])
    assert found["lm_head.weight"] == head.data_ptr() == policy.head.data_ptr()
    assert found["model.norm.weight"] == policy.decoder.norm.weight.data_ptr()
    twice = {name for name in found if name.endswith(("_layernorm.weight", "qkv_proj.bias"))}
    assert set(engine.holdings.doubled) == twice
    shared = addresses(base.tensors.values()) | addresses(
        tensor for packed in base.linears.values() for tensor in packed.tensors().values()
    )
    assert {name for name, address in found.items() if address not in shared} == twice
    assert engine.holdings.shared == base.nbytes
    assert all(norm.dtype == torch.float32 for norm in engine.adoption.norms.values())


def test_weights_in_a_kernels_layout_are_adopted_as_they_are(tmp_path, open_engine):
    save_model(tmp_path / "m", "qwen2")
    base = BaseWeights.load(
        tmp_path / "m", format="nvfp4", rounding="nearest", dtype=torch.float32, device=CPU
    )
    linears = {name: humming_layout.pack(w, "wgmma") for name, w in base.linears.items()}
    base = dataclasses.replace(base, linears=linears)
    policy = Policy(base, LoraConfig(lora_r=4), model_name="m", seed=0)
    randomize_adapter(policy, 0.3)
    engine = open_engine(policy)
    check_adoption(policy, engine)
    assert engine.graph_settings.layout == "HummingWeight"
    assert largest_difference(policy, flat(engine.generate(REQUESTS, SAMPLING))) < 1e-4


@pytest.mark.parametrize(
    "lora",
    [
        {"lora_r": 1, "lora_alpha": 5},
        {"lora_r": 48, "lora_alpha": 16, "use_rslora": True},
        {"lora_r": 64, "lora_alpha": 32, "lora_target_modules": ("v_proj", "down_proj")},
    ],
    ids=lambda lora: f"r{lora['lora_r']}",
)
def test_greedy_completions_are_pefts(tmp_path, open_engine, lora):
    policy = make_policy(tmp_path / "m", format="bf16", **lora)
    engine = open_engine(policy)
    randomize_adapter(policy, 0.3)
    engine.sync(1, None)
    rollouts = flat(engine.generate(REQUESTS, Sampling(0.0, 10, (258,))))
    policy.save_adapter(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    reference = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        with torch.no_grad():
            logits = reference(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        best = logits.log_softmax(-1).max(-1)
        assert tuple(best.indices.tolist()) == rollout.completion_ids
        torch.testing.assert_close(best.values, torch.tensor(rollout.logprobs), rtol=0, atol=1e-4)


def test_compiled_code_sees_what_is_written_in_place(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m", "qwen3")
    engine = open_engine(policy, dataclasses.replace(OPTIONS, enforce_eager=False))
    assert engine.llm.llm_engine.vllm_config.compilation_config.mode != 0
    for version, draw in enumerate((None, DRAW, None)):
        randomize_adapter(policy, 0.3, seed=version)
        engine.sync(version, draw)
        rollouts = flat(engine.generate(REQUESTS, SAMPLING))
        with policy.noise(draw):
            assert largest_difference(policy, rollouts) < 1e-4


def test_noise_is_redrawn_from_clean_weights_and_leaves_no_trace(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m", "qwen3")
    engine = open_engine(policy)
    clean = {name: module.weight.clone() for name, module in policy.noise_modules.items()}
    own = engine.adoption.norms
    assert list(own) == list(clean) and len(own) == 4
    where = addresses(own.values())
    for version, step in enumerate((1, 2, 1)):
        draw = NoiseDraw(0.01, 0, step)
        engine.sync(version, draw)
        with policy.noise(draw):
            noisy = {name: module.weight.clone() for name, module in policy.noise_modules.items()}
        assert all(torch.equal(own[name], noisy[name]) for name in own)
        assert not any(torch.equal(own[name], clean[name]) for name in own)
        assert all(torch.equal(m.weight, clean[n]) for n, m in policy.noise_modules.items())
    engine.sync(9, None)
    assert all(torch.equal(own[name], clean[name]) for name in own)
    assert addresses(own.values()) == where


def test_entropy_under_noise_is_recorded(tmp_path, open_engine, record_property):
    """Mean surprise of 128 tokens at three sigmas; a measurement, and that it is one of the noisy policy."""
    policy = make_policy(tmp_path / "m", "qwen2")
    engine = open_engine(policy)
    requests = [GenerationRequest("a", tuple(range(40, 52)), tuple(range(8)))]
    surprise = {}
    for sigma in (0.0, 0.05, 0.5):
        engine.sync(1, NoiseDraw(sigma, 0, 1) if sigma else None)
        rollouts = flat(engine.generate(requests, Sampling(1.0, 16, ())))
        surprise[sigma] = -float(np.mean([logprob for r in rollouts for logprob in r.logprobs]))
        record_property(f"surprise at sigma {sigma}", surprise[sigma])
    assert len(set(surprise.values())) == 3


def test_the_prefix_cache_is_emptied_with_every_version(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m")
    engine = open_engine(policy)
    engine.generate(LONG, SAMPLING)
    randomize_adapter(policy, 0.3)
    update(engine.adoption.adapters.values())
    stale = flat(engine.generate(LONG, SAMPLING))
    assert largest_difference(policy, stale) > 1e-2
    engine.sync(1, None)
    assert largest_difference(policy, flat(engine.generate(LONG, SAMPLING))) < 1e-4


def test_a_sample_depends_on_its_seed_alone_also_after_a_restart(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m", "llama")
    randomize_adapter(policy, 0.3)
    engine = open_engine(policy)
    first = engine.generate(REQUESTS, SAMPLING)
    backwards = engine.generate(REQUESTS[::-1], SAMPLING)[::-1]
    assert [r.completion_ids for r in flat(first)] == [r.completion_ids for r in flat(backwards)]
    assert open_engine(policy).generate(REQUESTS, SAMPLING) == first
    ids = [(r.problem_id, r.sample_index, r.prompt_ids) for r in flat(first)]
    assert ids == [(q.problem_id, i, q.prompt_ids) for q in REQUESTS for i in range(len(q.seeds))]
    assert len({r.completion_ids for r in flat(first)}) == len(ids)


def test_only_our_end_tokens_end_a_completion(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [258, 3], "top_k": 1, "temperature": 0.1, "do_sample": True})
    )
    engine = open_engine(policy)
    eos = tuple(range(0, 256, 32))
    requests = [GenerationRequest("a", (5, 6, 7), tuple(range(100)))]
    rollouts = flat(engine.generate(requests, Sampling(1.0, 24, eos)))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert not set(rollout.completion_ids[:-1]) & set(eos)
        assert (rollout.completion_ids[-1] in eos) == (rollout.finish_reason == "stop")
        if rollout.finish_reason == "length":
            assert len(rollout.completion_ids) == 24
    inside = {token for rollout in rollouts for token in rollout.completion_ids[:-1]}
    assert {258, 3} <= inside
    with pytest.raises(ValueError, match="a prompt of 3 tokens and 254 new ones do not fit"):
        engine.generate(requests, Sampling(1.0, 254, eos))


def test_what_shapes_the_graph_is_in_vllms_hash(tmp_path):
    policy = make_policy(tmp_path / "m")
    require_vllm(policy.device)
    from vllm import EngineArgs

    import qerl.engine.vllm_weights  # noqa: F401 (registers our names)

    settings = graph_settings({}, policy, OPTIONS)

    def hash_of(settings):
        config = EngineArgs(**llm_arguments(policy, OPTIONS, settings)).create_engine_config()
        return config.compute_hash()

    changes = [{}] + [
        {field.name: (7 if field.type is int else ("other",))}
        for field in dataclasses.fields(settings)
    ]
    hashes = [hash_of(dataclasses.replace(settings, **change)) for change in changes]
    assert len(changes) == 8
    assert len(set(hashes)) == len(changes)
    assert hash_of(settings) == hashes[0]


def test_the_trainers_process_is_left_alone(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m")
    set_num_threads = torch.set_num_threads

    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    engine = open_engine(policy)
    assert state() == before
    engine.generate(REQUESTS, SAMPLING)
    assert state() == before
    assert torch.set_num_threads is set_num_threads
    assert torch.get_default_dtype() == torch.float32


def test_one_engine_at_a_time(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m")
    engine = open_engine(policy)
    with pytest.raises(RunError, match="another vLLM engine is open"):
        VllmEngine(policy, OPTIONS)
    assert len(flat(engine.generate(REQUESTS, SAMPLING))) == 9
    engine.close()
    engine.close()
    assert vllm_ops.num_offered() == 0


def test_an_engine_that_dies_ends_the_run_with_phase_and_cause(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m")
    engine = open_engine(policy)
    vllm_ops.withdraw()
    with pytest.raises(RunError, match=r"^rollout: vLLM .* failed: .*its engine is closed"):
        engine.generate(REQUESTS, SAMPLING)
    assert len(flat(open_engine(policy).generate(REQUESTS, SAMPLING))) == 9


def test_what_does_not_match_is_listed(tmp_path, open_engine):
    policy = make_policy(tmp_path / "m", "qwen3")
    whole = policy.base
    linears = {n: w for n, w in whole.linears.items() if not n.endswith("o_proj")}
    policy.base = dataclasses.replace(whole, linears=linears)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.o_proj, .*layers\.1\.self_attn\.o"):
        open_engine(policy)
    tensors = {n: t for n, t in whole.tensors.items() if not n.endswith("q_norm.weight")}
    policy.base = dataclasses.replace(whole, tensors=tensors)
    with pytest.raises(RunError, match=r"not adopted: .*0\.self_attn\.q_norm\.weight, .*1\.self_"):
        open_engine(policy)
    tensors = whole.tensors | {"model.extra.weight": torch.zeros(3)}
    policy.base = dataclasses.replace(whole, tensors=tensors)
    with pytest.raises(RunError, match=r"does not use model\.extra\.weight"):
        open_engine(policy)
    policy.base = whole
    assert len(flat(open_engine(policy).generate(REQUESTS, SAMPLING))) == 9


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_a_training_run_and_its_resumption(tmp_path, prompts, quant, capfd):  # noqa: F811
    changes = {"engine": "vllm", "quant": quant, "max_steps": 3, "save_steps": 1, "warmup_ratio": 0}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = arguments(whole, prompts, save_total_limit=3, **changes)
    assert main(words) == 0
    assert "bytes of it exist twice" in capfd.readouterr().out
    # As if the run had been killed after its second step.
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "3")
    assert main(arguments(cut, prompts, save_total_limit=3, **changes)) == 0
    assert numbers(cut) == numbers(whole)
    assert len(numbers(cut)) == 3
    for file in ("adapter/adapter_model.safetensors", "checkpoints/3/optimizer.safetensors"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes()
    lines = read_metrics(whole)
    assert [line["train/noise/sigma"] > 0 for line in lines] == [False, True, True]
    errors = [line["train/sampling/token_mult_prob_error"] for line in lines]
    assert errors[0] < 1 + 1e-4 < min(errors[1:])
    assert all(line["train/grad_norm"] > 0 for line in lines)


def test_a_killed_run_continues_to_the_same_numbers(tmp_path, prompts):  # noqa: F811
    """SIGKILL, in a process of its own, while a step is under way and the engine is open."""
    changes = {"engine": "vllm", "max_steps": 4, "save_steps": 2, "warmup_ratio": 0}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(arguments(whole, prompts, **changes)) == 0
    command = [sys.executable, "-m", "qerl.train", *arguments(cut, prompts, **changes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.kill()
            break
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)
    assert find_latest_checkpoint(cut)[0].step in (2, 4)
    assert main(arguments(cut, prompts, **changes)) == 0
    assert numbers(cut) == numbers(whole)
    for file in ("adapter/adapter_model.safetensors", "checkpoints/4/optimizer.safetensors"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes()
