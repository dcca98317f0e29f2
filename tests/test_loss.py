import math

import pytest
import torch
from helpers import make_rollout, pack_items

from qerl.algo.advantages import group_advantages
from qerl.algo.aggregation import sequence_weights
from qerl.algo.correction import correction_weights
from qerl.algo.loss import policy_loss
from qerl.algo.loss_metrics import loss_metrics
from qerl.config import AlgoConfig, CorrectionConfig
from qerl.model.logprobs import chunked_logprobs

LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", 0.0), ("dapo", 0.11545), ("dr_grpo", 0.04810)]
)
def test_worked_example(loss_type, expected):
    """The batch that docs/objective.md works out by hand."""
    lengths = [2, 4, 4, 3, 3, 4]
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    advantages = group_advantages(rewards, "group").flatten().tolist()
    assert advantages == pytest.approx([1.15450, -0.57725, -0.57725, 0, 0, 0], abs=1e-5)
    rollouts = [make_rollout(3, n, seed=i) for i, n in enumerate(lengths)]
    weights = sequence_weights(lengths, loss_type, max_completion_length=8)
    (batch,) = pack_items(rollouts, advantages, weights)
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    loss = policy_loss(
        logprobs, torch.zeros_like(logprobs), batch, AlgoConfig(), CorrectionConfig()
    ).loss
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_weights_by_hand():
    assert sequence_weights([2, 3, 4], "grpo", 8) == [1 / 6, 1 / 9, 1 / 12]
    assert sequence_weights([2, 3, 4], "dapo", 8) == [1 / 9] * 3
    assert sequence_weights([2, 3, 4], "dr_grpo", 8) == [1 / 24] * 3
    assert sequence_weights([0, 0], "dapo", 8) == [0.0, 0.0]
    assert sequence_weights([0, 2], "grpo", 8) == [0.0, 1 / 4]


def batch_gradient(loss_type, budget, skip_zero):
    """Gradient of the head input map, in fp64, of a batch cut under `budget`, through the real chunked head."""
    generator = torch.Generator().manual_seed(1)
    vocab, width = 50, 16
    lengths = [5, 1, 7, 3, 9, 4, 2, 6]
    advantages = [0.5, -1.0, 0.0, 2.0, 0.0, -0.3, 1.1, -2.0]
    rollouts = [make_rollout(4, n, seed=i, vocab=vocab) for i, n in enumerate(lengths)]
    weights = sequence_weights(lengths, loss_type, 12)
    table = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    matrix = torch.randn(width, width, generator=generator, dtype=torch.float64).mul_(0.02)
    matrix.requires_grad_()
    items = [
        item
        for item in zip(rollouts, advantages, weights, strict=True)
        if item[1] != 0 or not skip_zero
    ]
    chosen, chosen_advantages, chosen_weights = zip(*items, strict=True)
    outputs = []
    for batch in pack_items(chosen, chosen_advantages, chosen_weights, budget=budget):
        hidden = (table[batch.token_ids] @ matrix)[batch.score_index]
        logprobs, entropy = chunked_logprobs(hidden, head, batch.target_ids, 0.7)
        output = policy_loss(logprobs, entropy, batch, AlgoConfig(), CorrectionConfig())
        output.loss.backward()
        outputs.append(output)
    return matrix.grad, loss_metrics(outputs)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_does_not_depend_on_the_cut(loss_type):
    whole, metrics = batch_gradient(loss_type, budget=10**6, skip_zero=False)
    for budget in (1, 9, 20, 33):
        cut, cut_metrics = batch_gradient(loss_type, budget=budget, skip_zero=False)
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-14)
        assert cut_metrics == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_skipping_zero_advantages_is_exact(loss_type):
    whole, _ = batch_gradient(loss_type, budget=20, skip_zero=False)
    skipped, _ = batch_gradient(loss_type, budget=20, skip_zero=True)
    torch.testing.assert_close(skipped, whole, rtol=1e-12, atol=1e-14)
    assert whole.abs().max() > 1e-3


def test_clipping_stops_the_gradient_outside_the_range():
    rollouts = [make_rollout(2, 1, seed=i) for i in range(4)]
    (batch,) = pack_items(rollouts, [1.0, 1.0, -1.0, -1.0], [0.25] * 4)
    old = batch.rollout_logprobs
    # ratios: above 1.28, inside, below 0.8, inside; only the outside ones lose their gradient
    logprobs = (old + torch.tensor([1.5, 1.1, 0.7, 0.9]).log()).requires_grad_()
    output = policy_loss(
        logprobs, torch.zeros(4), batch, AlgoConfig(), CorrectionConfig(mode="off"), old
    )
    output.loss.backward()
    assert (logprobs.grad != 0).tolist() == [False, True, False, True]
    assert output.sums["clipped"] == 2
    assert logprobs.grad[1].item() == pytest.approx(-0.25 * 1.1)


def test_correction_truncates_and_raw_statistics_do_not():
    log_ratio = torch.tensor([0.0, math.log(3.0), math.log(0.5)])
    assert correction_weights(log_ratio, CorrectionConfig()).tolist() == pytest.approx([1, 2, 0.5])
    assert correction_weights(log_ratio, CorrectionConfig(mode="off")).tolist() == [1, 1, 1]
    rollouts = [make_rollout(2, 3, seed=0)]
    (batch,) = pack_items(rollouts, [1.0], [1 / 3])
    logprobs = (batch.rollout_logprobs + log_ratio).requires_grad_()
    metrics = loss_metrics(
        [policy_loss(logprobs, torch.zeros(3), batch, AlgoConfig(), CorrectionConfig())]
    )
    assert metrics["sampling/ratio_raw/max"] == pytest.approx(3.0)
    assert metrics["sampling/ratio_raw/mean"] == pytest.approx(1.5)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(2.0)
    assert metrics["sampling/ratio_raw/frac_truncated"] == pytest.approx(1 / 3)
    assert metrics["sampling/ratio_raw/ess"] == pytest.approx(4.5**2 / (3 * (1 + 9 + 0.25)))
    assert metrics["sampling/token_mult_prob_error"] == pytest.approx((1 + 3 + 2) / 3)


def test_the_correction_is_a_constant_of_the_loss():
    (batch,) = pack_items([make_rollout(2, 2, seed=0)], [1.0], [0.5])
    logprobs = (batch.rollout_logprobs + math.log(1.5)).requires_grad_()
    policy_loss(logprobs, torch.zeros(2), batch, AlgoConfig(), CorrectionConfig()).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 1.5] * 2)


def test_no_outputs_give_no_metrics():
    assert loss_metrics([]) == {}
