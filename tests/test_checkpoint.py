"""Nothing is lost: whatever happens during a save or to the files later, the last whole checkpoint is found."""

import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl import checkpoint as checkpoint_module
from qerl.checkpoint import (
    checkpoint_at,
    find_latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from qerl.config import Config
from qerl.continuation import config_differences
from qerl.errors import RunError, UserError
from qerl.manifest import damage
from qerl.run_folder import open_run, read_run_config

CONFIG = Config(model="tiny").model_dump(mode="json")
IDENTITY = {
    "model_origin": {"name": "tiny", "origin": "tiny", "fingerprint": "aa"},
    "data": {"train": "bb", "num_problems": 8},
    "rewards": {"f": "cc"},
}
MACHINE = {"device": "cpu", "dtype": "float32", "engine": "transformers"}
OPTIMIZER_SHAPE = (300, 400)


def write_adapter(value: float):
    """A stand-in for PEFT's save_pretrained: the same two files."""

    def write(folder: Path) -> None:
        save_file({"lora_A": torch.full((100, 100), value)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"r": 2}')

    return write


def save(run_dir: Path, step: int, limit: int = 2) -> Path:
    return save_checkpoint(
        run_dir,
        step,
        write_adapter=write_adapter(float(step)),
        adapter_bytes=40_000,
        optimizer_tensors={"x/state1": torch.full(OPTIMIZER_SHAPE, float(step))},
        state={"step": step, "learning_rate": 0.1 + 0.2},
        save_total_limit=limit,
    )


def open_folder(run_dir, config, resume, *, num_steps=20, machine=MACHINE, **identity):
    return open_run(
        run_dir,
        config,
        resume,
        identity=IDENTITY | identity,
        machine=machine,
        num_steps=num_steps,
    )


def steps_on_disk(run_dir: Path) -> list[int]:
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdecimal())


def assert_holds(run_dir: Path, step: int) -> None:
    """The newest checkpoint is `step` and every part of it is that step's."""
    info, _ = find_latest_checkpoint(run_dir)
    assert info is not None and info.step == step
    loaded = load_checkpoint(info)
    assert loaded.state == {"step": step, "learning_rate": 0.1 + 0.2}
    assert torch.equal(
        loaded.optimizer_tensors["x/state1"], torch.full(OPTIMIZER_SHAPE, float(step))
    )
    adapter = load_file(loaded.adapter_dir / "adapter_model.safetensors")["lora_A"]
    assert torch.equal(adapter, torch.full((100, 100), float(step)))


def adapter_step(run_dir: Path) -> float:
    assert json.loads((run_dir / "adapter" / "adapter_config.json").read_text()) == {"r": 2}
    return load_file(run_dir / "adapter" / "adapter_model.safetensors")["lora_A"][0, 0].item()


def test_round_trip_and_pruning(tmp_path):
    for step in (10, 20, 30):
        assert save(tmp_path, step) == tmp_path / "checkpoints" / str(step)
        assert_holds(tmp_path, step)
        assert adapter_step(tmp_path) == step
    assert steps_on_disk(tmp_path) == [20, 30]
    assert find_latest_checkpoint(tmp_path / "elsewhere") == (None, ())


def test_every_file_is_in_the_manifest(tmp_path):
    folder = save(tmp_path, 1)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {path.name for path in folder.iterdir()} == files.keys() | {"manifest.json"}


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("optimizer.safetensors", lambda p: os.truncate(p, 1000), "has 1000 of"),
        ("adapter_model.safetensors", lambda p: p.unlink(), "is missing"),
        ("manifest.json", lambda p: os.truncate(p, 20), "cannot be read"),
        ("manifest.json", lambda p: p.unlink(), "has no manifest"),
        ("state.json", lambda p: p.write_text(p.read_text().replace("2", "3", 1)), "have changed"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, name, harm, words):
    save(tmp_path, 10)
    harm(save(tmp_path, 20) / name)
    info, notes = find_latest_checkpoint(tmp_path)
    assert info is not None and info.step == 10
    assert len(notes) == 1 and "checkpoint 20" in notes[0] and words in notes[0]
    assert_holds(tmp_path, 10)
    with pytest.raises(UserError, match="not a whole checkpoint"):
        checkpoint_at(tmp_path / "checkpoints" / "20")
    save(tmp_path, 20)
    assert_holds(tmp_path, 20)


def test_pruning_counts_whole_checkpoints_only(tmp_path):
    save(tmp_path, 10)
    os.truncate(save(tmp_path, 20) / "optimizer.safetensors", 0)
    save(tmp_path, 30)
    assert steps_on_disk(tmp_path) == [10, 20, 30]
    save(tmp_path, 40)
    assert steps_on_disk(tmp_path) == [30, 40]


def test_a_whole_checkpoint_of_the_same_step_is_kept(tmp_path):
    manifest = save(tmp_path, 10) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    save(tmp_path, 10)
    assert manifest.stat().st_mtime_ns == before


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path):
    save(tmp_path, 10).rename(tmp_path / "checkpoints" / "99")
    assert "checkpoint 10, renamed" in damage(tmp_path / "checkpoints" / "99")
    shutil.copytree(tmp_path / "checkpoints" / "99", tmp_path / "best")
    assert checkpoint_at(tmp_path / "best").step == 10


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process and return its exit code, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(module: object, name: str, call: int) -> None:
    """Make this process die by SIGKILL at the `call`-th call of a function."""
    real, num_calls = getattr(module, name), 0

    def counted(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, name, counted)


@pytest.mark.parametrize(
    ("module", "name", "call", "newest", "adapter"),
    [
        (checkpoint_module, "save_file", 1, 20, 20),
        (checkpoint_module, "write_manifest", 1, 20, 20),
        (checkpoint_module, "flush_to_disk", 2, 20, 20),
        (Path, "rename", 1, 20, 20),
        (checkpoint_module, "refresh_adapter", 1, 30, 20),
        (os, "replace", 1, 30, 20),
        (checkpoint_module, "_prune", 1, 30, 30),
        (shutil, "rmtree", 1, 30, 30),
    ],
)
def test_kill_9_at_any_point_leaves_a_whole_checkpoint_and_adapter(
    tmp_path, module, name, call, newest, adapter
):
    save(tmp_path, 10)
    save(tmp_path, 20)

    def die_while_saving() -> None:
        kill_at(module, name, call)
        save(tmp_path, 30)

    assert in_child(die_while_saving) == -signal.SIGKILL
    assert_holds(tmp_path, newest)
    assert adapter_step(tmp_path) == adapter
    save(tmp_path, 40)
    assert_holds(tmp_path, 40)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_the_adapter_loads_while_it_is_being_replaced(tmp_path):
    """A reader that loads as fast as it can while a writer saves never sees half an adapter."""
    model_config = Qwen2Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=16,
    )
    base = AutoModelForCausalLM.from_config(model_config)
    peft_model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    parameter = next(p for n, p in peft_model.named_parameters() if "lora_A" in n)

    def save_real(step: int) -> None:
        parameter.data.fill_(step)
        save_checkpoint(
            tmp_path,
            step,
            write_adapter=peft_model.save_pretrained,
            adapter_bytes=1000,
            optimizer_tensors={},
            state={},
            save_total_limit=2,
        )

    save_real(1)
    writer = os.fork()
    if writer == 0:
        try:
            for step in range(2, 60):
                save_real(step)
        finally:
            os._exit(0)
    seen = []
    while os.waitpid(writer, os.WNOHANG) == (0, 0):
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_config(model_config), tmp_path / "adapter"
        )
        values = next(p for n, p in loaded.named_parameters() if "lora_A" in n)
        assert values.min() == values.max()
        seen.append(values.min().item())
    assert len(set(seen)) > 2 and seen == sorted(seen)


def test_a_write_error_leaves_the_last_one_whole(tmp_path):
    """A process whose files may not exceed 100 kB cannot write the optimizer's 480 kB."""
    save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            RunError, match=r"checkpoint: cannot save checkpoint 20 .*Earlier checkpoints"
        ):
            save(tmp_path, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(tmp_path, 10)
    assert adapter_step(tmp_path) == 10
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_disk_that_turns_read_only_loses_nothing(tmp_path, monkeypatch):
    """Not even what was begun can be removed then; that is done when the run continues."""
    save(tmp_path, 10)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "save_file", refuse)
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(
            RunError, match=r"Read-only file system.*Earlier checkpoints are intact"
        ):
            save(tmp_path, 20)
    assert_holds(tmp_path, 10)
    assert adapter_step(tmp_path) == 10
    save(tmp_path, 20)
    assert_holds(tmp_path, 20)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_disk_space_is_checked_before_writing(tmp_path, monkeypatch):
    save(tmp_path, 10)
    usage = shutil.disk_usage(tmp_path)._replace(free=70 * 2**20)
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(checkpoint_module, "FREE_RESERVE_BYTES", 70 * 2**20)
    with pytest.raises(RunError, match=r"not enough disk space .* 0\.07 GiB is free"):
        save(tmp_path, 20)
    assert_holds(tmp_path, 10)


def test_first_start_then_the_same_command_continues(tmp_path):
    run_dir = tmp_path / "runs" / "a"
    first = open_folder(run_dir, CONFIG, "auto")
    assert (first.checkpoint, first.notes) == (None, ())
    stored = read_run_config(run_dir)
    assert stored["config"] == CONFIG and stored["model_origin"] == IDENTITY["model_origin"]
    assert stored["versions"]["torch"] == torch.__version__
    save(run_dir, 10)
    first.lock.close()
    second = open_folder(run_dir, CONFIG, "auto")
    assert second.checkpoint is not None and second.checkpoint.step == 10
    second.lock.close()


def test_another_run_in_the_folder_is_refused_with_the_differing_fields(tmp_path):
    open_folder(tmp_path, CONFIG, "auto").lock.close()
    before = (tmp_path / "config.json").read_bytes()
    other = Config(
        model="tiny", seed=3, train={"learning_rate": 0.01}, task={"params": {"min_terms": 2}}
    ).model_dump(mode="json")
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path, other, "auto")
    message = str(caught.value)
    assert "seed: 0 -> 3" in message
    assert "train.learning_rate: 1e-05 -> 0.01" in message
    assert 'task.params.min_terms: "(absent)" -> 2' in message
    assert "\n" not in message
    assert (tmp_path / "config.json").read_bytes() == before
    with pytest.raises(UserError, match=r'model_origin\.fingerprint: "aa" -> "dd"'):
        open_folder(tmp_path, CONFIG, "auto", model_origin={"fingerprint": "dd"})


def test_settings_that_change_no_result_may_differ(tmp_path):
    open_folder(tmp_path, CONFIG, "auto").lock.close()
    changed = Config(
        model="tiny",
        log={"save_steps": 3, "report_to": "wandb"},
        memory_gib=4,
        train={"max_tokens_per_microbatch": 100},
    ).model_dump(mode="json")
    assert config_differences(CONFIG, changed) == {}
    open_folder(tmp_path, changed, "auto").lock.close()
    assert read_run_config(tmp_path)["config"]["log"]["save_steps"] == 3
    other = Config(model="tiny", train={"max_grad_norm": 9}).model_dump(mode="json")
    assert config_differences(CONFIG, other) == {"train.max_grad_norm": (0.2, 9.0)}


def test_resume_never_refuses_a_run_and_accepts_an_empty_folder(tmp_path):
    open_folder(tmp_path, CONFIG, "never").lock.close()
    with pytest.raises(UserError, match="resume is never"):
        open_folder(tmp_path, CONFIG, "never")


@pytest.mark.parametrize("name", ["thesis.txt", "config.json"])
def test_a_folder_of_something_else_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match="holds no run"):
        open_folder(tmp_path, CONFIG, "auto")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(UserError, match="is a file"):
        open_folder(tmp_path / name, CONFIG, "auto")


def test_damaged_and_unfinished_checkpoints_are_reported_when_a_run_continues(tmp_path):
    open_folder(tmp_path, CONFIG, "auto").lock.close()
    save(tmp_path, 10)
    os.truncate(save(tmp_path, 20) / "optimizer.safetensors", 7)
    (tmp_path / "checkpoints" / ".tmp-30").mkdir()
    run = open_folder(tmp_path, CONFIG, "auto")
    assert run.checkpoint is not None and run.checkpoint.step == 10
    assert len(run.notes) == 1 and "has 7 of" in run.notes[0]
    assert adapter_step(tmp_path) == 10
    assert not (tmp_path / "checkpoints" / ".tmp-30").exists()
    run.lock.close()
    (tmp_path / "checkpoints" / "10" / "state.json").unlink()
    run = open_folder(tmp_path, CONFIG, "auto")
    assert run.checkpoint is None
    assert "starting from the beginning" in run.notes[-1]
    run.lock.close()


def test_resuming_from_an_older_checkpoint_sets_later_ones_aside(tmp_path):
    open_folder(tmp_path, CONFIG, "auto").lock.close()
    old = save(tmp_path, 10)
    save(tmp_path, 20)
    run = open_folder(tmp_path, CONFIG, str(old))
    assert run.checkpoint is not None and run.checkpoint.step == 10
    assert "checkpoint 20 comes after" in run.notes[0]
    assert adapter_step(tmp_path) == 10
    assert steps_on_disk(tmp_path) == [10]
    assert len(list((tmp_path / "checkpoints").glob("superseded-20-*"))) == 1
    run.lock.close()


def test_a_checkpoint_can_be_continued_in_a_new_folder(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    open_folder(old, CONFIG, "auto").lock.close()
    path = str(save(old, 10))
    save(old, 20)
    run = open_folder(new, CONFIG, path)
    assert run.checkpoint is not None and run.checkpoint.path == Path(path)
    run.lock.close()
    # The same command again, before and after the new folder has a checkpoint of its own.
    run = open_folder(new, CONFIG, path)
    assert run.checkpoint is not None and run.checkpoint.path == Path(path)
    save(new, 15)
    run.lock.close()
    run = open_folder(new, CONFIG, path)
    assert run.checkpoint is not None and run.checkpoint.path == new / "checkpoints" / "15"
    run.lock.close()
    assert steps_on_disk(old) == [10, 20]

    other = Config(model="tiny", seed=1).model_dump(mode="json")
    with pytest.raises(UserError, match="seed: 0 -> 1"):
        open_folder(tmp_path / "third", other, path)
    open_folder(tmp_path / "fourth", CONFIG, "auto").lock.close()
    with pytest.raises(UserError, match="did not start from"):
        open_folder(tmp_path / "fourth", CONFIG, path)
    with pytest.raises(UserError, match="not a whole checkpoint"):
        open_folder(tmp_path / "fifth", CONFIG, str(tmp_path / "none"))


def test_two_processes_cannot_write_one_run_and_a_killed_one_frees_it(tmp_path):
    receive, send = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            run = open_folder(tmp_path, CONFIG, "auto")
            os.write(send, b"open")
            time.sleep(60)
            run.lock.close()
        finally:
            os._exit(0)
    assert os.read(receive, 4) == b"open"
    with pytest.raises(UserError, match="another process is running"):
        open_folder(tmp_path, CONFIG, "auto")
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    open_folder(tmp_path, CONFIG, "auto").lock.close()


def test_changed_versions_are_said_once_and_do_not_stop(tmp_path):
    open_folder(tmp_path, CONFIG, "auto").lock.close()
    stored = read_run_config(tmp_path)
    stored["versions"]["torch"] = "1.0"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    run = open_folder(tmp_path, CONFIG, "auto")
    assert len(run.notes) == 1 and f"torch 1.0 -> {torch.__version__}" in run.notes[0]
    run.lock.close()


def test_a_read_only_place_is_one_clear_line(tmp_path):
    if os.geteuid() == 0:
        run_dir = Path("/proc/qerl-run")
    else:
        tmp_path.chmod(0o500)
        run_dir = tmp_path / "run"
    with pytest.raises(UserError, match="cannot write the run folder"):
        open_folder(run_dir, CONFIG, "auto")


def test_what_is_not_a_run_is_said(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        read_run_config(tmp_path)
