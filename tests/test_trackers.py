"""What the trackers show beside the numbers: some of each step's completions, as a table."""

import json

import pytest

from qerl.metrics import MetricsWriter
from qerl.trackers import ROWS_SHOWN

ROWS = [
    {"prompt": "1 + 1 = |?|\n", "completion": f"<b>{i}</b>", "answer": "2", "reward": i / 2}
    | {"reward/math": i / 2, "advantage": None, "num_tokens": 1}
    for i in range(ROWS_SHOWN + 3)
]


def test_tensorboard_shows_completions_as_a_table_of_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, resume_step=None, report_to="tensorboard")
    writer.write_completions(3, ROWS, "train")
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("train/completions/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3
    lines = text.splitlines()
    assert lines[0] == "| prompt | completion | answer | reward | advantage | reward/math |"
    assert len(lines) == ROWS_SHOWN + 2 and {line.count("|") for line in lines} == {7}
    assert "&lt;b&gt;1&lt;/b&gt;" in lines[3]


@pytest.mark.slow
def test_wandb_offline_gets_completions_as_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = MetricsWriter(tmp_path, resume_step=None, report_to="wandb", config={})
    writer.write_completions(3, ROWS, "eval")
    writer.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval/*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == [
        "prompt",
        "completion",
        "answer",
        "reward",
        "advantage",
        "reward/math",
    ]
    assert len(table["data"]) == ROWS_SHOWN
