"""Dynamic sampling: which groups are replaced, that it always ends, and that a resumed run equals the uninterrupted one."""

import json

import pytest
import torch

from qerl.collect import kept_groups
from qerl.data_order import Cursor, cursor_of_step, take
from qerl.errors import RunError
from qerl.metrics import read_metrics
from qerl.train import main

UNSTABLE = ("time/", "memory/", "throughput/")
REWARD = '''
def some(prompts, completions, completion_ids, **columns):
    """Every second problem gives all completions the same."""
    if prompts[0] in ("one", "three", "five", "seven"):
        return [0.0] * len(completions)
    return [sum(token < 100 for token in ids) / len(ids) for ids in completion_ids]

def flat(prompts, completions, completion_ids, **columns):
    return [0.25] * len(completions)

def nothing(prompts, completions, completion_ids, **columns):
    return [None] * len(completions)
'''


def train(folder, run_dir, function, **changes):
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    data, rewards = folder / "prompts.jsonl", folder / "rewards.py"
    if not data.exists():
        data.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
        rewards.write_text(REWARD)
    settings = {
        "model": "tiny",
        "task.path": data,
        "reward-funcs": f"{rewards}:{function}",
        "run-dir": folder / run_dir,
        "max-steps": 6,
        "max-completion-length": 8,
        "prompts-per-step": 3,
        "num-generations": 4,
        "learning-rate": 2e-3,
        "lora-r": 8,
        "save-steps": 3,
        "save-total-limit": 5,
        "eval-size": 0,
        "reward-workers": 1,
        "device": "cpu",
        "max-resample-rounds": 3,
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return main([word for name, value in settings.items() for word in (f"--{name}", str(value))])


def numbers(run_dir):
    lines = read_metrics(run_dir)
    return [
        {k: v for k, v in line.items() if not k.partition("/")[2].startswith(UNSTABLE)}
        for line in lines
    ]


def test_the_order_is_that_of_the_steps():
    """Taking P at a time walks the same problems that the step's number addresses."""
    cursor = Cursor(0, 0)
    for step in range(9):
        start = cursor_of_step(step, 10, 3)
        by_step, _ = take(start, 3, 10, seed=4)
        walked, cursor = take(cursor, 3, 10, seed=4)
        assert walked == by_step


def test_no_problem_is_taken_twice_at_once():
    cursor, taken = Cursor(0, 0), []
    for count in (3, 2, 4, 3, 1, 10, 7, 7):
        indices, cursor = take(cursor, count, 10, seed=0)
        assert len(set(indices)) == count
        taken.append((cursor.epoch, cursor.position))
    # 3 + 2 + 4 = 9 of 10; 3 do not fit and begin the next permutation
    assert taken == [(0, 3), (0, 5), (0, 9), (1, 3), (1, 4), (2, 10), (3, 7), (4, 7)]


def test_groups_without_spread_are_dropped_unless_there_are_no_others():
    rewards = torch.tensor([[0.0, 1], [1, 1], [0.5, 0.2], [0, 0]])
    assert kept_groups(rewards, 2).tolist() == [True, False, True, False]
    assert kept_groups(torch.zeros(4, 2), 2).tolist() == [True, True, False, False]


def test_groups_without_spread_are_replaced_and_the_run_resumes_exactly(tmp_path):
    assert train(tmp_path, "whole", "some") == 0
    whole = numbers(tmp_path / "whole")
    assert max(line["train/dynamic_sampling/num_rounds"] for line in whole) > 1
    assert sum(line["train/dynamic_sampling/num_groups_dropped"] for line in whole) > 3
    # the reward is that of all that was sampled, and so is the share without spread
    assert max(line["train/frac_reward_zero_std"] for line in whole) > 0.3
    state = json.loads((tmp_path / "whole/checkpoints/3/state.json").read_text())
    assert state["cursor"]["position"] + 10 * state["cursor"]["epoch"] > 3 * 3
    assert train(tmp_path, "branch", "some", resume=tmp_path / "whole/checkpoints/3") == 0
    assert numbers(tmp_path / "branch") == whole[3:]
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        paths = [tmp_path / run / "checkpoints/6" / file for run in ("whole", "branch")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_it_ends_when_nothing_has_spread(tmp_path, capsys):
    assert train(tmp_path, "flat", "flat", max_steps=2, max_resample_rounds=2) == 0
    lines = numbers(tmp_path / "flat")
    assert [line["train/dynamic_sampling/num_rounds"] for line in lines] == [3, 3]
    assert [line["train/dynamic_sampling/num_groups_dropped"] for line in lines] == [6, 6]
    assert "0 of 3 groups have spread after 3 rounds" in capsys.readouterr().out


def test_steps_without_any_reward_are_skipped_until_the_run_stops(tmp_path):
    settings = {"max_resample_rounds": 0, "max_skipped_steps": 2}
    with pytest.raises(RunError, match=r"last 2 steps .* began at step 1"):
        train(tmp_path, "nothing", "nothing", **settings)
    lines = numbers(tmp_path / "nothing")
    assert [line["train/num_updates_skipped"] for line in lines] == [1, 1]


def test_without_it_no_place_in_the_data_is_stored(tmp_path):
    assert train(tmp_path, "off", "some", max_steps=1, max_resample_rounds=0) == 0
    (line,) = numbers(tmp_path / "off")
    assert "train/dynamic_sampling/num_rounds" not in line
    state = json.loads((tmp_path / "off/checkpoints/1/state.json").read_text())
    assert state["cursor"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"loss-type": "cispo", "num-iterations": 2, "num-minibatches": 3},
        {"beta": 0.05, "kl-estimator": "k1", "advantage": "rloo", "correction.mode": "token_mask"},
        {"loss-type": "gspo", "overlong-penalty": 1, "correction.mode": "sequence_mask"},
    ],
    ids=str,
)
def test_whole_runs_with_other_objectives(tmp_path, changes):
    settings = {"max_steps": 2, "max_resample_rounds": 0, "warmup_ratio": 0} | changes
    assert train(tmp_path, "run", "some", **settings) == 0
    for line in numbers(tmp_path / "run"):
        assert line["train/num_updates_skipped"] == 0
        assert line["train/grad_norm"] > 0
        assert ("train/kl" in line) == ("beta" in changes)
        assert ("train/rewards/overlong_penalty/mean" in line) == ("overlong-penalty" in changes)
