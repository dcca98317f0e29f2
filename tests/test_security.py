"""What data, adapters and checkpoints of others may not do: run code, or make us read files elsewhere.

Reward files are the user's own and do run, but never in the trainer's process.
"""

import ast
import json
import os
import pickle
import re
from pathlib import Path

import pytest

from qerl.config import LoraConfig, TaskConfig
from qerl.errors import UserError
from qerl.quant.checkpoint_reader import find_weight_files
from qerl.tasks import load_task
from qerl.tasks.calls import RewardCall
from qerl.tasks.pool import RewardPool
from qerl.tasks.problems import Task
from qerl.tasks.rewards import resolve_rewards
from qerl.types import Problem

PACKAGE = Path(__file__).parents[1] / "qerl"
WORKERS = {"worker.py", "calling.py"}
"""The only modules that unpickle: what the trainer itself pickled, in the worker."""


class Bomb:
    """Pickled, it is a program that writes a file when it is read."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


def calls_in(path: Path) -> set[str]:
    """Dotted names of what a module calls."""
    tree = ast.parse(path.read_text())
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_nothing_unpickles_but_the_reward_workers() -> None:
    loaders = re.compile(
        r"(pickle|cloudpickle|joblib|dill)\.loads?|torch\.load|marshal\.loads?|eval|exec"
    )
    found = {
        path.name: {name for name in calls_in(path) if loaders.fullmatch(name)}
        for path in PACKAGE.rglob("*.py")
    }
    found = {name: calls for name, calls in found.items() if calls}
    assert set(found) == WORKERS
    assert found["worker.py"] == {"pickle.loads"} and found["calling.py"] == {
        "pickle.loads",
        "exec",
    }


def test_no_setting_trusts_remote_code_by_itself() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"trust_remote_code\s*=\s*True", path.read_text()), path


def test_a_reward_file_runs_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'loaded_by')!r}).write_text(str(os.getpid()))\n"
        "def f(completions):\n    return [float(os.getpid())] * len(completions)\n"
    )
    task = Task("t", (Problem("p", "q", None),), (), ())
    specs = resolve_rewards([f"{path}:f"], (), task)
    assert not (tmp_path / "loaded_by").exists()
    with RewardPool(specs, 1, 5.0) as pool:
        (result,) = pool.score([RewardCall("p", ["q"], ["a"], [[1]], {})])
    pid = int((tmp_path / "loaded_by").read_text())
    assert pid != os.getpid() and result.values == {"f": [float(pid)]}


def test_a_saved_data_set_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": f"q{i}", "answer": "1"} for i in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "secret"))
    folder = tmp_path / "given"
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    assert load_task(TaskConfig(path=str(folder))).train
    state = json.loads((folder / "state.json").read_text())
    for name in ("../secret/data-00000-of-00001.arrow", str(tmp_path / "secret" / "data.arrow")):
        state["_data_files"] = [{"filename": name}]
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match="names a file outside its folder"):
            load_task(TaskConfig(path=str(folder)))


def test_code_in_a_data_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    marker = tmp_path / "ran"
    (folder / "data.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "things.txt").write_text("a\n")
    with pytest.raises(UserError):
        load_task(TaskConfig(path=str(folder)))
    (folder / "data.pkl").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(UserError):
        load_task(TaskConfig(path=str(folder / "data.pkl")))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_a_checkpoint_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "elsewhere.safetensors").write_bytes(b"")
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names a file outside its folder"):
        find_weight_files(folder)


def test_a_pickled_adapter_is_not_read(tmp_path: Path) -> None:
    from qerl.model.policy import check_adapter

    marker = tmp_path / "ran"
    lora = LoraConfig()
    config = {"peft_type": "LORA", "r": lora.lora_r, "lora_alpha": lora.lora_alpha}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(UserError, match="pickled adapters are not read"):
        check_adapter(tmp_path, lora)
    assert not marker.exists()


FORGED = {
    "a pickle": "pickle.dumps(Bomb())",
    "a list": "b'[1.0]'",
    "values of another length": 'b\'{"values": [1.0, 1.0], "extra": {}, "metrics": {}}\'',
    "a value that is no number": 'b\'{"values": ["1"], "extra": {}, "metrics": {}}\'',
    "NaN": 'b\'{"values": [NaN], "extra": {}, "metrics": {}}\'',
    "nesting without end": "b'[' * 100000",
    "readiness": "b'{\"ready\": true}'",
}


@pytest.mark.parametrize("what", FORGED)
def test_a_reward_that_takes_over_the_reply_pipe_loses_its_sample(
    tmp_path: Path, what: str
) -> None:
    """The trainer reads JSON of a known form, never a pickle; whatever else comes costs the worker."""
    marker = tmp_path / "ran"
    path = tmp_path / "rewards.py"
    path.write_text(
        "import os, pickle, struct, sys\n"
        "class Bomb:\n"
        f"    def __reduce__(self): return (os.mkdir, ({str(marker)!r},))\n"
        "def f(completions):\n"
        f"    body = {FORGED[what]}\n"
        "    os.write(int(sys.argv[2]), struct.pack('>Q', len(body)) + body)\n"
        "    os._exit(0)\n"
    )
    task = Task("t", (Problem("p", "q", None),), (), ())
    with RewardPool(resolve_rewards([f"{path}:f"], (), task), 1, 5.0) as pool:
        (result,) = pool.score([RewardCall("p", ["q"], ["a"], [[1]], {})])
    assert result.values == {"f": [None]} and [f.kind for f in result.failures] == ["died"]
    assert not marker.exists()
