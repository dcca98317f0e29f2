"""`qerl evaluate`: what decides what is right, base and adapter side by side, refusals, the files."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import load_policy, randomize_adapter
from safetensors.torch import load_file, save_file

from qerl.errors import UserError
from qerl.evaluate import main
from qerl.evaluation.policy import (
    Evaluation,
    ProblemScore,
    accuracy_note,
    correctness_reward,
    evaluate_policy,
    with_own_grader,
)
from qerl.evaluation.report import compare, problem_metrics, table, verdict
from qerl.evaluation_arms import ProbeDifference
from qerl.tasks.calls import BuiltinFunction, FileFunction, RewardFailure, RewardResult, RewardSpec
from qerl.tasks.problems import Task
from qerl.tasks.prompts import EncodedProblems
from qerl.train import main as train
from qerl.types import Problem, Rollout, Sampling

REWARD = f"{Path(__file__).parent / 'reward_low_tokens.py'}:low_tokens"
TASK = (
    *("--task", "reasoning-gym/chain_sum", "--task.train-size", "24", "--task.test-size", "12"),
    *(
        "--eval-size",
        "6",
        "--max-completion-length",
        "8",
        "--device",
        "cpu",
        "--reward-workers",
        "1",
    ),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps, trained on a reward that is not the task's own."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    words = ["--model", "tiny", *TASK, "--run-dir", str(folder), "--reward-funcs", REWARD]
    words += ["--max-steps", "6", "--num-generations", "4", "--prompts-per-step", "4"]
    words += ["--learning-rate", "0.02", "--warmup-ratio", "0", "--lora-r", "4", "--eval-size", "2"]
    assert train(words) == 0
    return folder


@pytest.fixture
def adapter(tmp_path: Path, tiny_folder: Path) -> Callable[[float], Path]:
    """Saves an adapter of rank 4 whose B is random with this scale."""

    def save(scale: float) -> Path:
        policy = load_policy(tiny_folder)
        if scale:
            randomize_adapter(policy, scale)
        policy.save_adapter(tmp_path / f"adapter-{scale}")
        return tmp_path / f"adapter-{scale}"

    return save


def results(folder: Path) -> tuple[dict, list[dict], list[dict]]:
    summary = json.loads((folder / "summary.json").read_text())
    problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    return summary, problems, pq.read_table(folder / "completions.parquet").to_pylist()


# ---- the command ----


def test_a_run_beside_its_base(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--k", "3", "--eval-size", "6"]) == 0
    printed = capsys.readouterr().out
    summary, problems, completions = results(run / "evaluations" / "1")
    assert summary["correctness_reward"] == "reasoning_gym"  # the task's own, not low_tokens
    assert summary["k"] == 3 and summary["num_problems"] == 6
    assert list(summary["metrics"]) == ["base", "adapter", "change"]
    assert summary["metrics"]["change"]["reward"]["low"] > 0  # what was trained went up
    assert sum(summary["problems"].values()) == len(problems) == 6
    assert len(completions) == 2 * 6 * 3
    for arm in ("base", "adapter"):
        scores = [row["reward/reasoning_gym"] >= 1 for row in completions if row["arm"] == arm]
        mean = summary["metrics"][arm]["avg@3"]["mean"]
        assert mean == pytest.approx(sum(scores) / len(scores))
        assert mean == pytest.approx(sum(row[arm]["avg@3"] for row in problems) / 6)
    for part in ("avg@3", "pass@2", "maj@3", "change", "6/6 problems", "problems are few"):
        assert part in printed
    assert "right is what the reward reasoning_gym gives at least 1" in printed


def test_the_base_of_a_pair_is_the_base_alone(run: Path, tmp_path: Path) -> None:
    """The adapter is off in the base's arm; --model NAME --adapter RUN asks with the run's own settings."""
    flags = ["--k", "1", "--eval-size", "3"]
    assert (
        main(["--model", "tiny", "--adapter", str(run), *flags, "--out", str(tmp_path / "b")]) == 0
    )
    paired, _, both = results(tmp_path / "b")
    alone_flags = ["--reward-funcs", REWARD, *flags, "--out", str(tmp_path / "a")]
    assert main(["--model", "tiny", *TASK, *alone_flags]) == 0
    summary, _, alone = results(tmp_path / "a")
    assert summary["adapter"] is None and list(summary["metrics"]) == ["base"]
    texts = [row["completion"] for row in both if row["arm"] == "base"]
    assert texts == [row["completion"] for row in alone]
    assert texts != [row["completion"] for row in both if row["arm"] == "adapter"]
    assert paired["config"]["rollout"]["max_completion_length"] == 8
    assert paired["config"]["lora"]["lora_r"] == 4


def test_greedy_is_one_completion_and_repeats(adapter, tmp_path: Path) -> None:
    words = [
        "--model",
        "tiny",
        *TASK,
        "--eval-size",
        "2",
        "--adapter",
        str(adapter(0.5)),
        "--greedy",
    ]
    for out, seed in (("a", "1"), ("b", "2")):
        assert main([*words, "--seed", seed, "--out", str(tmp_path / out)]) == 0
    one, other = (results(tmp_path / out)[2] for out in ("a", "b"))
    assert len(one) == 4
    assert [row["completion"] for row in one] == [row["completion"] for row in other]
    assert results(tmp_path / "a")[0]["temperature"] == 0


def test_results_are_never_written_over(run: Path, tmp_path: Path) -> None:
    first = (run / "evaluations").exists()
    assert main([str(run), "--k", "1", "--eval-size", "2"]) == 0
    assert (run / "evaluations" / ("2" if first else "1") / "summary.json").is_file()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        main([str(run), "--out", str(tmp_path)])


def test_an_untrained_adapter_is_refused(adapter, tmp_path: Path) -> None:
    words = ["--model", "tiny", *TASK, "--adapter", str(adapter(0)), "--out", str(tmp_path / "o")]
    with pytest.raises(UserError, match=r"changes no output.* B matrices are all zero"):
        main(words)
    assert not (tmp_path / "o").exists()


def test_an_adapter_that_changes_no_completion_is_refused(adapter, tmp_path: Path) -> None:
    words = [
        "--model",
        "tiny",
        *TASK,
        "--adapter",
        str(adapter(1e-5)),
        "--out",
        str(tmp_path / "o"),
    ]
    with pytest.raises(
        UserError, match=r"changes log-probabilities by up to .* not one of 24 comp"
    ):
        main(words)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--k", "0"], "--k 0: give a whole number"),
        (["--k", "four"], "--k four: give a whole number"),
        (["--greedy", "--k", "4"], "greedy completions of a problem are all the same"),
        (["--eval-size", "0"], "nothing is held out"),
        (["--adapter", "nowhere"], "nowhere holds no adapter"),
        (["--kk", "4"], "--kk"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        main(["--model", "tiny", *TASK, *flags])
    assert "\n" not in str(raised.value)


def test_a_file_that_is_no_adapter_is_said(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match="not a PEFT LoRA adapter"):
        main(["--model", "tiny", *TASK, "--adapter", str(tmp_path)])


# ---- what decides ----

OWN = RewardSpec("math", 1.0, BuiltinFunction("math"))
OTHER = RewardSpec("length", 1.0, FileFunction("f.py", "", "length"))
NAMESAKE = RewardSpec("math", 1.0, FileFunction("f.py", "", "math"))
MATH_TASK = Task("t", (Problem("p", "2+2", "4"),), (), ("math",))


def test_the_tasks_own_grader_decides_wherever_it_stands() -> None:
    assert correctness_reward([OTHER, OWN], MATH_TASK) == "math"
    assert correctness_reward([OTHER], MATH_TASK) == "length"
    added = with_own_grader([OTHER], MATH_TASK)
    assert [(spec.name, spec.weight) for spec in added] == [("length", 1.0), ("math", 0.0)]
    assert correctness_reward(added, MATH_TASK) == "math"
    assert with_own_grader([OWN], MATH_TASK) == (OWN,)
    assert accuracy_note([OTHER, OWN], MATH_TASK) is None
    assert "math, the task's own, is not among the rewards" in (
        accuracy_note([OTHER], MATH_TASK) or ""
    )


class Script:
    """An engine, tokenizer and pool in one: completion i of each problem is token i; values come from a table."""

    def __init__(self, values: list[RewardResult]):
        self.values = list(values)

    def sync(self, version, noise):
        self.version = version

    def generate(self, requests, sampling):
        return [
            [
                Rollout(
                    r.problem_id, i, r.prompt_ids, (i,), (0.0,), (True,), "length", self.version
                )
                for i in range(len(r.seeds))
            ]
            for r in requests
        ]

    def decode(self, ids, **_):
        return f"{ids[0]}"

    def score(self, calls):
        return [self.values.pop(0) for _ in calls]


def evaluate(values: list[RewardResult], progress: list | None = None) -> Evaluation:
    script = Script(values)
    problems = [Problem(f"p{i}", "?", "1") for i in range(len(values))]
    n = len(values)
    encoded = EncodedProblems(tuple(problems), ((0,),) * n, (False,) * n, 0, ())
    return evaluate_policy(
        script, script, encoded, script, [OWN], Sampling(1.0, 1, (9,)),
        correctness="math", num_generations=2, seed=0, version=7, problems_at_once=2,
        on_progress=None if progress is None else lambda *shown: progress.append(shown),
    )  # fmt: skip


def test_part_credit_failures_and_missing_answers() -> None:
    failure = RewardFailure("math", "p1", 0, "timeout", "no result within 1 s")
    progress: list = []
    found = evaluate(
        [
            RewardResult({"math": [1.0, 0.99]}, ()),
            RewardResult({"math": [None, 1.0]}, (failure,)),
            RewardResult({"math": [None, None]}, ()),
        ],
        progress,
    )
    assert [score.correct for score in found.problems] == [(1.0, 0.0), (0.0, 1.0)]
    assert found.accuracy == 0.5
    assert (found.num_ungraded, found.num_failures) == (1, 1)
    assert math.isnan(found.problems[1].rewards[0])
    assert found.problems[0].answers == ("0", "1")
    assert [done for done, _ in progress] == [2, 3]
    assert len(found.rows) == 6


def test_nothing_graded_is_an_error() -> None:
    with pytest.raises(UserError, match="math graded none of the 1 held-out problems"):
        evaluate([RewardResult({"math": [None, None]}, ())])


# ---- numbers and words ----


def score(id: str, *correct: float, answers: str = "", reward: float = 0.0) -> ProblemScore:
    n = len(correct)
    return ProblemScore(id, correct, tuple(answers.ljust(n, "x")), (reward,) * n, (5,) * n, 0)


def evaluation(*scores: ProblemScore) -> Evaluation:
    return Evaluation(0.0, {"num_completions": 1.0}, [], scores)


def test_metrics_of_a_problem() -> None:
    found = problem_metrics(score("a", 1, 0, 0, 0, 1, answers="ABBBA"))
    assert list(found) == ["avg@5", "pass@2", "pass@4", "pass@5", "maj@5", "reward"]
    assert found["avg@5"] == 0.4
    assert found["pass@2"] == pytest.approx(0.7)
    assert found["pass@4"] == found["pass@5"] == 1.0
    assert found["maj@5"] == 0.0
    assert list(problem_metrics(score("a", 1))) == ["avg@1", "reward"]


def test_pairs_are_made_by_problem_not_by_place() -> None:
    base = evaluation(score("a", 1, 1), score("b", 0, 0), score("only-base", 1, 1))
    trained = evaluation(score("b", 1, 0), score("a", 1, 1))
    found = compare(base, trained, seed=0)
    assert [row["problem_id"] for row in found.per_problem] == ["a", "b"]
    assert found.change is not None and found.change["avg@2"].mean == 0.25
    assert found.outcomes == (1, 0, 1)
    with pytest.raises(UserError, match="no problem was graded for both"):
        compare(base, evaluation(score("z", 1, 1)), seed=0)


def test_words_follow_the_interval() -> None:
    base = evaluation(*(score(f"p{i}", i % 2, 0) for i in range(40)))
    better = evaluation(*(score(f"p{i}", 1, i % 2) for i in range(40)))
    sure = compare(base, better, seed=0)
    assert "avg@2 is higher by 0.500" in verdict(sure)[0]
    assert "better on 40, worse on 0, equal on 0 of 40 problems" in verdict(sure)[0]
    same = compare(base, base, seed=0)
    assert "is the same on every problem" in verdict(same)[0]
    nudged = evaluation(*(score(f"p{i}", max(i % 2, i == 0), 0) for i in range(40)))
    assert "may be chance" in verdict(compare(base, nudged, seed=0))[0]
    alone = compare(evaluation(*(score(f"p{i}", 0, 0) for i in range(3))), None, seed=0)
    assert "3 problems are few" in verdict(alone)[0]
    assert "resampling cannot show how far it could be off" in verdict(alone)[1]
    assert "change" in table(sure).splitlines()[0]
    assert "change" not in table(alone)


def test_a_missing_reward_is_left_out_of_its_mean_only() -> None:
    found = compare(
        evaluation(score("a", 1, 0, reward=0.5), score("b", 0, 0, reward=math.nan)), None, seed=0
    )
    assert found.base["reward"].mean == 0.5
    assert found.base["avg@2"].mean == 0.25


def probe_of(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Rollout:
    return Rollout("p", 0, (1,), tokens, logprobs, (True,) * len(tokens), "length", 0)


def test_a_probe_sees_more_than_noise() -> None:
    before = [probe_of((1, 2), (-1.0, -2.0))]
    same = ProbeDifference.between(before, before)
    shifted = ProbeDifference.between(before, [probe_of((1, 2), (-1.0, -2.1))])
    diverged = ProbeDifference.between(before, [probe_of((3, 2), (-1.0, -2.0))])
    assert same == ProbeDifference(0, 0.0)
    assert shifted == ProbeDifference(0, pytest.approx(0.1))
    assert diverged == ProbeDifference(1, 0.0)
    assert not same.exceeds(same)
    assert shifted.exceeds(same) and diverged.exceeds(same)
    assert not shifted.exceeds(ProbeDifference(0, 0.2))  # an engine that is not deterministic


def test_an_adapter_of_another_model_is_one_short_line(adapter, tmp_path: Path) -> None:
    folder = adapter(0.5)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(
        {k: v[:, :8].contiguous() for k, v in weights.items()}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(
        UserError, match=r"do not fit this model: size mismatch .* more\)$"
    ) as raised:
        main(["--model", "tiny", *TASK, "--adapter", str(folder), "--out", str(tmp_path / "o")])
    assert len(str(raised.value)) < 600
