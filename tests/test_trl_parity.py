"""TRL 1.16 as the reference: the same log-probs, advantages and masks through its code and ours, in fp64.

`GRPOTrainer._compute_loss` is called on an object that has just the attributes it reads. Advantages and rollout
correction are blocks inside TRL's rollout method, which would need a whole trainer: they are taken out of its source
and executed as they stand.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import make_rollout, pack_items

from qerl.algo.advantages import group_advantages, overlong_penalties
from qerl.algo.aggregation import sequence_weights
from qerl.algo.loss import policy_loss
from qerl.config import AlgoConfig, CorrectionConfig

pytest.importorskip("trl", reason="TRL is a test dependency: pip install trl==1.16.0")

from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer, rloo_trainer

LENGTHS = [2, 5, 3, 1, 6, 4]
WIDTH, LONGEST = max(LENGTHS), 8
ADVANTAGES = [1.5, -0.7, 0.0, -2.0, 0.4, 0.8]
CUT = [False, True, False, False, False, True]


class Batch:
    """One batch both ways: a list of sequences for us, padded [B, T] tensors for TRL."""

    def __init__(self, spread: float = 0.6):
        generator = torch.Generator().manual_seed(3)
        self.rollouts = [make_rollout(3, n, seed=i) for i, n in enumerate(LENGTHS)]
        self.behaviour = [torch.tensor(r.logprobs).double() for r in self.rollouts]

        def moved(tensors):
            noise = [torch.randn(len(t), generator=generator, dtype=torch.float64) for t in tensors]
            return [t + spread * n for t, n in zip(tensors, noise, strict=True)]

        self.old = moved(self.behaviour)
        self.current = moved(self.old)
        self.reference = moved(self.old)

    def ours(self, algo, correction, *, cut=(False,) * 6, num_minibatches=1):
        """Loss, and gradient at each token, of the first minibatch."""
        lengths = [0 if c else n for n, c in zip(LENGTHS, cut, strict=True)]
        chosen = list(range(len(LENGTHS) // num_minibatches))
        weights = sequence_weights(
            [lengths[i] for i in chosen],
            algo.loss_type,
            LONGEST,
            tokens_per_update=sum(lengths) / num_minibatches,
        )
        logprobs = [t.clone().requires_grad_() for t in self.current]
        kept = [i for i in chosen if weights[i]]
        (batch,) = pack_items(
            [self.rollouts[i] for i in kept],
            [ADVANTAGES[i] for i in kept],
            [weights[i] for i in kept],
            old=[self.old[i] for i in kept],
            reference=[self.reference[i] for i in kept] if algo.beta else None,
        )
        # advantages and weights in fp64, as TRL gets them
        batch = fp64(batch, [ADVANTAGES[i] for i in kept], [weights[i] for i in kept])
        flat = torch.cat([logprobs[i] for i in kept])
        loss = policy_loss(flat, torch.zeros_like(flat), batch, algo, correction).loss
        loss.backward()
        zeros = [torch.zeros_like(t) for t in logprobs]
        grads = [z if t.grad is None else t.grad for t, z in zip(logprobs, zeros, strict=True)]
        return loss.item(), pad([grads[i] for i in chosen])

    def trls(self, algo, correction, *, cut=(False,) * 6, num_minibatches=1):
        """The same through GRPOTrainer._compute_loss."""
        size = len(LENGTHS) // num_minibatches
        mask = pad([torch.ones(n).double() * (not c) for n, c in zip(LENGTHS, cut, strict=True)])
        logprobs = pad(self.current)[:size].requires_grad_()
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                logprobs,
                torch.zeros_like(logprobs),
                None,
            ),
            args=SimpleNamespace(
                delta=algo.delta, use_bias_correction_kl=False, steps_per_generation=num_minibatches
            ),
            accelerator=SimpleNamespace(
                num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
            ),
            model=SimpleNamespace(training=True),
            loss_type="grpo" if algo.loss_type == "gspo" else algo.loss_type,
            importance_sampling_level=algo.importance_sampling_level,
            beta=algo.beta,
            epsilon_low=algo.epsilon,
            # TRL's cispo takes the bound itself, ours the distance from 1, as for the other losses
            epsilon_high=algo.epsilon_high + (algo.loss_type == "cispo"),
            max_completion_length=LONGEST,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=1,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        inputs = {
            "prompt_ids": torch.zeros(size, 3).long(),
            "prompt_mask": torch.ones(size, 3).long(),
            "completion_ids": torch.zeros(size, WIDTH).long(),
            "completion_mask": mask[:size],
            "advantages": torch.tensor(ADVANTAGES[:size]).double(),
            "old_per_token_logps": pad(self.old)[:size],
            "ref_per_token_logps": pad(self.reference)[:size],
            "importance_sampling_ratio": self.trl_correction(correction, mask)[:size],
            "num_items_in_batch": mask.sum(),
        }
        loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        return loss.item(), logprobs.grad * mask[:size]

    def trl_correction(self, correction, mask):
        """TRL's importance_sampling_ratio, by its own code."""
        if correction.mode == "off":
            return torch.ones_like(mask)
        trainer = SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=correction.mode,
            vllm_importance_sampling_clip_min=correction.clip_min,
            vllm_importance_sampling_clip_max=correction.clip_max,
        )
        return run_block(
            grpo_trainer.GRPOTrainer._generate_and_score_completions,
            "self.use_vllm and self.vllm_importance_sampling_correction",
            "vllm_importance_sampling_ratio",
            self=trainer,
            completion_mask=mask,
            tool_mask=None,
            old_per_token_logps=pad(self.old),
            sampling_per_token_logps=pad(self.behaviour),
        )


def fp64(batch, advantages, weights):
    """The microbatch with its constants in fp64."""
    index = batch.sequence_index
    return replace(
        batch,
        advantages=torch.tensor(advantages).double()[index],
        token_weights=torch.tensor(weights, dtype=torch.float64)[index],
        rollout_logprobs=batch.rollout_logprobs.double(),
    )


def pad(rows):
    return torch.stack([torch.nn.functional.pad(row, (0, WIDTH - len(row))) for row in rows])


def run_block(function, test, assigned, result=None, /, **names):
    """Execute the `if TEST:` of a TRL function that assigns `assigned`; return that, or `result`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == test
        and any(
            isinstance(n, ast.Name) and n.id == assigned and isinstance(n.ctx, ast.Store)
            for n in ast.walk(node)
        )
    ]
    module = inspect.getmodule(inspect.unwrap(function))
    scope = vars(module) | names
    exec(compile(ast.Module([blocks[0]], []), module.__file__, "exec"), scope)
    return scope[result or assigned]


def assert_equal(algo, correction=None, **how):
    batch = Batch()
    correction = correction or CorrectionConfig(mode="off")
    loss, grad = batch.ours(algo, correction, **how)
    expected_loss, expected_grad = batch.trls(algo, correction, **how)
    assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-9)
    assert expected_grad.abs().max() > 1e-3


LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "dapo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo"},
    {"loss_type": "gspo"},
]


@pytest.mark.parametrize("changes", LOSSES, ids=lambda c: c["loss_type"])
def test_every_loss_is_trls(changes):
    assert_equal(AlgoConfig(**changes))


@pytest.mark.parametrize("changes", LOSSES, ids=lambda c: c["loss_type"])
def test_with_kl_and_correction_and_truncated_completions_masked(changes):
    assert_equal(AlgoConfig(**changes, beta=0.1), CorrectionConfig(), cut=CUT)


@pytest.mark.parametrize("changes", LOSSES, ids=lambda c: c["loss_type"])
def test_one_of_two_minibatches(changes):
    assert_equal(AlgoConfig(**changes), num_minibatches=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"delta": 1.4, "loss_type": "grpo"},
        {"delta": 1.4, "loss_type": "gspo"},
        {"importance_sampling_level": "sequence", "loss_type": "dapo"},
        {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"},
        {"epsilon": 0.05, "epsilon_high": 0.1},
    ],
)
def test_dual_clip_ranges_and_sequence_ratios(changes):
    assert_equal(AlgoConfig(**changes))


@pytest.mark.parametrize("clip_min", [None, 0.5])
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_every_correction_is_trls(mode, clip_min):
    assert_equal(AlgoConfig(), CorrectionConfig(mode=mode, clip_max=3.0, clip_min=clip_min))


REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], [0.3, float("nan"), 2.0, 0.0]])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_trls(scale):
    advantages = run_block(
        grpo_trainer.GRPOTrainer._generate_and_score_completions,
        "self.multi_objective_aggregation == 'sum_then_normalize'",
        "advantages",
        self=SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            scale_rewards=scale,
        ),
        rewards_per_func=REWARDS.view(-1, 1),
        unscorable_mask=REWARDS.view(-1).isnan(),
        num_generations=4,
        device="cpu",
    )
    expected = advantages.nan_to_num(nan=0.0).view(3, 4)
    torch.testing.assert_close(group_advantages(REWARDS, scale), expected, rtol=1e-5, atol=1e-6)


def test_leave_one_out_advantages_are_trls():
    advantages = run_block(
        rloo_trainer.RLOOTrainer._generate_and_score_completions,
        "num_generations > 1",
        "baselines",
        "advantages",
        grouped_rewards=REWARDS,
        rewards=REWARDS.view(-1),
        num_generations=4,
        grouped_sum=REWARDS.nansum(1, keepdim=True),
        scorable_counts=(~REWARDS.isnan()).sum(1, keepdim=True),
    )
    expected = advantages.nan_to_num(nan=0.0).view(3, 4)
    torch.testing.assert_close(group_advantages(REWARDS, "none", "rloo"), expected)


def test_the_overlong_penalty_is_trls():
    lengths = torch.tensor([[0, 10, 16, 17], [18, 19, 20, 20]])
    punish = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=4)
    expected = punish([[0] * n for n in lengths.flatten().tolist()])
    ours = overlong_penalties(lengths, 20, 4, 1.0)
    assert ours.flatten().tolist() == pytest.approx(expected)
