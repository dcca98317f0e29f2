"""Comparisons: which runs they plan, how they survive stops and failures, what their reports say."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.compare import FLAGS, UNFINISHED, finish, main, make_report
from qerl.comparison.arms import make_comparison
from qerl.comparison.runner import Runner
from qerl.errors import UserError
from qerl.evaluation.statistics import Interval
from qerl.metrics import read_metrics
from qerl.report import main as report_main
from qerl.reporting.charts import nice_ticks
from qerl.reporting.comparison import read_comparison
from qerl.reporting.runs import completion_rows
from qerl.settings.cli import parse_arguments
from qerl.train import main as train_main

ROOT = Path(__file__).parent.parent
REWARD = f"{Path(__file__).parent / 'reward_low_tokens.py'}:low_tokens"
WORDS = [
    *("--model", "tiny", "--task", "reasoning-gym/chain_sum", "--task.train-size", "32"),
    *("--task.test-size", "12", "--eval-size", "12", "--eval-steps", "2", "--reward-funcs", REWARD),
    *("--max-completion-length", "8", "--prompts-per-step", "3", "--num-generations", "4"),
    *("--lora-r", "8", "--learning-rate", "1e-2", "--reward-workers", "1", "--device", "cpu"),
]


def planned(*words, **options):
    flags, parsed = parse_arguments(list(words), prog="", description="", extra_flags=FLAGS)
    names = ("arms", "seeds", "baseline", "target_accuracy")
    return make_comparison(flags, parsed.config, {n: getattr(parsed, n) for n in names} | options)


def test_arms_and_seeds_become_training_commands_that_differ_in_nothing_else():
    comparison = planned(*WORDS, "--arms", "nvfp4+aqn,nf4", "--seeds", "3,5", "--run-dir", "x")
    assert comparison.baseline == "nf4"
    assert [run.name for run in comparison.runs] == [
        *("nvfp4+aqn/seed-3", "nf4/seed-3", "nvfp4+aqn/seed-5", "nf4/seed-5")
    ]
    ours, theirs = (set(run.words) for run in comparison.runs[:2])
    assert ours - theirs == {
        *("--quant=nvfp4", "--noise.scope=rollout", "--run-dir=x/nvfp4+aqn/seed-3")
    }
    assert theirs - ours == {"--quant=nf4", "--noise.scope=off", "--run-dir=x/nf4/seed-3"}


def test_a_settings_file_defines_arms(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("""
model = "tiny"
task.name = "reasoning-gym/chain_sum"
task.params = { min_terms = 2 }
[compare]
arms = ["nvfp4+aqn", "late", "slow-nf4"]
seeds = [7]
target_accuracy = [0.5]
[arms.late]
like = "nvfp4+aqn"
noise.stop_at = 0.6
[arms.slow-nf4]
like = "nf4"
learning_rate = 1e-6
[arms."nvfp4+aqn"]
sigma_start = 1e-3
""")
    comparison = planned("--config", str(file))
    assert comparison.baseline == "nvfp4+aqn" and comparison.target_accuracy == (0.5,)
    assert comparison.differences["late"] == {
        "quant": "nvfp4",
        "noise.scope": "rollout",
        "noise.sigma_start": 1e-3,
        "noise.stop_at": 0.6,
    }
    assert comparison.differences["slow-nf4"]["train.learning_rate"] == 1e-6
    assert '--task.params={"min_terms": 2}' in comparison.runs[0].words
    assert str(comparison.folder) == "runs/compare-tiny-reasoning-gym-chain_sum"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "nvfp5"], "did you mean nvfp4"),
        (["--arms", "nf4,nf4"], "each once"),
        (["--arms", "nf4", "--baseline", "bf16"], "not among the arms"),
        (["--seeds", "0,x"], "whole numbers"),
        (["--seed", "3"], "give --seeds"),
        (["--quant", "nf4"], "sets quant itself"),
        (["--target-accuracy", "90"], "between 0 and 1"),
        (["--at-once", "0"], "a whole number of runs"),
        (["--minutes", "0"], "above 0"),
        (["--at-once", "0"], "a whole number of runs"),
        (["--learning-rate", "-1"], "learning_rate"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(
            [
                *WORDS[: 2 if "--learning-rate" in words else None],
                *words,
                "--run-dir",
                str(tmp_path / "c"),
            ]
        )
    assert not (tmp_path / "c").exists()


def test_arms_cannot_be_like_themselves(tmp_path):
    (tmp_path / "c.toml").write_text('model = "tiny"\n[arms.a]\nlike = "b"\n[arms.b]\nlike = "a"\n')
    with pytest.raises(UserError, match="a -> b -> a"):
        planned("--config", str(tmp_path / "c.toml"), "--arms", "a")


def test_a_killed_comparison_continues_where_it_was(tmp_path):
    folder = tmp_path / "comparison"
    words = [*WORDS, "--arms", "nf4", "--seeds", "0", "--max-steps", "40", "--save-steps", "2"]
    words += ["--eval-steps", "20", "--run-dir", str(folder)]
    command = [sys.executable, "-m", "qerl.compare", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "[nf4/seed-0] step  7/40" in line:
                process.send_signal(signal.SIGKILL)
                break
    assert main(words) == 0
    lines = [line["step"] for line in read_metrics(folder / "nf4/seed-0") if "train/reward" in line]
    assert lines == list(range(1, 41))
    assert "continuing" in (folder / "logs/nf4-seed-0.log").read_text()
    before = (folder / "compare.json").read_text()
    assert main(words) == 0
    assert (folder / "compare.json").read_text() == before


STAND_IN = """
import signal, sys, time
from pathlib import Path
run = Path(next(word for word in sys.argv if word.startswith("--run-dir=")).partition("=")[2])
print("step 1/9", flush=True)
if "bf16" in str(run):
    sys.exit("qerl: error: no memory left")
if "nvfp4" in str(run) and not run.exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run.mkdir(parents=True)
    time.sleep(60)
"""


def test_failed_and_stopped_runs_do_not_lose_the_others(tmp_path, monkeypatch, capsys):
    """With a stand-in for training: bf16 always fails, nvfp4 takes long the first time and saves when it is asked to."""
    monkeypatch.setattr("qerl.comparison.runner.TRAIN", (sys.executable, "-c", STAND_IN))
    words = [*WORDS, "--arms", "bf16,nf4,nvfp4,nvfp4+aqn", "--seeds", "0"]
    words += ["--run-dir", str(tmp_path / "c")]

    def states():
        runs = json.loads((tmp_path / "c" / "compare.json").read_text())["runs"]
        return {name.partition("/")[0]: run["state"] for name, run in runs.items()}

    assert main([*words, "--minutes", "0.05"]) == 1
    assert states() == {"bf16": "failed", "nf4": "finished", "nvfp4": "stopped"}
    out = capsys.readouterr().out
    assert "failed: bf16/seed-0: qerl: error: no memory left" in out
    assert "[nf4/seed-0] step 1/9" in out and "1 of 4 runs finished" in out
    (tmp_path / "c" / "nvfp4+aqn" / "seed-0").mkdir(parents=True)
    assert main(words) == 1
    assert states() == dict.fromkeys(("bf16", "nf4", "nvfp4", "nvfp4+aqn"), "finished") | {
        "bf16": "failed"
    }
    runs = json.loads((tmp_path / "c" / "compare.json").read_text())["runs"]
    assert [run["sessions"] for run in runs.values()] == [2, 1, 2, 1]


SIDE_BY_SIDE = """
import sys, time
from pathlib import Path
run = Path(next(word for word in sys.argv if word.startswith("--run-dir=")).partition("=")[2])
run.mkdir(parents=True)
end = time.monotonic() + 30
while len(list(run.parent.parent.glob("*/seed-0"))) < 3:
    if time.monotonic() > end:
        sys.exit("alone")
    time.sleep(0.05)
print("step 1/1", flush=True)
if "forever" not in str(run):
    sys.exit(0)
time.sleep(60)
"""


def test_runs_side_by_side_meet_and_stop_together(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("qerl.comparison.runner.TRAIN", (sys.executable, "-c", SIDE_BY_SIDE))
    words = [*WORDS, "--arms", "bf16,nf4,nvfp4", "--seeds", "0", "--at-once", "3"]
    assert main([*words, "--run-dir", str(tmp_path / "c")]) == 0
    assert "step 1/1" in capsys.readouterr().out
    folder = tmp_path / "forever"
    assert main([*words, "--run-dir", str(folder), "--minutes", "0.1"]) == UNFINISHED
    runs = json.loads((folder / "compare.json").read_text())["runs"]
    assert {run["state"] for run in runs.values()} == {"stopped"} and len(runs) == 3


def test_a_folder_that_is_no_comparison_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no comparison"):
        main([*WORDS, "--run-dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A finished comparison of three arms and two seeds, its runs made in this process, as their commands would."""
    root = tmp_path_factory.mktemp("comparison") / "c"
    comparison = planned(
        *(*WORDS, "--max-steps", "6", "--arms", "nvfp4+aqn,nf4,bf16", "--seeds", "0,1"),
        *("--noise.num-stages", "3", "--run-dir", str(root)),
    )
    for run in comparison.runs:
        assert train_main(list(run.words)) == 0
    runs = {
        run.name: {"state": "finished", "command": run.command, "message": ""}
        | {"run_dir": str(run.run_dir), "exit_code": 0, "sessions": 1, "seconds": 60.0}
        for run in comparison.runs
    }
    status = {"seeds": [0, 1], "baseline": "nf4", "target_accuracy": [0.3, 1.0], "runs": runs}
    (root / "compare.json").write_text(json.dumps({"arms": comparison.differences} | status))
    assert finish(comparison, Runner(comparison)) == 0
    return root


def test_everything_but_the_arm_is_equal(folder):
    report = read_comparison(folder)
    assert report.checks[0].startswith(
        "Training problems and their order equal the baseline's in 4 of 4"
    )
    arms = {arm.name: arm.records[1] for arm in report.arms}
    ours, theirs = arms["nvfp4+aqn"].config, arms["nf4"].config
    assert {key for key in ours if ours[key] != theirs[key]} == {"quant", "noise", "run_dir"}
    first = [completion_rows(run, 1, "train") for run in arms.values()]
    for column in ("problem_id", "prompt", "sample_index", "answer"):
        assert [row[column] for row in first[0]] == [row[column] for row in first[1]]


def test_the_report_says_what_its_numbers_allow(folder):
    report = read_comparison(folder)
    assert [d.arm for d in report.differences if d.quantity == "accuracy after"] == [
        "nvfp4+aqn",
        "bf16",
    ]
    for difference in report.differences:
        seeds = difference.per_seed
        assert difference.interval.mean == pytest.approx(sum(seeds.values()) / 2)
        assert difference.interval.low <= difference.interval.mean <= difference.interval.high
    for sentence in report.sentences:
        assert "against nf4 after 6 steps" in sentence and "seeds 0, 1: " in sentence
    raw = json.loads((folder / "report.json").read_text())
    curve = raw["arms"]["bf16"]["seeds"]["1"]["curves"]["eval/accuracy"]
    assert [step for step, _ in curve] == [0, 2, 4, 6]
    assert raw["summary"]["bf16"]["accuracy after"] == pytest.approx(
        sum(d["curves"]["eval/accuracy"][-1][1] for d in raw["arms"]["bf16"]["seeds"].values()) / 2
    )
    assert len(raw["times_to_accuracy"]) == 6
    text = (folder / "report.md").read_text()
    assert text.startswith("# nvfp4+aqn and bf16 against the baseline nf4")
    assert all(line.count(" | ") == 3 for line in text.splitlines() if line.startswith("| rollout"))


def test_losses_come_first_and_one_seed_claims_nothing_about_others(folder, tmp_path, monkeypatch):
    copy = tmp_path / "c"
    shutil.copytree(folder, copy)
    status = json.loads((copy / "compare.json").read_text())
    status["seeds"] = [0]
    (copy / "compare.json").write_text(json.dumps(status))
    intervals = iter([Interval(0.1, 0.05, 0.2)] * 3 + [Interval(-0.1, -0.2, -0.05)] * 3)
    monkeypatch.setattr(
        "qerl.reporting.differences.seeds_and_problems_interval", lambda *_, **__: next(intervals)
    )
    lower, higher = read_comparison(copy).sentences
    assert lower.startswith("bf16 against nf4") and "lower by 0.100" in lower
    assert higher.startswith("nvfp4+aqn against nf4") and "higher by 0.100" in higher
    assert "nothing follows for other seeds" in lower


def test_the_pages_work_in_a_browser(folder, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")

    def opened(address: str) -> str:
        """The page's elements after its script has run."""
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"]
        command += ["--dump-dom", address]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    comparison = opened(f"file://{folder}/report.html")
    assert comparison.count("<svg") >= 9 and 'class="card"' in comparison
    run = folder / "nvfp4+aqn" / "seed-0"
    assert report_main([str(run)]) == 0
    rows = completion_rows(read_comparison(folder).arms[0].records[0], 4, "train")
    problem = rows[0]["problem_id"]
    good = [row for row in rows if row["problem_id"] == problem and row["reward"] >= 0.5]
    filtered = f"file://{run}/report.html#step=4&kind=train&problem={problem}&min=0.5"
    page = opened(filtered)
    assert page.count('class="card"') == len(good)
    assert f"of {len(good)} (" in page if good else "none match" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched


def test_what_a_model_writes_is_never_markup(folder, tmp_path):
    import pyarrow.parquet as pq

    run = tmp_path / "run"
    shutil.copytree(folder / "nf4" / "seed-0", run)
    path = run / "completions" / "6.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[0]["completion"] = "</script><script>alert(1)</script>"
    pq.write_table(pq.ParquetFile(path).schema_arrow.empty_table().from_pylist(rows), path)
    assert report_main([str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "<script>alert" not in text and "\\u003c/script>\\u003cscript>alert(1)" in text


def test_report_of_several_runs_and_of_none(folder, tmp_path):
    out = tmp_path / "two.html"
    runs = [str(folder / arm / "seed-0") for arm in ("nf4", "bf16")]
    assert report_main([*runs, "--out", str(out)]) == 0
    assert out.read_text().count('data-arm="') > 20
    assert report_main([str(folder)]) == 0
    for words, message in (
        ([], "which runs"),
        (runs, "--out FILE"),
        ([runs[0], runs[0], "--out", "x"], "twice"),
        (["--what"], "unknown flag"),
        ([str(tmp_path)], "not a run folder"),
    ):
        with pytest.raises(UserError, match=message):
            report_main(words)


def test_report_only_and_dry_run(folder, capsys):
    words = [*WORDS, "--max-steps", "6", "--arms", "nvfp4+aqn,nf4,bf16", "--seeds", "0,1"]
    words += ["--noise.num-stages", "3", "--run-dir", str(folder)]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("python -m qerl.train --") == 6
    assert main([*words, "--report-only"]) == 0
    assert make_report(folder).baseline == "nf4"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 8, [0, 2, 4, 6, 8]), (3, 3, [2.6, 2.8, 3, 3.2, 3.4])],
)
def test_ticks_are_round_and_cover(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("compare-*.toml")), ids=lambda path: path.stem
)
def test_the_committed_comparisons_are_whole(path):
    comparison = planned("--config", str(path))
    assert len(comparison.runs) == len(comparison.arms) * len(comparison.seeds)
