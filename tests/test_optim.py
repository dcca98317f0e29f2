"""The optimizer: learning rates equal transformers', state survives a round trip through a file bit for bit."""

import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import Parameter

from qerl.config import TrainConfig
from qerl.optim import (
    clip_gradients,
    learning_rate_at,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_learning_rate,
)

NAMES = ["layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight", "layers.1.tiny"]
SHAPES = [(64, 128), (50, 100), (8, 8)]
"""Below 4096 elements (the last) bitsandbytes keeps fp32 states; 5000 elements end in the middle of a block of 256."""


def make_params() -> list[tuple[str, Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (name, Parameter(torch.randn(shape, generator=generator)))
        for name, shape in zip(NAMES, SHAPES, strict=True)
    ]


def train(params, optimizer, steps, config) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for _, parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_learning_rate(optimizer, learning_rate_at(step, 6, config))
        optimizer.step()


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw"])
def test_three_steps_saved_and_three_more_equal_six(tmp_path, optim):
    config = TrainConfig(optim=optim, learning_rate=1e-2, warmup_ratio=0.5)
    straight = make_params()
    straight_optimizer = make_optimizer(straight, config)
    train(straight, straight_optimizer, range(6), config)

    first = make_params()
    first_optimizer = make_optimizer(first, config)
    train(first, first_optimizer, range(3), config)
    tensors, state = optimizer_tensors(first_optimizer, NAMES)
    save_file(tensors, tmp_path / "optimizer.safetensors")

    second = [(name, Parameter(parameter.detach().clone())) for name, parameter in first]
    second_optimizer = make_optimizer(second, config)
    load_optimizer_tensors(
        second_optimizer, NAMES, load_file(tmp_path / "optimizer.safetensors"), state
    )
    train(second, second_optimizer, range(3, 6), config)

    for (name, expected), (_, actual) in zip(straight, second, strict=True):
        assert torch.equal(expected, actual), name
    expected_tensors, expected_state = optimizer_tensors(straight_optimizer, NAMES)
    actual_tensors, actual_state = optimizer_tensors(second_optimizer, NAMES)
    assert expected_state == actual_state
    assert expected_tensors.keys() == actual_tensors.keys()
    for name, expected in expected_tensors.items():
        assert torch.equal(expected, actual_tensors[name]), name


def test_eight_bit_states_really_are_eight_bit_on_the_cpu():
    params = make_params()
    config = TrainConfig()
    optimizer = make_optimizer(params, config)
    train(params, optimizer, range(1, 2), config)
    tensors, _ = optimizer_tensors(optimizer, NAMES)
    dtypes = {name: tensors[f"{name}/state1"].dtype for name in NAMES}
    assert dtypes == dict(zip(NAMES, [torch.uint8, torch.uint8, torch.float32], strict=True))


def test_hyperparameters_reach_the_optimizer():
    config = TrainConfig(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, weight_decay=0.3)
    for optim in ("adamw_8bit", "adamw"):
        optimizer = make_optimizer(make_params(), config.model_copy(update={"optim": optim}))
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-4, (0.8, 0.95), 0.3)
        assert group["eps"] == 1e-8


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw"])
def test_weight_decay_is_decoupled(optim):
    """With zero gradients AdamW shrinks a weight by lr * decay; L2 regularisation would move it by about lr."""
    config = TrainConfig(optim=optim, weight_decay=0.1, learning_rate=0.01)
    params = make_params()
    before = [parameter.detach().clone() for _, parameter in params]
    optimizer = make_optimizer(params, config)
    for _, parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, (_, new) in zip(before, params, strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 0.01 * 0.1))


def test_state_that_does_not_fit_is_refused():
    config = TrainConfig(optim="adamw")
    params = make_params()
    optimizer = make_optimizer(params, config)
    train(params, optimizer, range(2), config)
    tensors, state = optimizer_tensors(optimizer, NAMES)

    eight_bit = make_optimizer(params, TrainConfig())
    with pytest.raises(ValueError, match="AdamW's"):
        load_optimizer_tensors(eight_bit, NAMES, tensors, state)
    with pytest.raises(ValueError, match="unknown here"):
        load_optimizer_tensors(optimizer, ["a", "b", "c"], tensors, state)
    wrong_shape = tensors | {f"{NAMES[0]}/exp_avg": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"\(3,\)"):
        load_optimizer_tensors(optimizer, NAMES, wrong_shape, state)
    missing = {name: value for name, value in tensors.items() if name != f"{NAMES[0]}/exp_avg"}
    with pytest.raises(ValueError, match="not whole"):
        load_optimizer_tensors(optimizer, NAMES, missing, state)
    with pytest.raises(ValueError, match="2 distinct names"):
        optimizer_tensors(optimizer, ["a", "a", "b"])


def test_no_parameters_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        make_optimizer([], TrainConfig())


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("num_steps", [1, 7, 30, 100])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 1.0])
def test_learning_rate_equals_transformers(kind, num_steps, warmup_ratio):
    config = TrainConfig(
        lr_scheduler_type=kind, warmup_ratio=warmup_ratio, learning_rate=3e-4, optim="adamw"
    )
    optimizer = torch.optim.SGD([Parameter(torch.zeros(1))], lr=3e-4)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler = transformers.get_scheduler(
        name, optimizer, round(warmup_ratio * num_steps), num_steps
    )
    for step in range(num_steps):
        assert math.isclose(
            learning_rate_at(step, num_steps, config), scheduler.get_last_lr()[0], rel_tol=1e-12
        )
        optimizer.step()
        scheduler.step()


def test_clipping_returns_the_norm_before_and_scales_down_only():
    params = [Parameter(torch.zeros(2)), Parameter(torch.zeros(1)), Parameter(torch.zeros(5))]
    params[0].grad = torch.tensor([3.0, 0.0])
    params[1].grad = torch.tensor([4.0])
    assert clip_gradients(params, 10.0) == pytest.approx(5.0)
    assert params[0].grad.tolist() == [3.0, 0.0]
    assert clip_gradients(params, 0.2) == pytest.approx(5.0)
    assert math.hypot(params[0].grad[0], params[1].grad[0]) == pytest.approx(0.2, rel=1e-4)


def test_clipping_without_gradients_or_with_bad_ones():
    params = [Parameter(torch.zeros(2)), Parameter(torch.zeros(2))]
    assert clip_gradients(params, 0.2) == 0.0
    params[0].grad = torch.tensor([1.0, float("nan")])
    params[1].grad = torch.tensor([1.0, 2.0])
    assert math.isnan(clip_gradients(params, 0.2))
    assert params[1].grad.tolist() == [1.0, 2.0]
