"""Each equation of docs/objective.md with numbers worked out by hand, and in fp64 that the cut does not matter."""

import math

import pytest
import torch
from helpers import make_rollout, pack_items

from qerl.algo.advantages import group_advantages
from qerl.algo.aggregation import sequence_weights
from qerl.algo.correction import correction_weights
from qerl.algo.kl import kl_estimate
from qerl.algo.loss import policy_loss
from qerl.algo.loss_metrics import loss_metrics
from qerl.config import AlgoConfig, CorrectionConfig
from qerl.model.logprobs import chunked_logprobs

LOSS_TYPES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "gspo"]
OFF = CorrectionConfig(mode="off")


def gradient_of(logprobs, old, advantages, lengths, algo, correction=OFF, reference=None):
    """Loss, and its gradient at each token, of sequences whose tokens all count 1."""
    rollouts = [make_rollout(2, n, seed=i) for i, n in enumerate(lengths)]
    (batch,) = pack_items(
        rollouts,
        advantages,
        old=list(torch.tensor(old).split(lengths)),
        reference=None if reference is None else list(torch.tensor(reference).split(lengths)),
    )
    leaf = torch.tensor(logprobs).requires_grad_()
    output = policy_loss(leaf, torch.zeros_like(leaf), batch, algo, correction)
    output.loss.backward()
    return output, leaf.grad.tolist()


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
    assert sequence_weights([2, 3, 4], "bnpo", 8, tokens_per_update=20) == [1 / 9] * 3
    assert sequence_weights([2, 3, 4], "cispo", 8, tokens_per_update=20) == [1 / 20] * 3
    assert sequence_weights([2, 3, 4], "gspo", 8) == [1 / 6, 1 / 9, 1 / 12]
    with pytest.raises(ValueError, match="no aggregation"):
        sequence_weights([1], "ppo", 8)


def batch_gradient(algo, budget, skip_zero=False, correction=None):
    """Gradient of the head's input map, in fp64, of a batch cut under `budget`, through the real chunked head."""
    generator = torch.Generator().manual_seed(1)
    vocab, width = 50, 16
    lengths = [5, 1, 7, 3, 9, 4, 2, 6]
    advantages = [0.5, -1.0, 0.0, 2.0, 0.0, -0.3, 1.1, -2.0]
    rollouts = [make_rollout(4, n, seed=i, vocab=vocab) for i, n in enumerate(lengths)]
    weights = sequence_weights(lengths, algo.loss_type, 12)
    table = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    matrix = torch.randn(width, width, generator=generator, dtype=torch.float64).mul_(0.02)
    old = [torch.randn(n, generator=generator, dtype=torch.float64) / 4 - 4 for n in lengths]
    matrix.requires_grad_()
    kept = [i for i, advantage in enumerate(advantages) if advantage or not skip_zero]
    outputs = []
    for batch in pack_items(
        [rollouts[i] for i in kept],
        [advantages[i] for i in kept],
        [weights[i] for i in kept],
        old=[old[i] for i in kept],
        reference=[old[i] + 0.1 for i in kept] if algo.beta else None,
        budget=budget,
    ):
        hidden = (table[batch.token_ids] @ matrix)[batch.score_index]
        logprobs, entropy = chunked_logprobs(hidden, head, batch.target_ids, 0.7)
        output = policy_loss(logprobs, entropy, batch, algo, correction or CorrectionConfig())
        output.loss.backward()
        outputs.append(output)
    return matrix.grad, loss_metrics(outputs)


@pytest.mark.parametrize(
    ("algo", "correction"),
    [
        *((AlgoConfig(loss_type=name), None) for name in LOSS_TYPES),
        (AlgoConfig(importance_sampling_level="sequence", delta=2.0), None),
        (AlgoConfig(beta=0.5), None),
        (AlgoConfig(), CorrectionConfig(mode="sequence_mask", clip_max=1e6)),
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_cut(algo, correction):
    whole, metrics = batch_gradient(algo, 10**6, correction=correction)
    assert whole.abs().max() > 1e-3
    for budget in (1, 9, 20, 33):
        cut, cut_metrics = batch_gradient(algo, budget, correction=correction)
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-14)
        assert cut_metrics == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_skipping_zero_advantages_is_exact(loss_type):
    whole, _ = batch_gradient(AlgoConfig(loss_type=loss_type), 20, skip_zero=False)
    skipped, _ = batch_gradient(AlgoConfig(loss_type=loss_type), 20, skip_zero=True)
    torch.testing.assert_close(skipped, whole, rtol=1e-12, atol=1e-14)
    assert whole.abs().max() > 1e-3


def test_clipping_stops_the_gradient_outside_the_range():
    # ratios: above 1.28, inside, below 0.8, inside; only the outside ones lose their gradient
    ratios = [1.5, 1.1, 0.7, 0.9]
    output, grad = gradient_of(
        [math.log(r) - 1 for r in ratios], [-1.0] * 4, [1.0, 1.0, -1.0, -1.0], [1] * 4, AlgoConfig()
    )
    assert grad == pytest.approx([0, -1.1, 0, 0.9])
    assert output.sums["clipped"] == 2
    assert output.loss.item() == pytest.approx(-(1.28 + 1.1 - 0.8 - 0.9))


def test_the_dual_clip_bounds_what_a_bad_token_can_do():
    # A = -1, ratio 5: unbounded the loss is 5 with gradient 5; with delta 3 it is 3 and constant
    assert gradient_of([math.log(5.0)], [0.0], [-1.0], [1], AlgoConfig())[1] == pytest.approx([5.0])
    output, grad = gradient_of([math.log(5.0)], [0.0], [-1.0], [1], AlgoConfig(delta=3.0))
    assert (output.loss.item(), grad) == (pytest.approx(3.0), [0.0])
    # a positive advantage is bounded by 1 + epsilon_high already
    output, _ = gradient_of([math.log(5.0)], [0.0], [1.0], [1], AlgoConfig(delta=3.0))
    assert output.loss.item() == pytest.approx(-1.28)


def test_the_sequence_ratio_is_the_geometric_mean():
    # log-ratios 0.3 and -0.1: s = exp(0.1); each token's gradient is -s * A / 2, twice
    algo = AlgoConfig(importance_sampling_level="sequence")
    output, grad = gradient_of([-0.7, -1.1], [-1.0, -1.0], [2.0], [2], algo)
    assert output.loss.item() == pytest.approx(-2 * 2 * math.exp(0.1))
    assert grad == pytest.approx([-2 * math.exp(0.1)] * 2)
    # two sequences do not mix: log-ratios (0.3) and (-0.1)
    output, _ = gradient_of([-0.8, -1.1], [-1.0, -1.0], [1.0, 1.0], [1, 1], algo)
    assert output.loss.item() == pytest.approx(-(math.exp(0.2) + math.exp(-0.1)))


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # ratio 2 > 1.28: PPO drops the token, CISPO gives it the weight 1.28
    ours = AlgoConfig(loss_type="cispo")
    output, grad = gradient_of([math.log(2.0) - 1, -1.0], [-1.0, -1.0], [1.0, 1.0], [1, 1], ours)
    assert grad == pytest.approx([-1.28, -1.0])
    assert output.loss.item() == pytest.approx(-1.28 * (math.log(2.0) - 1) + 1.0)
    assert output.sums["clipped"] == 1
    # no lower bound
    assert gradient_of([-3.0], [-1.0], [-1.0], [1], ours)[1] == pytest.approx([math.exp(-2.0)])


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.5, 0.5),  # the value d, the gradient of k2: grad d alone has expectation 0
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_kl_by_hand(estimator, value, gradient):
    algo = AlgoConfig(beta=0.1, kl_estimator=estimator)
    output, grad = gradient_of([-1.0], [-1.0], [0.0], [1], algo, reference=[-1.5])
    assert output.sums["kl"] == pytest.approx(value)
    assert output.loss.item() == pytest.approx(0.1 * value)
    assert grad == pytest.approx([0.1 * gradient])
    assert loss_metrics([output])["kl"] == pytest.approx(value)


def test_expected_values_and_gradients_of_the_kl_estimators():
    """Exact expectations over a small vocabulary: k1, k3 have the value KL(pi|ref); k1, k2 its gradient, k3 the other one's."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(0), other.log_softmax(0)
    p = logp.exp().detach()
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad(-(ref.exp() * logp).sum(), logits, retain_graph=True)
    for estimator, gradient in (("k1", reverse), ("k2", reverse), ("k3", forward)):
        estimate = (p * kl_estimate(logp, ref, estimator)).sum()
        (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(found, gradient)
        if estimator != "k2":
            torch.testing.assert_close(estimate, (p * (logp - ref)).sum())


def test_correction_truncates_and_raw_statistics_do_not():
    log_ratio = torch.tensor([0.0, math.log(3.0), math.log(0.5)])
    (batch,) = pack_items([make_rollout(2, 3, seed=0)], [1.0], [1 / 3])
    logprobs = (batch.rollout_logprobs + log_ratio).requires_grad_()
    metrics = loss_metrics(
        [policy_loss(logprobs, torch.zeros(3), batch, AlgoConfig(), CorrectionConfig())]
    )
    assert metrics["sampling/ratio_raw/max"] == pytest.approx(3.0)
    assert metrics["sampling/ratio_raw/mean"] == pytest.approx(1.5)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(2.0)
    assert metrics["sampling/ratio_raw/frac_truncated"] == pytest.approx(1 / 3)
    assert metrics["sampling/ratio_raw/frac_below"] == 0
    assert metrics["sampling/ratio_raw/ess"] == pytest.approx(4.5**2 / (3 * (1 + 9 + 0.25)))
    assert metrics["sampling/token_mult_prob_error"] == pytest.approx((1 + 3 + 2) / 3)


@pytest.mark.parametrize(
    ("mode", "clip_min", "expected"),
    [
        ("off", None, [1, 1, 1]),
        ("token_truncate", None, [0.5, 2, 1.5]),
        ("token_truncate", 0.8, [0.8, 2, 1.5]),
        ("token_mask", None, [0.5, 0, 1.5]),
        ("token_mask", 0.8, [0, 0, 1.5]),
        # sequences: 0.5 * 3 = 1.5, and 1.5
        ("sequence_truncate", None, [1.5, 1.5, 1.5]),
        ("sequence_mask", None, [1.5, 1.5, 1.5]),
    ],
)
def test_corrections_by_hand(mode, clip_min, expected):
    (batch,) = pack_items([make_rollout(2, 2, seed=0), make_rollout(2, 1, seed=1)])
    log_ratio = torch.tensor([0.5, 3.0, 1.5]).log()
    config = CorrectionConfig(mode=mode, clip_min=clip_min)
    assert correction_weights(log_ratio, batch, config).tolist() == pytest.approx(expected)


def test_a_sequence_outside_the_bounds_is_masked_as_a_whole_and_counted():
    (batch,) = pack_items([make_rollout(2, 2, seed=0), make_rollout(2, 1, seed=1)])
    logprobs = (batch.rollout_logprobs + torch.tensor([1.8, 1.8, 0.5]).log()).requires_grad_()
    config = CorrectionConfig(mode="sequence_mask", clip_max=3.0, clip_min=0.6)
    output = policy_loss(logprobs, torch.zeros(3), batch, AlgoConfig(), config)
    output.loss.backward()
    assert logprobs.grad.tolist() == [0, 0, 0]  # 1.8 * 1.8 = 3.24 is above, 0.5 below
    metrics = loss_metrics([output])
    assert metrics["sampling/ratio_raw/sequence_max"] == pytest.approx(3.24, rel=1e-5)
    assert metrics["sampling/ratio_raw/sequence_mean"] == pytest.approx(1.87, rel=1e-5)
    assert metrics["sampling/ratio_raw/sequence_frac_truncated"] == 0.5
    assert metrics["sampling/ratio_raw/sequence_frac_below"] == 0.5


def test_the_correction_is_a_constant_of_the_loss():
    (batch,) = pack_items([make_rollout(2, 2, seed=0)], [1.0], [0.5])
    logprobs = (batch.rollout_logprobs + math.log(1.5)).requires_grad_()
    policy_loss(logprobs, torch.zeros(2), batch, AlgoConfig(), CorrectionConfig()).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * 1.5] * 2)


def test_no_outputs_give_no_metrics():
    assert loss_metrics([]) == {}
