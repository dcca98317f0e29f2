"""qerl in Python: training, sampling and evaluating in one process, and what is left of them in memory."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

import qerl
from qerl.errors import UserError

ROWS = [{"prompt": word, "answer": "1"} for word in ("one", "two", "three", "four", "five", "six")]
SMALL = {
    "max_completion_length": 8,
    "prompts_per_step": 2,
    "num_generations": 4,
    "eval_size": 2,
    "lora_r": 4,
    "reward_workers": 1,
    "device": "cpu",
    "warmup_ratio": 0.0,
}


def low(completion_ids, **columns):
    return [sum(token < 64 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def live_tensor_bytes() -> int:
    """Bytes of all storages that torch tensors hold in this process, each once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        try:
            is_tensor = isinstance(thing, torch.Tensor) and thing.device.type != "meta"
        except ReferenceError:
            continue
        if is_tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_two_trainings_and_an_evaluation_in_one_process(folder, capsys):
    def in_a_cell(completion_ids, **columns):
        return low(completion_ids)

    splits = {"train": ROWS[:4], "test": ROWS[4:]}
    settings = {**SMALL, "max_steps": 3, "learning_rate": 0.05}
    run = qerl.train("tiny", splits, [in_a_cell], noise={"num_stages": 3}, **settings)
    assert "step 3/3" in capsys.readouterr().out
    assert list(run.metrics.index) == [0, 1, 2, 3]
    assert run.metrics["train/rewards/in_a_cell/mean"].notna().sum() == 3
    assert run.metrics.loc[3, "eval/accuracy"] >= 0
    assert len(run.completions(1, "train")) == 8
    assert run.config["noise"]["num_stages"] == 3
    after_first = live_tensor_bytes()

    trained, base = (run.sample("one", greedy=True, base=base) for base in (False, True))
    assert trained != base and run.sample("one", greedy=True) == trained
    assert len(run.sample("one", count=3)) == 3
    policy = weakref.ref(run._inference.policy)
    assert live_tensor_bytes() > after_first + 100_000
    run.close()
    assert policy() is None
    assert live_tensor_bytes() <= after_first + 20_000

    summary = run.evaluate(k=2)
    assert summary["num_problems"] == 2 and "change" in summary["metrics"]
    again = qerl.train("tiny", splits, [in_a_cell], noise={"num_stages": 3}, **settings)
    assert again.run_dir != run.run_dir
    assert again.metrics["train/reward"].equals(run.metrics["train/reward"])
    assert live_tensor_bytes() <= after_first + 20_000
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    assert run.report().stat().st_size > 20_000
    assert qerl.load_run(run.run_dir).metrics.equals(run.metrics)


def test_a_given_folder_continues_and_another_reward_is_refused(folder):
    settings = {**SMALL, "max_steps": 1, "run_dir": "mine", "eval_size": 0}
    first = qerl.train("tiny", ROWS, low, **settings)
    assert qerl.train("tiny", ROWS, low, **settings).run_dir == first.run_dir
    with pytest.raises(UserError, match="rewards"):
        qerl.train(
            "tiny", ROWS, lambda completion_ids, **c: [0.0] * len(completion_ids), **settings
        )
    with pytest.raises(UserError, match="was a function of the Python session"):
        from qerl.tasks.rewards import SESSION_FUNCTIONS

        SESSION_FUNCTIONS.clear()
        qerl.load_run("mine").evaluate()


def test_a_datasets_dataset_and_a_task_name(folder):
    import datasets

    settings = {**SMALL, "max_steps": 1, "eval_size": 0, "reward_funcs": [low]}
    run = qerl.train("tiny", datasets.Dataset.from_list(ROWS), **settings)
    assert run.config["task"]["name"] == "dataset"
    run = qerl.train(
        "tiny", "reasoning-gym/chain_sum", task={"train_size": 8, "test_size": 2}, **settings
    )
    assert run.config["task"]["name"] == "reasoning-gym/chain_sum"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "tiny", "dataset": ROWS, "learning_rte": 1}, "learning_rate"),
        ({"model": "tiny", "dataset": ROWS, "learning_rate": -1}, "above 0"),
        ({"model": "tiny", "dataset": []}, "at least one"),
        ({"model": "tiny", "dataset": [{"prompt": object()}]}, "plain JSON"),
        ({"model": "tiny", "dataset": ROWS, "reward_funcs": [3]}, "neither a function"),
        ({"model": "tiny"}, "no task"),
        ({"model": "tniy", "dataset": ROWS}, "tiny"),
    ],
)
def test_mistakes_are_the_command_lines_messages(folder, arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        qerl.train(**arguments)
    assert caught.value._render_traceback_() == [f"qerl: error: {caught.value}"]
    assert not (folder / "runs").exists()


def test_importing_qerl_loads_nothing_and_train_is_one_object_whatever_came_first():
    code = (
        "import sys, qerl; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules); "
        "before = qerl.train; import qerl.train; from qerl.train import main; "
        "assert before is qerl.train and callable(qerl.train) and callable(qerl.compare); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
