"""`qerl.check` and `qerl.diagnose` as commands, and the line that training says when nothing is learnt."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from qerl import check, diagnose, train
from qerl.errors import UserError

SMALL = (
    *("--model", "tiny", "--max-completion-length", "4", "--num-generations", "4"),
    *("--prompts-per-step", "4", "--reward-workers", "1"),
)
SUMS = (*SMALL, "--task", "reasoning-gym/chain_sum", "--train-size", "16", "--test-size", "4")
REWARDS = """
def blind(completions, **kwargs):
    return [float(len(text) % 3) for text in completions]

def generous(completions, **kwargs):
    return [1.0] * len(completions)

def tagged(completions, answer, **kwargs):
    return [float(f"<answer>{gold}</answer>" in text) for text, gold in zip(completions, answer)]

def low_tokens(completion_ids, **kwargs):
    return [float(sum(ids) / len(ids) < 120) for ids in completion_ids]
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(dedent(REWARDS))
    return str(path)


def run(main, arguments: tuple[str, ...], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    code = main(list(arguments))
    return code, capsys.readouterr().out


def test_prompt_gold_answers_sample_and_verdict(capsys: pytest.CaptureFixture) -> None:
    code, out = run(check.main, (*SUMS, "--check-problems", "3", "--check-golds", "8"), capsys)
    assert "<|im_start|>user\nState the final answer" in out and "<|im_start|>assistant\n" in out
    assert "rewards of 8 gold answers" in out and "every gold answer scores 1, the most" in out
    assert "sampling 3 problems x 4 completions from tiny" in out
    assert "pass@1" in out and "pass@4" in out and "% cut" in out
    assert "all right" in out and "all wrong" in out
    assert code == 1 and "verdict: do not train like this yet" in out
    assert "too hard" in out or "max_completion_length" in out


def test_a_run_that_can_learn_is_ready(rewards: str, capsys: pytest.CaptureFixture) -> None:
    learnable = ("--reward-funcs", f"reasoning_gym,{rewards}:low_tokens", "--reward-weights", "1,1")
    code, out = run(check.main, (*SUMS, *learnable, "--check-problems", "4"), capsys)
    assert code == 0 and "of the groups have different rewards" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blind", "no reward term likes gold answers better"),
        ("generous", "no reward term likes gold answers better"),
        ("tagged", "looks for <answer>, which no prompt mentions"),
    ],
)
def test_rewards_that_cannot_teach_are_found_without_the_model(
    rewards: str, capsys: pytest.CaptureFixture, name: str, words: str
) -> None:
    arguments = (*SUMS, "--reward-funcs", f"{rewards}:{name}", "--no-sample")
    code, out = run(check.main, arguments, capsys)
    assert words in out and "sampling" not in out
    assert code == (0 if name == "tagged" else 1)


def test_answers_that_cannot_score_are_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i + 1} apples"} for i in range(40)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (*SMALL, "--task.path", str(path), "--task.answer-format", "boxed")
    code, out = run(check.main, (*arguments, "--no-sample"), capsys)
    assert code == 0 and r"\boxed" in out
    with pytest.raises(UserError, match="is not a number"):
        train.main([*arguments[:-1], "last_number", "--run-dir", str(tmp_path / "run")])
    code, out = run(check.main, (*arguments[:-1], "last_number", "--no-sample"), capsys)
    assert code == 1 and "reward calls failed" in out and "is not a number" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--check-problems", "0"), "--check-problems 0: give a whole number"),
        (("--check-golds", "many"), "--check-golds many: give a whole number"),
        (("--task", "math-500", "--task.path", "{data}"), "for evaluation only"),
        (("--num-shots", "99"), "num_shots=99"),
        (("--enable-thinking",), "no such switch"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(UserError, match=message):
        check.main([*SUMS, *(word.format(data=data) for word in words)])


def test_a_run_that_learns_nothing_says_why(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_dir = tmp_path / "run"
    arguments = (*SUMS, "--run-dir", str(run_dir), "--max-steps", "4", "--eval-size", "0")
    _, out = run(train.main, (*arguments, "--flat-reward-steps", "2"), capsys)
    assert out.count("warning: nothing to learn from in 2 steps") == 2
    assert f"(python -m qerl.diagnose {run_dir})" in out
    code, out = run(diagnose.main, (str(run_dir),), capsys)
    assert code == 1
    assert "4 steps; looking at 1 to 4, 64 completions" in out
    assert "[stop] the gradient norm is 0" in out and "[stop] the saved adapter is 0" in out
    assert "[stop] not one of 16 groups of 4 completions has different rewards" in out


def test_diagnose_takes_a_run_and_nothing_else(tmp_path: Path) -> None:
    for words, message in (
        ([], "which run"),
        ([str(tmp_path)], "not a run folder"),
        ([str(tmp_path), "--steps", "-1"], "whole number"),
        ([str(tmp_path), "--learning-rate", "1"], "takes none"),
    ):
        with pytest.raises(UserError, match=message):
            diagnose.main(words)
