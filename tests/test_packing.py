import torch
from helpers import make_rollout

from qerl.model.packing import pack

CPU = torch.device("cpu")


def test_layout_of_two_sequences():
    rollouts = [
        make_rollout(2, 2, prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.5, -0.25)),
        make_rollout(1, 1, prompt_ids=(7,), completion_ids=(8,), logprobs=(-1.0,)),
    ]
    (batch,) = pack(rollouts, [1.0, -2.0], [0.25, 0.5], 100, CPU)
    assert batch.token_ids.tolist() == [1, 2, 3, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 0]
    assert batch.sequence_lengths == (3, 1)
    assert batch.score_index.tolist() == [1, 2, 3]
    assert batch.target_ids.tolist() == [3, 4, 8]
    assert batch.sequence_index.tolist() == [0, 0, 1]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert batch.advantages.tolist() == [1, 1, -2]
    assert batch.token_weights.tolist() == [0.25, 0.25, 0.5]


def test_budget_order_and_oversized_sequences():
    rollouts = [make_rollout(3, n, seed=n) for n in (3, 4, 30, 2, 5)]
    batches = list(pack(rollouts, [1.0] * 5, [1.0] * 5, 12, CPU))
    assert [b.sequence_lengths for b in batches] == [(5, 6), (32,), (4, 7)]
    flat = [t for b in batches for t in b.target_ids.tolist()]
    assert flat == [t for r in rollouts for t in r.completion_ids]


def test_tokens_that_were_not_sampled_are_fed_but_not_scored():
    rollout = make_rollout(1, 3, completion_ids=(5, 6, 7), loss_mask=(True, False, True))
    (batch,) = pack([rollout], [1.0], [1.0], 100, CPU)
    assert batch.target_ids.tolist() == [5, 7]
    assert batch.token_ids.tolist()[1:] == [5, 6]
    masked = make_rollout(1, 2, loss_mask=(False, False))
    assert list(pack([masked], [1.0], [1.0], 100, CPU)) == []
