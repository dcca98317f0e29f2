"""`deterministic`: what it refuses, what it switches on and where, and on a GPU that a run repeats itself."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import load_policy
from test_memory_plan import plan_of
from test_training import arguments, numbers, prompts  # noqa: F401 (a fixture)

from qerl.build import vllm_options
from qerl.config import Config
from qerl.determinism import (
    CUBLAS_VARIABLE,
    needs_determinism,
    prepare_determinism,
    torch_determinism,
)
from qerl.engine.vllm_arguments import VllmOptions, graph_settings
from qerl.engine.vllm_setup import process_left_alone
from qerl.errors import UserError
from qerl.planning.memory_plan import Budget
from qerl.planning.sizes import Sizes
from qerl.train import main

GPU_PLAN = plan_of("Qwen/Qwen2.5-7B-Instruct", 40)


def config_of(**changes):
    return Config(model="tiny", deterministic=True, **changes)


@pytest.fixture
def workspace(monkeypatch):
    """cuBLAS's variable, unset, and as it was after the test."""
    monkeypatch.setenv(CUBLAS_VARIABLE, "")
    monkeypatch.delenv(CUBLAS_VARIABLE)
    return monkeypatch


def test_what_cannot_be_promised_is_refused_before_the_run(workspace):
    on_transformers = replace(GPU_PLAN, place=replace(GPU_PLAN.place, engine="transformers"))
    with pytest.raises(UserError, match="needs engine=vllm, not transformers"):
        prepare_determinism(config_of(memory_gib=40), on_transformers)
    with pytest.raises(UserError, match=r"needs memory_gib.*the plan has 40.0 GiB, a test's"):
        prepare_determinism(config_of(), GPU_PLAN)
    less = replace(GPU_PLAN, budget=Budget(39.5, "free (memory_gib is 40)"))
    with pytest.raises(UserError, match=r"at most what is free.*39.5 GiB, free"):
        prepare_determinism(config_of(memory_gib=40), less)
    assert CUBLAS_VARIABLE not in os.environ
    workspace.setenv(CUBLAS_VARIABLE, ":4096:2")
    with pytest.raises(UserError, match=r":4096:8 or :16:8, not ':4096:2'"):
        prepare_determinism(config_of(memory_gib=40), GPU_PLAN)


def test_cublas_gets_its_workspaces_unless_they_are_chosen(workspace):
    prepare_determinism(Config(model="tiny"), GPU_PLAN)
    assert CUBLAS_VARIABLE not in os.environ
    prepare_determinism(config_of(memory_gib=40), GPU_PLAN)
    assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
    workspace.setenv(CUBLAS_VARIABLE, ":16:8")
    prepare_determinism(config_of(memory_gib=40), GPU_PLAN)
    assert os.environ[CUBLAS_VARIABLE] == ":16:8"


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)],
)
def test_the_engine_is_told_where_there_is_something_to_do(asked, device, expected):
    config = Config(model="tiny", deterministic=asked)
    assert needs_determinism(config, device) is expected
    assert vllm_options(config, device, Sizes(4, 64, 10**6, 64)).deterministic is expected


def test_compiled_graphs_are_not_shared_with_other_runs(tiny_folder):
    policy = load_policy(tiny_folder)
    options = VllmOptions(64, 4)
    usual = graph_settings({}, policy, options)
    steady = graph_settings({}, policy, replace(options, deterministic=True))
    assert steady.kernel == f"{usual.kernel} deterministic"
    assert replace(steady, kernel=usual.kernel) == usual


def modes():
    from torch._inductor import config as inductor

    return (
        torch.are_deterministic_algorithms_enabled(),
        inductor.deterministic,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_the_trainers_algorithms_are_suspended_for_vllm_and_come_back():
    before = modes()
    with torch_determinism(algorithms=True, compiled=True):
        assert modes() == (True, True, False)
        with torch_determinism(algorithms=False, compiled=True):
            assert modes() == (False, True, False)
        with pytest.raises(ZeroDivisionError), torch_determinism(algorithms=False, compiled=False):
            raise ZeroDivisionError
        assert modes() == (True, True, False)
        with process_left_alone(torch.device("cpu"), False):  # nothing to do there
            assert modes() == (True, True, False)
    assert modes() == before


def test_an_update_has_only_operators_with_a_deterministic_algorithm(tmp_path, prompts):  # noqa: F811
    """As far as a CPU can say: torch's list of what raises differs from the GPU's."""
    with torch_determinism(algorithms=True, compiled=True):
        assert main(arguments(tmp_path / "run", prompts, max_steps=2)) == 0
    assert len(numbers(tmp_path / "run")) == 2


def test_on_the_cpu_it_is_accepted_and_changes_nothing(tmp_path, prompts, capsys):  # noqa: F811
    before = modes()
    runs = [tmp_path / "usual", tmp_path / "steady"]
    for run_dir, words in zip(runs, ([], ["--deterministic"]), strict=True):
        assert main([*arguments(run_dir, prompts, max_steps=2), *words]) == 0
    assert numbers(runs[0]) == numbers(runs[1])
    assert modes() == before
    # Other sizes would make other numbers on a GPU, so a run that goes on with them says so.
    capsys.readouterr()
    more = arguments(runs[1], prompts, max_steps=2, max_tokens_per_microbatch=64)
    assert main([*more, "--deterministic"]) == 0
    assert "sizes.max_tokens_per_microbatch 8192 -> 64" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.vllm
def test_on_a_gpu_a_run_repeats_itself_and_its_resumption_equals_it(tmp_path, prompts):  # noqa: F811
    changes = {"device": "cuda", "engine": "vllm", "memory_gib": 8}
    changes |= {"max_steps": 3, "save_steps": 1, "save_total_limit": 3, "warmup_ratio": 0}
    whole, again, cut = (tmp_path / name for name in ("whole", "again", "cut"))
    for run_dir in (whole, again):
        assert main([*arguments(run_dir, prompts, **changes), "--deterministic"]) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "3")
    assert main([*arguments(cut, prompts, **changes), "--deterministic"]) == 0
    assert numbers(whole) == numbers(again) == numbers(cut)
    adapter = "adapter/adapter_model.safetensors"
    expected = (whole / adapter).read_bytes()
    assert (again / adapter).read_bytes() == expected == (cut / adapter).read_bytes()
