import json
import math
from pathlib import Path

import pytest
import torch

from qerl.algo.noise import draw_noise, noise_at, noisy_weight, sigma_of_stage, stage_of
from qerl.config import NoiseConfig
from qerl.types import NoiseDraw

GOLDEN = Path(__file__).parent / "golden" / "noise_schedule.json"
SCHEDULES = ["exponential", "linear", "cosine", "logarithmic"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_starts_clean_and_has_exactly_the_two_ends(schedule):
    config = NoiseConfig(schedule=schedule)
    sigmas = [sigma_of_stage(k, config) for k in range(config.num_stages)]
    assert sigmas[0] == 0 and sigmas[1] == 1e-2 and sigmas[-1] == 5e-4
    assert sigmas[1:] == sorted(sigmas[1:], reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_are_constant(schedule):
    config = NoiseConfig(schedule=schedule, num_stages=2)
    assert [sigma_of_stage(k, config) for k in range(2)] == [0, 1e-2]


def test_golden_schedule():
    golden = json.loads(GOLDEN.read_text())
    sigmas = [sigma_of_stage(k, NoiseConfig()) for k in range(10)]
    assert sigmas == pytest.approx(golden["sigma"], rel=1e-12, abs=0)


@pytest.mark.parametrize("num_steps", [1, 7, 10, 100, 203])
def test_the_run_goes_through_every_stage_evenly(num_steps):
    stages = [stage_of(step, num_steps, 10) for step in range(num_steps)]
    assert stages == sorted(stages)
    counts = [stages.count(k) for k in range(10)]
    assert max(counts) - min(counts) <= 1
    assert stages[0] == 0
    if num_steps >= 10:
        assert stages[-1] == 9


def test_draws_are_addressed_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    draw = NoiseDraw(sigma=0.01, seed=3, step=5)
    first = draw_noise(draw, "model.layers.0.input_layernorm", torch.Size([4096]))
    again = draw_noise(draw, "model.layers.0.input_layernorm", torch.Size([4096]))
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    others = [
        draw_noise(draw, "model.layers.1.input_layernorm", torch.Size([4096])),
        draw_noise(NoiseDraw(0.01, 3, 6), "model.layers.0.input_layernorm", torch.Size([4096])),
        draw_noise(NoiseDraw(0.01, 4, 5), "model.layers.0.input_layernorm", torch.Size([4096])),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 5 / math.sqrt(4096)
    assert first.std().item() == pytest.approx(0.01, rel=0.05)
    assert abs(first.mean().item()) < 5 * 0.01 / math.sqrt(4096)


def test_off_and_stage_zero_draw_nothing():
    assert noise_at(0, 100, 0, NoiseConfig()) is None
    assert noise_at(50, 100, 0, NoiseConfig(scope="off")) is None
    assert noise_at(10, 100, 7, NoiseConfig()) == NoiseDraw(sigma=1e-2, seed=7, step=10)


def test_noise_stops_where_it_is_told_and_is_unchanged_before():
    config, stopped = NoiseConfig(), NoiseConfig(stop_at=0.6)
    draws = [noise_at(step, 50, 0, stopped) for step in range(50)]
    assert draws[:30] == [noise_at(step, 50, 0, config) for step in range(30)]
    assert draws[30:] == [None] * 20
    assert noise_at(30, 50, 0, config) is not None


@pytest.mark.parametrize(("sigma", "share_changed"), [(1e-2, (0.6, 0.9)), (5e-4, (0.0, 1e-3))])
def test_bf16_norms_lose_small_noise(sigma, share_changed):
    """Near 1 bf16 numbers are 2^-8 (below 1) or 2^-7 (above) apart: most noise of 5e-4 is rounded away."""
    clean = torch.ones(100_000)
    noisy = noisy_weight(clean, NoiseDraw(sigma, 0, 1, norm_dtype="bfloat16"), "norm")
    assert torch.equal(noisy, noisy.bfloat16().float())
    low, high = share_changed
    assert low <= (noisy != clean).double().mean().item() <= high
    exact = noisy_weight(clean, NoiseDraw(sigma, 0, 1), "norm")
    assert (exact != clean).double().mean().item() > 0.99
    assert torch.equal(noisy, exact.bfloat16().float())
