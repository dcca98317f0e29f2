import math

import pytest
import torch

from qerl.algo.advantages import (
    STD_EPSILON,
    group_advantages,
    group_spread,
    overlong_penalties,
)

NAN = math.nan


def test_group_scaling_is_the_unbiased_z_score():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 4.0, 0.0]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / (
        rewards.std(1, keepdim=True) + STD_EPSILON
    )
    torch.testing.assert_close(group_advantages(rewards, "group"), expected)


def test_none_is_dr_grpo_the_plain_difference_from_the_mean():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert group_advantages(rewards, "none").tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_batch_scaling_divides_by_one_deviation():
    rewards = torch.tensor([[1.0, 0.0], [5.0, 1.0]])
    centred = rewards - rewards.mean(1, keepdim=True)
    expected = centred / (rewards.std() + STD_EPSILON)
    torch.testing.assert_close(group_advantages(rewards, "batch"), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_spread_is_exactly_zero(scale):
    # 0.1 * 3 has a mean that is not 0.1 in binary: the difference must not be blown up by a tiny deviation.
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]], dtype=torch.float64)
    advantages = group_advantages(rewards, scale)
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert advantages[1].abs().min() > 0


def test_a_missing_reward_leaves_the_baseline():
    with_gap = group_advantages(torch.tensor([[1.0, 0.0, 0.0, NAN]]), "group")
    without = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]), "group")
    torch.testing.assert_close(with_gap[:, :3], without)
    assert with_gap[0, 3] == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [1.0, NAN, NAN]])
def test_groups_with_fewer_than_two_rewards_give_zero(scale, row):
    assert group_advantages(torch.tensor([row]), scale).tolist() == [[0.0, 0.0, 0.0]]


def test_spread_ignores_missing_rewards():
    rewards = torch.tensor([[1.0, NAN, 3.0], [NAN, NAN, NAN], [2.0, 2.0, NAN]])
    assert group_spread(rewards).tolist() == [2.0, 0.0, 0.0]


def test_leave_one_out_by_hand():
    # each minus the mean of the others: 3 - (0 + 0) / 2, 0 - (3 + 0) / 2
    advantages = group_advantages(torch.tensor([[3.0, 0.0, 0.0]]), "none", "rloo")
    assert advantages.tolist() == [[3.0, -1.5, -1.5]]
    with_gap = group_advantages(torch.tensor([[3.0, 0.0, NAN, 0.0]]), "none", "rloo")
    assert with_gap.tolist() == [[3.0, -1.5, 0.0, -1.5]]


@pytest.mark.parametrize(
    "row",
    [
        [0.1 + 0.2, 0.3, 0.3],  # one rounding in fp64
        [0.7, torch.tensor(0.7).item(), 0.7],  # a reward that went through fp32
        [1e6, 1e6 + 0.1, 1e6],
        [0.0, 1e-12, 0.0],
    ],
)
def test_rewards_that_differ_by_rounding_are_equal(row):
    rewards = torch.tensor([row], dtype=torch.float64)
    assert group_spread(rewards).tolist() == [0.0]
    assert group_advantages(rewards, "group").tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("row", [[0.001, 0.002, 0.001], [1e6, 1e6 + 10, 1e6], [-1.0, -1.001, -1.0]])
def test_small_differences_that_are_meant_are_kept(row):
    rewards = torch.tensor([row], dtype=torch.float64)
    assert group_spread(rewards).item() == pytest.approx(max(row) - min(row))
    assert group_advantages(rewards, "group").abs().min() > 0


def test_the_overlong_penalty_by_hand():
    # L = 20, buffer 4: nothing up to 16, then a quarter a token
    lengths = torch.tensor([[1, 16, 17, 18, 20]])
    assert overlong_penalties(lengths, 20, 4, 2.0).tolist() == [[0, 0, -0.5, -1.0, -2.0]]
