"""What a run writes and says: every number is kept, nothing is written twice, text is safe to print."""

import json
import math
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from qerl.errors import RunError, UserError
from qerl.metrics import (
    MetricsWriter,
    PhaseTimer,
    format_completions,
    format_duration,
    progress_line,
    read_metrics,
    say,
)
from qerl.report_plot import plot_learning_curve

ROW = {
    "problem_id": "p1",
    "sample_index": 0,
    "prompt": "1+1=",
    "completion": "2",
    "answer": "2",
    "reward/correct": 1.0,
    "reward": 1.0,
    "advantage": 0.5,
    "num_tokens": 2,
    "finish_reason": "stop",
    "version": 3,
}


def test_floats_come_back_exactly_and_nonfinite_ones_are_null_and_counted(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    writer.log(1, {"train/reward": 0.1 + 0.2, "train/kl": math.nan, "train/loss": -math.inf})
    writer.log(2, {"train/reward": 1e-310})
    writer.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "train/reward": 0.1 + 0.2, "train/kl": None, "train/loss": None}
        | {"num_nonfinite": 2},
        {"step": 2, "train/reward": 1e-310},
    ]
    assert writer.num_nonfinite == 2


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    writer.log(1, {"train/reward": 1.0})
    assert len(read_metrics(tmp_path)) == 1
    writer.close()


def test_resuming_drops_later_steps_and_half_a_line(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    for step in range(5):
        writer.log(step, {"train/reward": step / 3})
        writer.write_completions(step, [ROW], "train")
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/rew')
    (tmp_path / "completions" / ".tmp-9.parquet").write_text("half")

    resumed = MetricsWriter(tmp_path, resume_step=2)
    resumed.log(3, {"train/reward": 9.0})
    resumed.close()
    assert [(line["step"], line["train/reward"]) for line in read_metrics(tmp_path)] == [
        (0, 0.0),
        (1, 1 / 3),
        (2, 2 / 3),
        (3, 9.0),
    ]
    left = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert left == ["0.parquet", "1.parquet", "2.parquet"]


def test_a_run_from_the_start_keeps_nothing_of_an_earlier_one(tmp_path):
    first = MetricsWriter(tmp_path, resume_step=None)
    first.log(0, {"eval/accuracy": 0.5})
    first.close()
    MetricsWriter(tmp_path, resume_step=None).close()
    assert read_metrics(tmp_path) == []


def test_completions_of_training_and_evaluation_share_a_table(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    writer.write_completions(4, [ROW, ROW | {"reward": math.nan, "reward/correct": None}], "train")
    held_out = {key: value for key, value in ROW.items() if key != "reward/correct"}
    path = writer.write_completions(4, [held_out | {"advantage": None, "reward/x": 2}], "eval")
    writer.close()
    assert path == tmp_path / "completions" / "4.parquet"
    table = pq.read_table(path).to_pydict()
    assert table["kind"] == ["train", "train", "eval"]
    assert table["reward"] == [1.0, None, 1.0]
    assert table["reward/correct"] == [1.0, None, None]
    assert table["reward/x"] == [None, None, 2.0]
    assert table["advantage"] == [0.5, 0.5, None]
    assert table["version"] == [3, 3, 3]


def test_an_unknown_column_is_not_dropped_silently(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    with pytest.raises(ValueError, match="rewrad"):
        writer.write_completions(1, [ROW | {"rewrad": 1}], "train")
    writer.close()


def test_phase_timer_adds_up_and_counts_a_phase_that_raises():
    timer = PhaseTimer()
    with timer("rollout"):
        pass
    first = timer.seconds["rollout"]
    with pytest.raises(RunError, match="rollout: KeyError"), timer("rollout"):
        raise KeyError
    assert timer.seconds["rollout"] > first > 0
    assert timer.metrics() == {"time/rollout_s": timer.seconds["rollout"]}


def test_progress_line():
    metrics = {
        "reward": 0.4123,
        "throughput/rollout_tokens_per_s": 1240.4,
        "time/rollout_s": 3.14,
        "time/update_s": 4.9,
        "memory/peak_gib": 2.314,
    }
    assert progress_line(7, 40, metrics, seconds_per_step=8.0) == (
        "step  7/40  reward 0.412  1,240 tok/s  rollout 3.1s update 4.9s  2.31 GiB  4m24s left"
    )
    assert progress_line(40, 40, {}, seconds_per_step=8.0) == "step 40/40  0s left"


def test_durations():
    assert [format_duration(s) for s in (0.4, 59.6, 200, 8000)] == ["0s", "1m00s", "3m20s", "2h13m"]


def test_completions_text_shows_markup_and_control_characters_as_they_are():
    hostile = ROW | {"completion": "[bold]x[/bold] \x1b[2J\r" + "a" * 1000 + " so the answer is 2"}
    text = format_completions([hostile, ROW | {"reward": None, "answer": None}], width=80)
    assert "\x1b" not in text and "\r" not in text
    assert "answer is 2" in text.replace("\n", " ")
    assert "none" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "[bold]x" in format_completions([ROW | {"completion": "[bold]x"}])


def test_say_writes_a_line_to_stdout(capsys):
    say("hello")
    assert capsys.readouterr().out == "hello\n"


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, resume_step=None, report_to="tensorboard")
    for step in (1, 2):
        writer.log(step, {"train/reward": step / 2})
    writer.close()
    writer = MetricsWriter(tmp_path, resume_step=1, report_to="tensorboard")
    writer.log(2, {"train/reward": 7.0})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/reward")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 7.0)]


def test_wandb_offline_continues_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resume_step in (None, 1):
        writer = MetricsWriter(
            tmp_path, resume_step=resume_step, report_to="wandb", config={"seed": 0}
        )
        writer.log(1 if resume_step is None else 2, {"train/reward": 0.5})
        writer.close()
    run_id = (tmp_path / "wandb_id").read_text()
    written = {path.stem for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}
    assert written == {f"run-{run_id}"}


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_tracker_is_one_clear_line(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match=f"pip install {package}"):
        MetricsWriter(tmp_path, resume_step=None, report_to=package)


def test_trackers_are_not_imported_unless_asked_for(tmp_path):
    program = (
        "import sys; from pathlib import Path; from qerl.metrics import MetricsWriter\n"
        f"MetricsWriter(Path({json.dumps(str(tmp_path))}), resume_step=None).log(1, {{'a': 1.0}})\n"
        "print({'wandb', 'tensorboard'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"


def test_learning_curve_is_drawn_from_whatever_there_is(tmp_path):
    with pytest.raises(UserError, match="no metrics"):
        plot_learning_curve(tmp_path)
    writer = MetricsWriter(tmp_path, resume_step=None)
    writer.log(0, {"eval/accuracy": 0.1})
    for step in range(1, 4):
        writer.log(step, {"train/reward": step / 4, "train/entropy": math.nan})
    writer.close()
    path = plot_learning_curve(tmp_path)
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
