"""The update step on a tiny policy: minibatches, stored log-probs, the KL reference, what is not finite."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import load_policy, make_rollout, pack_items, randomize_adapter

from qerl.algo.advantages import group_advantages
from qerl.config import Config
from qerl.errors import RunError
from qerl.optim import make_optimizer
from qerl.rollout import Batch
from qerl.update import cut_into_minibatches, stop_if_stuck, trained_groups, update

P, G = 4, 3
REWARDS = torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 1, math.nan]]).double()


def make_run(folder, *, policy=None, budget=8192, **algo):
    """What `update` reads of a run: settings, policy, optimizer."""
    config = Config.model_validate(
        {
            "model": "tiny",
            "rollout": {"prompts_per_step": P, "num_generations": G, "max_completion_length": 8},
            "train": {"optim": "adamw", "learning_rate": 1e-2, "warmup_ratio": 0},
            "algo": algo,
        }
    )
    policy = policy or load_policy(folder)
    randomize_adapter(policy)
    optimizer = make_optimizer(policy.trainable_parameters(), config.train)
    return SimpleNamespace(
        config=config,
        policy=policy,
        optimizer=optimizer,
        num_steps=10,
        skipped_in_a_row=0,
        memory=SimpleNamespace(sizes=SimpleNamespace(max_tokens_per_microbatch=budget)),
    )


def make_batch(policy, **changes):
    """P groups of G rollouts, scored by the policy itself plus a little, as an engine would."""
    generator = torch.Generator().manual_seed(5)
    rollouts = [
        [make_rollout(3, 2 + (p + g) % 4, seed=10 * p + g, vocab=250, **changes) for g in range(G)]
        for p in range(P)
    ]
    flat = [rollout for group in rollouts for rollout in group]
    (batch,) = pack_items(flat)
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch, 1.0)
    logprobs += 0.05 * torch.randn(len(logprobs), generator=generator)
    parts = iter(logprobs.split([len(r.completion_ids) for r in flat]))
    scored = [
        [SimpleNamespace(**vars(r) | {"logprobs": tuple(next(parts).tolist())}) for r in group]
        for group in rollouts
    ]
    return Batch(encoded=None, indices=tuple(range(P)), rollouts=scored, texts=[])


def adapter(policy):
    return torch.cat([p.detach().flatten().clone() for _, p in policy.trainable_parameters()])


def step(run, batch=None, rewards=REWARDS, number=0):
    batch = batch or make_batch(run.policy)
    return update(run, number, batch, rewards, group_advantages(rewards, "group"), None)


@pytest.fixture
def passes(monkeypatch):
    """Makes a policy count its forward passes: with gradient, without."""

    def watch(policy):
        counts = {True: 0, False: 0}
        inner = policy.logprobs

        def logprobs(batch, temperature):
            counts[torch.is_grad_enabled()] += 1
            return inner(batch, temperature)

        monkeypatch.setattr(policy, "logprobs", logprobs)
        return counts

    return watch


def test_one_update_computes_nothing_twice(tiny_folder, passes):
    run = make_run(tiny_folder)
    batch = make_batch(run.policy)
    counts = passes(run.policy)
    metrics = step(run, batch)
    assert counts == {True: 1, False: 0}
    assert (metrics["num_updates"], metrics["num_updates_skipped"]) == (1, 0)
    # two groups with spread and two samples of the last; the one without a reward is no part of the batch
    assert metrics["frac_sequences_trained"] == 8 / 12


def test_several_updates_share_one_set_of_log_probs(tiny_folder, passes):
    run = make_run(tiny_folder, num_iterations=2, num_minibatches=2)
    batch = make_batch(run.policy)
    counts = passes(run.policy)
    metrics = step(run, batch)
    assert counts == {True: 4, False: 1}
    assert metrics["num_updates"] == 4
    states = list(run.optimizer.state.values())
    assert {int(state["step"]) for state in states} == {4}
    assert metrics["learning_rate"] == 1e-2


def test_the_ratio_is_taken_against_the_rollout_weights(tiny_folder):
    """A second pass over the batch clips what the first has moved out of the range."""
    once = step(make_run(tiny_folder, epsilon=1e-4, epsilon_high=1e-4))
    twice = step(make_run(tiny_folder, epsilon=1e-4, epsilon_high=1e-4, num_iterations=2))
    assert once["clip_ratio/region_mean"] == 0
    assert twice["clip_ratio/region_mean"] > 0.2
    # the correction compares rollout and trainer at the rollout weights, in every pass
    key = "sampling/ratio_raw/mean"
    assert twice[key] == pytest.approx(once[key], rel=1e-5)


@pytest.mark.parametrize(
    "algo",
    [
        {"num_iterations": 2, "num_minibatches": 2, "beta": 0.1},
        {"loss_type": "gspo", "num_iterations": 2},
        {"loss_type": "cispo", "num_minibatches": 4},
    ],
    ids=str,
)
def test_updates_do_not_depend_on_the_token_budget(tiny_folder, algo):
    results = []
    for budget in (8192, 12):
        run = make_run(tiny_folder, budget=budget, **algo)
        metrics = step(run)
        results.append((adapter(run.policy), metrics))
    (whole, metrics), (cut, cut_metrics) = results
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
    assert cut_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_minibatches_by_hand(tiny_folder):
    run = make_run(tiny_folder, num_minibatches=2, loss_type="dapo")
    groups = trained_groups(0, make_batch(run.policy), REWARDS, group_advantages(REWARDS, "group"))
    # lengths 2 3 4 | 3 4 5 | 4 5 2 | 5 2: 39 tokens; the group without spread counts and is left out
    first, second = cut_into_minibatches(groups, run.config)
    assert [len(i.rollout.completion_ids) for i in first] == [2, 3, 4]
    assert [len(i.rollout.completion_ids) for i in second] == [4, 5, 2, 5, 2]
    assert {i.token_weight for i in first + second} == {2 / 39}
    bnpo = make_run(tiny_folder, policy=run.policy, num_minibatches=2, loss_type="bnpo").config
    first, second = cut_into_minibatches(groups, bnpo)
    assert ({i.token_weight for i in first}, {i.token_weight for i in second}) == (
        {1 / 21},
        {1 / 18},
    )


def test_truncated_completions_count_nowhere_but_in_the_baseline(tiny_folder):
    run = make_run(tiny_folder, mask_truncated_completions=True, loss_type="grpo")
    batch = make_batch(run.policy)
    batch.rollouts[0][0].finish_reason = "length"
    advantages = group_advantages(REWARDS, "group")
    groups = trained_groups(0, batch, REWARDS, advantages)
    (items,) = cut_into_minibatches(groups, run.config)
    assert len(items) == 7
    assert all(i.rollout.finish_reason == "stop" for i in items)
    assert items[0].advantage == advantages[0, 1]
    assert items[0].token_weight == 1 / (11 * 3)  # TRL: masked sequences stay among the S


def test_a_batch_of_truncated_completions_changes_nothing(tiny_folder):
    run = make_run(tiny_folder, mask_truncated_completions=True)
    metrics = step(run, make_batch(run.policy, finish_reason="length"))
    assert metrics["grad_norm"] == 0
    assert metrics["num_tokens_trained"] == 0


# --- KL -------------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_base_and_leaves_no_trace(tiny_folder):
    policy = load_policy(tiny_folder)
    (batch,) = pack_items([make_rollout(3, 5, vocab=250)])
    with torch.no_grad():
        base, _ = policy.logprobs(batch, 1.0)  # B is zero
        randomize_adapter(policy)
        before, trained = adapter(policy), policy.logprobs(batch, 1.0)[0]
        with policy.reference():
            reference, _ = policy.logprobs(batch, 1.0)
        again, _ = policy.logprobs(batch, 1.0)
    assert reference.tolist() == base.tolist()
    assert (trained - base).abs().max() > 1e-3
    assert again.tolist() == trained.tolist()
    assert torch.equal(adapter(policy), before)
    assert all(p.requires_grad for _, p in policy.trainable_parameters())


def test_the_reference_of_a_continued_adapter_is_that_adapter(tiny_folder, tmp_path):
    first = load_policy(tiny_folder)
    randomize_adapter(first)
    first.save_adapter(tmp_path)
    (batch,) = pack_items([make_rollout(3, 5, vocab=250)])
    policy = load_policy(tiny_folder, keep_initial=True, init_adapter=str(tmp_path))
    with torch.no_grad():
        initial, _ = policy.logprobs(batch, 1.0)
        randomize_adapter(policy, seed=9)
        before = adapter(policy)
        with policy.reference():
            reference, _ = policy.logprobs(batch, 1.0)
    assert reference.tolist() == initial.tolist()
    assert torch.equal(adapter(policy), before)


def test_kl_trains_on_every_sequence_and_pulls_back(tiny_folder, passes):
    run = make_run(tiny_folder, beta=1.0, kl_estimator="k2")
    batch = make_batch(run.policy)
    counts = passes(run.policy)
    no_signal = torch.zeros(P, G).double()
    first = step(run, batch, no_signal)
    assert counts == {True: 1, False: 1}
    assert first["frac_sequences_trained"] == 1
    assert first["kl"] > 0
    for _ in range(4):
        last = step(run, batch, no_signal)
    assert last["kl"] < 0.5 * first["kl"]


# --- not finite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["infinite reward", "no reward", "log-prob"])
def test_an_update_that_is_not_finite_is_skipped(tiny_folder, kind):
    run = make_run(tiny_folder)
    batch, rewards = make_batch(run.policy), REWARDS.clone()
    step(run, batch)
    before, states = adapter(run.policy), run.optimizer.state_dict()["state"]
    if kind == "infinite reward":
        rewards[0, 0] = math.inf
    elif kind == "no reward":
        rewards[:] = math.nan
    else:
        batch.rollouts[0][0].logprobs = (math.nan,) * 2
    metrics = step(run, batch, rewards)
    assert (metrics["num_updates"], metrics["num_updates_skipped"]) == (0, 1)
    assert math.isnan(metrics["grad_norm"])
    assert torch.equal(adapter(run.policy), before)
    assert all(int(state["step"]) == 1 for state in states.values())
    assert run.skipped_in_a_row == 1
    step(run, make_batch(run.policy))
    assert run.skipped_in_a_row == 0


def test_the_other_minibatches_of_a_step_are_used(tiny_folder):
    run = make_run(tiny_folder, num_minibatches=4)
    batch = make_batch(run.policy)
    batch.rollouts[0][0].logprobs = (math.nan,) * 2
    metrics = step(run, batch)
    assert (metrics["num_updates"], metrics["num_updates_skipped"]) == (3, 1)
    assert math.isfinite(metrics["loss"])


def test_too_many_in_a_row_end_the_run_and_say_where_it_began(tiny_folder):
    run = make_run(tiny_folder)
    run.skipped_in_a_row = 4
    stop_if_stuck(run, 7)
    run.skipped_in_a_row = 5
    with pytest.raises(RunError, match=r"last 5 steps .* began at step 3"):
        stop_if_stuck(run, 7)


def test_rollouts_of_another_version_are_refused(tiny_folder):
    run = make_run(tiny_folder)
    with pytest.raises(RunError, match="versions"):
        step(run, make_batch(run.policy, version=3))
