import pytest
import torch
from helpers import make_rollout, pack_items

from qerl.model.attention import PackedLayout
from qerl.model.packing import group_tokens
from qerl.types import Row


def test_layout_of_two_sequences():
    rollouts = [
        make_rollout(2, 2, prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -0.25)),
        make_rollout(1, 1, prompt_ids=(7,), completion_ids=(8,), logprobs=(-1.0,)),
    ]
    (batch,) = pack_items(rollouts, [1.0, -2.0], [0.25, 0.5])
    assert batch.token_ids.tolist() == [1, 2, 3, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 0]
    assert batch.rows == (Row(2, (1,)), Row(1, (0,)))
    assert batch.score_index.tolist() == [1, 2, 3]
    assert batch.target_ids.tolist() == [3, 4, 8]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert batch.advantages.tolist() == [1, 1, -2]
    assert batch.token_weights.tolist() == [0.25, 0.25, 0.5]


def test_budget_order_and_oversized_sequences():
    rollouts = [make_rollout(3, n, seed=n) for n in (3, 4, 30, 2, 5)]
    batches = pack_items(rollouts, budget=12)
    assert [[r.num_tokens for r in b.rows] for b in batches] == [[5, 6], [32], [4, 7]]
    flat = [t for b in batches for t in b.target_ids.tolist()]
    assert flat == [t for r in rollouts for t in r.completion_ids]


def test_tokens_that_were_not_sampled_are_fed_but_not_scored():
    rollout = make_rollout(1, 3, completion_ids=(5, 6, 7), loss_mask=(True, False, True))
    (batch,) = pack_items([rollout])
    assert batch.target_ids.tolist() == [5, 7]
    assert batch.token_ids.tolist()[1:] == [5, 6]
    masked = make_rollout(1, 2, loss_mask=(False, False))
    assert pack_items([masked]) == []


def test_completions_of_one_prompt_share_it():
    first = make_rollout(2, 2, prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -0.25))
    second = make_rollout(2, 1, prompt_ids=(1, 2), completion_ids=(5,), logprobs=(-1.0,))
    third = make_rollout(2, 3, prompt_ids=(1, 2), completion_ids=(6, 7, 8), logprobs=(-1.0,) * 3)
    (batch,) = pack_items([first, second, third], share=True)
    assert batch.token_ids.tolist() == [1, 2, 3, 6, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 2, 3]
    assert batch.rows == (Row(2, (1, 0, 2)),)
    assert batch.score_index.tolist() == [1, 2, 1, 1, 3, 4]
    assert batch.target_ids.tolist() == [3, 4, 5, 6, 7, 8]


def test_a_branch_sees_the_prefix_and_itself():
    mask = PackedLayout.of([Row(2, (1, 2)), Row(3)], torch.device("cpu")).mask
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert mask[1, 0, :3, :3].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask.any(dim=-1).all()
    assert PackedLayout.of([Row(2, (1,)), Row(3)], torch.device("cpu")).mask is None


def test_long_completions_repeat_the_prompt_and_budgets_hold():
    short_prompt = [make_rollout(1, 600, seed=0, prompt_ids=(7,)) for _ in range(3)]
    (batch,) = pack_items(short_prompt, share=True)
    assert [row.prefix for row in batch.rows] == [1, 1, 1]
    group = [make_rollout(10, 5, seed=i, prompt_ids=tuple(range(10))) for i in range(6)]
    batches = pack_items(group, share=True, budget=25)
    assert [b.rows for b in batches] == [(Row(10, (4, 4, 4)),), (Row(10, (4, 4, 4)),)]


@pytest.mark.parametrize(("prompt", "completion"), [(10, 5), (40, 100), (3, 60), (1, 300)])
def test_the_tokens_of_a_group_are_foreseen(prompt, completion):
    group = [
        make_rollout(prompt, completion, seed=i, prompt_ids=tuple(range(prompt))) for i in range(6)
    ]
    (batch,) = pack_items(group, share=True, budget=10**6)
    assert group_tokens(prompt, completion, 6, 64) == len(batch.token_ids)
