"""Sizes are chosen to fill the memory there is, and nothing is planned that does not fit."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch
from helpers import load_policy, make_rollout, pack_items

from qerl import cuda_memory as accounts
from qerl.config import Config
from qerl.cuda_memory import CONTEXT_BYTES, CudaMemory, driver_list
from qerl.engine.choice import EngineChoice, engine_elsewhere
from qerl.engine.transformers_engine import TransformersEngine
from qerl.engine.vllm_adapter import AdapterBuffers, adapter_parts
from qerl.errors import RunError, UserError
from qerl.failures import phase
from qerl.kernels.humming_layout import pack as to_humming
from qerl.memory import is_out_of_memory
from qerl.plan import main
from qerl.planning.footprint import microbatch_tokens, num_parameters, packed_bytes
from qerl.planning.footprint_vllm import _adapter_bytes, padded_matrix_bytes
from qerl.planning.known_models import known_config
from qerl.planning.memory_plan import Budget, budget_of, largest_that, make_memory_plan
from qerl.planning.record import PlanRecord
from qerl.planning.sizes import GIB, Place, Sizes
from qerl.probe import probe_update
from qerl.quant.base_weights import BaseWeights
from qerl.quant.layout import build_layout
from qerl.settings.presets import preset_folder, preset_names, read_toml
from qerl.start_checks import cap_memory, wants_parity

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def plan_of(
    model, gib, *, engine="vllm", trains=True, prompt=512, limit=32768, host=math.inf, **settings
):
    config = Config.model_validate({"model": model, **settings})
    layout = build_layout(known_config(model))
    place = Place("cuda", torch.bfloat16, engine, prompt)
    budget = Budget(gib, "a test's", host)
    return make_memory_plan(config, layout, place, budget, context_limit=limit, trains=trains)


LENGTHS = {"rollout": {"prompts_per_step": 32, "max_completion_length": 1024}}


@pytest.mark.parametrize(
    ("model", "gib"),
    [
        ("Qwen/Qwen2.5-32B-Instruct", 74.5),
        ("meta-llama/Llama-3.1-8B-Instruct", 24),
        ("Qwen/Qwen2.5-14B-Instruct", 24),
        ("Qwen/Qwen2.5-14B-Instruct", 32),
        ("Qwen/Qwen3-8B", 16),
    ],
)
def test_a_plan_fits_its_card_and_uses_it(model, gib):
    plan = plan_of(model, gib, **LENGTHS)
    assert plan.fits
    assert plan.sizes.kv_cache_bytes > 0
    assert plan.sizes.max_num_seqs >= 8
    assert plan.longest_context >= 4096
    smaller = plan_of(model, gib * 0.8, **LENGTHS)
    assert smaller.sizes.max_num_seqs <= plan.sizes.max_num_seqs
    assert smaller.longest_context <= plan.longest_context


def test_with_room_the_plan_is_the_config_and_the_cache_stays():
    plan = plan_of("Qwen/Qwen2.5-7B", 140, **LENGTHS)
    assert plan.sizes.max_num_seqs == 128
    assert plan.sizes.max_tokens_per_microbatch == 8192
    assert not plan.sizes.releases_cache
    assert [part.phase for part in plan.parts if part.name == "KV cache"] == ["always"]


LONG = {"rollout": {"prompts_per_step": 1, "num_generations": 2, "max_completion_length": 32256}}


def test_a_long_sequence_sends_as_few_inputs_to_the_host_as_it_must():
    """14B at 32,768 tokens on a 24 GB card; more memory or a shorter sequence needs less of the host, or none."""
    tight = plan_of("Qwen/Qwen2.5-14B", 24e9 / GIB, **LONG)
    assert tight.fits and tight.sizes.releases_cache
    assert tight.sizes.max_tokens_per_microbatch == 32768
    assert 0 < tight.sizes.offloaded_layers < 48 and tight.sizes.kept_layers == 0
    roomier = plan_of("Qwen/Qwen2.5-14B", 27, **LONG)
    assert 0 < roomier.sizes.offloaded_layers < tight.sizes.offloaded_layers
    assert plan_of("Qwen/Qwen2.5-14B", 48, **LONG).sizes.offloaded_layers == 0
    assert plan_of("Qwen/Qwen2.5-14B", 24e9 / GIB, **LENGTHS).sizes.offloaded_layers == 0


def test_the_hosts_memory_limits_what_is_sent_there():
    needed = plan_of("Qwen/Qwen2.5-14B", 24e9 / GIB, **LONG).sizes.offloaded_layers
    of_layer = 32768 * 5120 * 2 / GIB
    enough = plan_of("Qwen/Qwen2.5-14B", 24e9 / GIB, host=needed * of_layer, **LONG)
    assert enough.fits and enough.sizes.offloaded_layers == needed
    too_little = plan_of("Qwen/Qwen2.5-14B", 24e9 / GIB, host=needed // 2 * of_layer, **LONG)
    assert not too_little.fits
    never = plan_of("Qwen/Qwen2.5-14B", 24, train={"gradient_checkpointing": False}, **LONG)
    assert not never.fits and never.sizes.offloaded_layers == 0


@pytest.mark.parametrize(
    ("model", "context"),
    [("Qwen/Qwen2.5-32B", 49_152), ("meta-llama/Llama-3.1-8B-Instruct", 110_000)],
)
def test_the_longest_context_of_an_80_gb_card(model, context):
    """Of both the whole sequence at once: the cache of a sampled one, and the update."""
    plan = plan_of(model, 80e9 / GIB, limit=131_072, **LENGTHS)
    assert plan.longest_context >= context


def test_where_it_is_tight_the_cache_is_given_back_and_both_phases_fill_the_card():
    plan = plan_of("Qwen/Qwen2.5-32B", 60, **LENGTHS)
    assert plan.sizes.releases_cache
    assert [part.phase for part in plan.parts if part.name == "KV cache"] == ["rollout"]
    held = replace(plan.sizes, releases_cache=False)
    assert plan.fits and plan.sizes.max_num_seqs < 128
    of_one = plan.sizes.kv_cache_bytes / plan.sizes.max_num_seqs
    assert plan.budget.num_bytes - plan.peak_bytes < of_one + 0.04 * plan.budget.num_bytes
    assert held != plan.sizes


def test_the_microbatch_is_cut_down_to_what_fits():
    plan = plan_of("Qwen/Qwen2.5-32B", 34, train={"max_tokens_per_microbatch": 65536}, **LENGTHS)
    assert plan.fits
    assert 1536 <= plan.sizes.max_tokens_per_microbatch < 65536
    assert plan.sizes.max_tokens_per_microbatch % 256 == 0


def test_a_cap_that_is_too_small_has_the_least_that_would_do():
    plan = plan_of("Qwen/Qwen2.5-32B", 20, **LENGTHS)
    assert not plan.fits
    assert plan.longest_context == 0
    assert 20 * GIB < plan.least_bytes < 34 * GIB
    assert plan_of("Qwen/Qwen2.5-32B", plan.least_bytes / GIB / 0.96, **LENGTHS).fits


def test_the_longest_context_fits_and_one_token_more_does_not():
    plan = plan_of("Qwen/Qwen2.5-14B", 24, limit=10**6, **LENGTHS)
    longest = plan.longest_context

    def fits(length):
        rollout = {"max_prompt_length": 512, "max_completion_length": length - 512}
        alone = plan_of(
            "Qwen/Qwen2.5-14B",
            24,
            rollout=rollout | {"max_batch_size": 1},
            train={"max_tokens_per_microbatch": 1},
        )
        return alone.least_bytes <= alone.budget.num_bytes

    assert fits(longest) and not fits(longest + 1)


def test_sampling_alone_needs_less():
    both, alone = (plan_of("Qwen/Qwen2.5-32B", 74.5, trains=t, **LENGTHS) for t in (True, False))
    assert alone.least_bytes < both.least_bytes
    assert not [part for part in alone.parts if part.phase == "update"]
    assert not [part for part in alone.parts if "gradients" in part.name]


def test_the_largest_number_for_which():
    assert largest_that(lambda n: n <= 7, 100, 0) == 7
    assert largest_that(lambda n: True, 100, 0) == 100
    assert largest_that(lambda n: False, 100, 20) == 0


@pytest.mark.parametrize("targets", [("all-linear",), ("v_proj", "down_proj")])
def test_the_engines_adapter_and_padded_matrices_are_counted_as_they_are(tiny_folder, targets):
    policy = load_policy(tiny_folder, lora_r=8, lora_target_modules=targets)
    layout = policy.base.layout
    held = 0
    for fused in layout.linears:
        if parts := adapter_parts(policy.causal_model, layout).get(fused.name):
            buffers = AdapterBuffers.empty(parts, fused, torch.bfloat16, CPU)
            held += buffers.a.nbytes + buffers.b.nbytes
    config = Config(model="tiny", lora={"lora_r": 8, "lora_target_modules": targets})
    assert _adapter_bytes(config, layout, 2) == held
    base = BaseWeights.load(tiny_folder, format="nvfp4", dtype=torch.float32, device=CPU)
    for fused in layout.linears:
        assert padded_matrix_bytes(fused) == to_humming(base.linears[fused.name], "mma").nbytes
    assert packed_bytes(layout, "nvfp4", padded=True) > packed_bytes(layout, "nvfp4")


def test_every_presets_model_is_known_and_has_the_parameters_of_its_name():
    names = set()
    for preset in preset_names():
        model = read_toml(preset_folder() / f"{preset}.toml")["model"]
        if not model.startswith("pypi:"):
            names.add(model.removesuffix("-Instruct"))
    assert len(names) > 10
    for name in names:
        config = known_config(f"{name}-Instruct")
        assert config is not None, name
        number, unit = re.search(r"-([\d.]+)([BM])$", name).groups()
        in_name = float(number) * {"B": 1e9, "M": 1e6}[unit]
        assert num_parameters(build_layout(config)) == pytest.approx(in_name, rel=0.1), name
    assert known_config("nobody/nothing") is None
    assert known_config("Qwen/Qwen3-8B").head_dim == 128


def test_a_plan_for_a_card_that_is_not_here(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    words = ["--model", "qwen2.5-32b", "--device", "cuda", "--max-steps", "10"]
    assert main([*words, "--memory-gib", "74.5"]) == 0
    text = capsys.readouterr().out
    assert "vllm (a plan for a CUDA card that is not here)" in text
    for part in ("KV cache", "engine's adapter", "logits chunk", "head-room", "longest context"):
        assert part in text
    assert "the GPU were an H100" in text
    with pytest.raises(UserError, match=r"with the smallest batches it would still need \d"):
        main([*words, "--memory-gib", "20"])
    with pytest.raises(UserError, match="say with --memory-gib what it has"):
        main(words)
    assert engine_elsewhere("transformers").name == "transformers"


def test_memory_gib_that_is_not_there_is_not_planned_with():
    config = Config(model="tiny", memory_gib=10**6)
    budget = budget_of(config, CPU)
    assert budget.gib < 10**6 and "memory_gib is 1e+06" in budget.reason
    assert budget_of(Config(model="tiny", memory_gib=0.5), CPU) == Budget(0.5, "memory_gib")


# --- what a process takes of a GPU, with the driver's answers made up -----------------------------------------------


@pytest.fixture
def card(monkeypatch):
    """100 GiB, of which others hold 20; what this process has reserved is a number in the returned dict."""
    state = {"reserved": 0, "peak": 0, "outside": CONTEXT_BYTES, "unmapped": 0, "share": None}
    state |= {"others": 20 * GIB, "pid": os.getpid()}

    def own():
        return state["reserved"] - state["unmapped"] + state["outside"]

    def taken():
        return state["others"] + own()

    def listed(handle):
        return [
            SimpleNamespace(pid=1, usedGpuMemory=state["others"]),
            SimpleNamespace(pid=state["pid"], usedGpuMemory=own()),
        ]

    def reset(device):
        state["peak"] = state["reserved"]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (100 * GIB - taken(), 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: state["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: state.update(share=share),
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="made up")
    )
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", listed)
    return state


def reserve(state, gib):
    state["reserved"] = int(gib * GIB)
    state["peak"] = max(state["peak"], state["reserved"])


@pytest.mark.parametrize("is_listed", [True, False])
def test_others_are_planned_around_and_what_torch_does_not_know_counts(card, is_listed):
    card["pid"] = os.getpid() if is_listed else -1
    account = CudaMemory(CUDA)
    assert account.others == 20 * GIB
    assert account.used() == CONTEXT_BYTES
    assert account.available() == 80 * GIB
    reserve(card, 10)
    card["outside"] += GIB  # code is loaded
    assert account.used() == 11 * GIB + CONTEXT_BYTES
    assert account.peak() == 11 * GIB + CONTEXT_BYTES
    assert account.available() == 80 * GIB


def test_what_others_take_later_does_not_count_where_the_driver_tells_processes_apart(card):
    account = CudaMemory(CUDA)
    reserve(card, 10)
    card["others"] += 30 * GIB
    assert account.used() == account.peak() == 10 * GIB + CONTEXT_BYTES
    assert account.available() == 50 * GIB


def test_a_namesake_of_another_namespace_is_not_this_process(card):
    card["reserved"], card["outside"] = 10 * GIB, CONTEXT_BYTES - 9 * GIB
    assert driver_list(CUDA) is None


def test_a_cache_that_is_given_back_does_not_count(card):
    account = CudaMemory(CUDA)
    reserve(card, 50)  # 30 of them the cache
    reserve(card, 52)
    reserve(card, 50)
    account.set_unmapped(30 * GIB)
    card["unmapped"] = 30 * GIB
    assert account.used() == 20 * GIB + CONTEXT_BYTES
    reserve(card, 65)  # 35 really: the update
    reserve(card, 50)
    assert account.peak() == 52 * GIB + CONTEXT_BYTES
    reserve(card, 85)
    account.set_unmapped(0)
    card["unmapped"] = 0
    assert account.peak() == max(55, 85) * GIB + CONTEXT_BYTES


def test_the_cap_is_torchs_limit_where_it_can_be(card, monkeypatch):
    account = CudaMemory(CUDA)
    assert account.limit(50 * GIB, outside=GIB, unmapped=10 * GIB)
    assert card["share"] == pytest.approx(0.59)
    assert not account.limit(90 * GIB, outside=GIB, unmapped=30 * GIB)
    assert card["share"] == pytest.approx(0.59)
    monkeypatch.setattr(accounts, "_cuda_memory", lambda index: account)
    plan = plan_of("Qwen/Qwen2.5-7B", 40, **LENGTHS)
    cap_memory(plan, CUDA)
    assert card["share"] == pytest.approx(0.4 - 0.011, abs=2e-3)
    card["share"] = None
    cap_memory(plan, CPU)
    assert card["share"] is None


TAKES_MEMORY = """
import sys, torch
held = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_a_neighbour_on_the_card_is_not_counted():
    held = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    account = CudaMemory(CUDA)
    before, available = account.used(), account.available()
    if account.listed is None:
        pytest.skip("the driver does not list this process: it runs in a namespace of its own")
    assert 0 < before - held.numel() < 2 * GIB
    command = [sys.executable, "-c", TAKES_MEMORY]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "holds\n"
        used, left = account.used(), account.available()
        other.stdin.close()
    assert used == before
    assert available - left > 3 * GIB


# --- out of memory, the probe, the record ---------------------------------------------------------------------------


def test_only_running_out_of_memory_is_called_so():
    inner = RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145")
    assert is_out_of_memory(inner)
    outer = ValueError("the engine failed")
    outer.__cause__ = torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    assert is_out_of_memory(outer)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("an illegal memory access was encountered"))
    assert not is_out_of_memory(KeyError("memory"))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("setup", "--memory-gib"),
        ("sync", "--memory-gib"),
        ("rollout", "--max-batch-size"),
        ("update", "--max-tokens-per-microbatch"),
        ("probe", "--max-tokens-per-microbatch"),
    ],
)
def test_running_out_names_the_phase_and_the_setting(name, setting):
    with pytest.raises(RunError, match=f"^{name}: out of memory; .*{setting}"), phase(name):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def test_the_probe_runs_the_longest_microbatch_and_leaves_no_trace(tiny_folder, monkeypatch):
    policy = load_policy(tiny_folder)
    seen = []
    logprobs = policy.logprobs

    def watch(batch, temperature):
        seen.append(len(batch.token_ids))
        return logprobs(batch, temperature)

    monkeypatch.setattr(policy, "logprobs", watch)
    config = Config.model_validate(
        {
            "model": "tiny",
            "rollout": {"max_completion_length": 40, "num_generations": 4, "prompts_per_step": 4},
            "train": {"max_tokens_per_microbatch": 300},
        }
    )
    place = Place("cpu", torch.float32, "transformers", 30)
    plan = make_memory_plan(
        config, policy.base.layout, place, Budget(8.0, "a test's"), context_limit=512
    )
    before = [parameter.detach().clone() for _, parameter in policy.trainable_parameters()]
    checksum, state = policy.base.checksum(), torch.get_rng_state()
    assert probe_update(config, policy, plan) > 0
    # Full, but for what another sequence would not fit into; the last token of a completion is not fed.
    assert 300 - 70 < seen[0] <= microbatch_tokens(config, 30, 300)
    # A step has 16 sequences, and no microbatch more than they.
    roomy = replace(plan, sizes=replace(plan.sizes, max_tokens_per_microbatch=10_000))
    assert probe_update(config, policy, roomy) > 0
    assert seen[1] == 16 * 69
    for (_, parameter), value in zip(policy.trainable_parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is None
    assert policy.base.checksum() == checksum
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sequence_longer_than_the_budget_is_probed_alone(tiny_folder):
    policy = load_policy(tiny_folder)
    config = Config.model_validate(
        {
            "model": "tiny",
            "rollout": {"max_completion_length": 20},
            "train": {"max_tokens_per_microbatch": 10},
        }
    )
    place = Place("cpu", torch.float32, "transformers", 30)
    plan = make_memory_plan(
        config, policy.base.layout, place, Budget(8.0, "a test's"), context_limit=512
    )
    assert probe_update(config, policy, plan) > 0


def test_the_record_has_plan_and_measurement(tmp_path):
    plan = plan_of("Qwen/Qwen2.5-7B", 40, **LENGTHS)
    record = PlanRecord(tmp_path, EngineChoice("vllm", "as asked"), plan)
    metrics = record.measured(plan.peak_bytes / GIB * 0.5)
    assert metrics["memory/peak_over_plan"] == pytest.approx(0.5)
    record.add({"parity": {"zero_adapter_t1": 1.0}})
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["measured_over_predicted"] == pytest.approx(0.5)
    assert written["sizes"]["max_num_seqs"] == plan.sizes.max_num_seqs
    assert sum(written["parts_gib"].values()) >= written["predicted_peak_gib"]
    assert written["parity"] == {"zero_adapter_t1": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_when_the_gate_is_due():
    assert wants_parity(Config(model="tiny"), "vllm")
    assert not wants_parity(Config(model="tiny"), "transformers")
    assert wants_parity(Config(model="tiny", parity="always"), "transformers")
    assert not wants_parity(Config(model="tiny", parity="never"), "vllm")


def test_the_transformers_engine_holds_nothing_to_release(tiny_folder):
    policy = load_policy(tiny_folder)
    engine = TransformersEngine(policy, 4)
    engine.release()
    assert Sizes(4, 8).kv_cache_bytes == 0
    (batch,) = pack_items([make_rollout(3, 4, vocab=250)])
    assert policy.logprobs(batch, 1.0)[0].shape == (4,)
