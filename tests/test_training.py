"""Whole runs on the CPU: learning, golden numbers, resume, signals, a real model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qerl.checkpoint import find_latest_checkpoint
from qerl.metrics import read_metrics
from qerl.train import main

REWARD = f"{Path(__file__).parent / 'reward_low_tokens.py'}:low_tokens"
UNSTABLE = ("time/", "memory/", "throughput/")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = (
        {"prompt": word}
        for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(run_dir, prompts, **changes):
    settings = {
        "model": "tiny",
        "task.path": prompts,
        "reward-funcs": REWARD,
        "run-dir": run_dir,
        "max-steps": 20,
        "max-completion-length": 12,
        "prompts-per-step": 3,
        "num-generations": 4,
        "learning-rate": 2e-3,
        "lora-r": 8,
        "save-steps": 10,
        "eval-size": 0,
        "reward-workers": 1,
        "device": "cpu",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def numbers(run_dir):
    """metrics.jsonl without what depends on the machine's speed."""
    return [
        {k: v for k, v in line.items() if not k.partition("/")[2].startswith(UNSTABLE)}
        for line in read_metrics(run_dir)
    ]


def test_the_tiny_model_learns(tmp_path, prompts):
    assert main(arguments(tmp_path / "run", prompts, max_steps=15, learning_rate=1e-2)) == 0
    rewards = [line["train/reward"] for line in read_metrics(tmp_path / "run")]
    assert len(rewards) == 15
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-5:]) / 5 > 0.9


def test_twenty_steps_are_the_golden_ones_and_ten_plus_ten_equal_them(tmp_path, prompts, golden):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(arguments(whole, prompts)) == 0
    # The cut run is the same command, stopped by SIGTERM during step 11 and given again.
    command = [sys.executable, "-m", "qerl.train", *arguments(cut, prompts)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 10/"):
            process.send_signal(signal.SIGTERM)
            break
    process.communicate(timeout=120)
    assert process.returncode == 143
    stopped_at = find_latest_checkpoint(cut)[0].step
    assert 10 <= stopped_at < 20
    assert main(arguments(cut, prompts)) == 0
    assert numbers(cut) == numbers(whole)
    assert [line["step"] for line in numbers(cut)] == list(range(1, 21))
    for file in ("adapter/adapter_model.safetensors", "checkpoints/20/optimizer.safetensors"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes()
    check_golden(golden, numbers(whole))


def check_golden(golden, lines):
    """The first five steps everywhere to 1 %; all twenty bit for bit where CPU and torch are those of the file."""
    here = f"{torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"
    header = (
        "# 20 steps of tests/test_training.py; source: this package, written by make golden on: "
    )
    text = header + here + "\n" + "".join(json.dumps(line) + "\n" for line in lines)
    path = Path(__file__).parent / "golden" / "training_20_steps.jsonl"
    if os.environ.get("QERL_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    first, *rest = path.read_text().splitlines()
    expected = [json.loads(line) for line in rest]
    if first == header + here:
        assert lines == expected
    for line, wanted in zip(lines[:5], expected[:5], strict=True):
        assert line == pytest.approx(wanted, rel=1e-2, abs=1e-6)


def test_the_adapter_of_a_run_loads_with_peft(tmp_path, prompts, tiny_folder):
    main(arguments(tmp_path / "run", prompts, max_steps=3, warmup_ratio=0))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "run" / "adapter"))
    b = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(b) == 14
    assert all(p.abs().max() > 0 for p in b)


def test_noise_is_scheduled_and_the_clean_steps_agree_exactly(tmp_path, prompts):
    main(arguments(tmp_path / "run", prompts, max_steps=10, num_stages=5))
    lines = read_metrics(tmp_path / "run")
    sigma = [line["train/noise/sigma"] for line in lines]
    assert sigma[0] == sigma[1] == 0 and sigma[2] == 1e-2 and sigma[-1] == 5e-4
    agreement = [line["train/sampling/token_mult_prob_error"] for line in lines]
    assert max(agreement[:2]) < 1 + 1e-4
    assert min(agreement[2:4]) > 1 + 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens_per_microbatch": 30},
        {"share_prompts": False},
        {"skip_zero_advantage": False},
        {"gradient_checkpointing": True},
    ],
)
def test_settings_that_only_cut_the_work_change_no_number_beyond_rounding(
    tmp_path, prompts, changes
):
    main(arguments(tmp_path / "a", prompts, max_steps=2, warmup_ratio=0))
    main(arguments(tmp_path / "b", prompts, max_steps=2, warmup_ratio=0, **changes))
    for one, other in zip(numbers(tmp_path / "a"), numbers(tmp_path / "b"), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/reward"):
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("quant", ["nf4", "bf16"])
def test_the_other_formats_are_a_setting_of_the_same_loop(tmp_path, prompts, quant):
    assert main(arguments(tmp_path / "run", prompts, max_steps=2, quant=quant)) == 0
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path, prompts):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "qerl.train", *arguments(run_dir, prompts, save_steps=3)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step  8/"):
            process.kill()
            break
    process.wait()
    assert find_latest_checkpoint(run_dir)[0].step == 6
    assert main(arguments(run_dir, prompts, save_steps=3)) == 0
    assert main(arguments(tmp_path / "whole", prompts, save_steps=3)) == 0
    assert numbers(run_dir) == numbers(tmp_path / "whole")


def test_smollm2_takes_three_steps(tmp_path, smollm2_folder):
    words = [
        "--model",
        "quickstart",
        "--max-steps",
        "3",
        "--num-generations",
        "4",
        "--device",
        "cpu",
    ]
    words += ["--prompts-per-step", "2", "--eval-size", "4", "--run-dir", str(tmp_path / "run")]
    started = time.monotonic()
    assert main(words) == 0
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    assert all(0 <= line["eval/accuracy"] <= 1 for line in lines if "eval/accuracy" in line)
    assert (tmp_path / "run" / "curve.png").stat().st_size > 10_000
    assert time.monotonic() - started < 300
