"""Tasks: what is read from where, columns, splits that never meet, and errors that say what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import TASKS, Task, load_task
from qerl.tasks.catalog import DATASETS
from qerl.tasks.problems import is_held_out, prompt_hash
from qerl.tasks.reasoning import divide, fill_pool

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"


def load(**settings: object) -> Task:
    return load_task(TaskConfig(**settings))


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(start: int, stop: int) -> list[dict]:
    return [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(start, stop)]


def prompts(problems: tuple) -> set[str]:
    return {str(problem.prompt) for problem in problems}


# Generated tasks


def test_reasoning_gym_splits_never_meet_and_are_stable() -> None:
    settings = {"name": "reasoning-gym/chain_sum", "train_size": 150, "test_size": 40}
    task = load(**settings)
    assert (len(prompts(task.train)), len(prompts(task.test))) == (150, 40)
    assert not prompts(task.train) & prompts(task.test)
    assert load(**settings) == task
    ids = [problem.id for problem in (*task.train, *task.test)]
    assert len(set(ids)) == 190


def test_a_question_is_on_the_same_side_whatever_sizes_and_pool_are_asked() -> None:
    def sizes(train: int, test: int, seed: int = 0) -> Task:
        return load(
            name="reasoning-gym/chain_sum", train_size=train, test_size=test, pool_seed=seed
        )

    tasks = [sizes(100, 20), sizes(400, 20), sizes(20, 150), sizes(200, 50, seed=1)]
    all_train = set.union(*(prompts(task.train) for task in tasks))
    all_test = set.union(*(prompts(task.test) for task in tasks))
    assert not all_train & all_test
    assert tasks[0].test == tasks[1].test and tasks[0].train == tasks[1].train[:100]


def test_a_family_that_runs_dry_is_divided_and_said() -> None:
    task = load(name="reasoning-gym/chain_sum", params=ONE_DIGIT, train_size=120, test_size=60)
    assert (len(prompts(task.train)), len(prompts(task.test))) == (120, 60)
    assert not prompts(task.train) & prompts(task.test)
    assert any("200 distinct" in note for note in task.notes)
    default = load(name="reasoning-gym/chain_sum", params=ONE_DIGIT)
    assert (len(default.train), len(default.test)) == (160, 40)
    only_train = load(name="reasoning-gym/chain_sum", params=ONE_DIGIT, train_size=190)
    assert (len(only_train.train), len(only_train.test)) == (190, 10)
    with pytest.raises(
        UserError, match=r"200 distinct questions.*train_size=190 and .*test_size=60"
    ):
        load(name="reasoning-gym/chain_sum", params=ONE_DIGIT, train_size=190, test_size=60)


def test_the_pool_grows_until_both_sides_are_full() -> None:
    sizes = []

    def create(size: int) -> list[dict]:
        sizes.append(size)
        return [{"question": f"q{i % 90}", "answer": ""} for i in range(size)]

    pool = fill_pool(create, 40, 10)
    train, test = divide(pool, 40, 10, "t")
    assert not pool.is_exhausted and sizes == [100]
    assert {e["question"] for e in train}.isdisjoint(e["question"] for e in test)
    assert fill_pool(create, 80, 10).is_exhausted == (
        sum(is_held_out(f"q{i}", 5) for i in range(90)) != 10
    )


def test_reasoning_gym_problems_carry_what_the_reward_needs() -> None:
    task = load(name="reasoning-gym/boxnet", train_size=3, test_size=1)
    problem = task.train[0]
    assert problem.answer is None and task.reward_funcs == ("reasoning_gym",)
    assert problem.columns["entry"]["question"] == problem.prompt
    assert (problem.columns["family"], problem.columns["params"]) == ("boxnet", {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no task: give"),
        ({"name": "gsm8"}, r"did you mean gsm8k\?"),
        ({"name": "chain_sum"}, "did you mean reasoning-gym/chain_sum"),
        ({"name": "reasoning-gym"}, "needs a family"),
        ({"name": "reasoning-gym/chainsum"}, "chain_sum"),
        ({"name": "reasoning-gym/xyzzyx"}, "there are ab, "),
        ({"name": "gsm8k/main"}, "no task 'gsm8k/main'"),
        ({"name": "someone/data"}, "task.path"),
        ({"name": "dataset"}, "needs task.path"),
        ({"name": "gsm8k", "params": {"a": 1}}, "task.params means nothing to gsm8k"),
        ({"name": "reasoning-gym/chain_sum", "path": "x"}, "task.path means nothing"),
        (
            {"name": "reasoning-gym/chain_sum", "params": {"min_term": 2}},
            "did you mean min_terms",
        ),
        (
            {"name": "reasoning-gym/chain_sum", "params": {"min_terms": 0}},
            "min_terms must be positive",
        ),
        ({"name": "reasoning-gym/chain_sum", "params": {"seed": 1}}, "pool_seed"),
        ({"path": "nowhere.jsonl"}, "no file or folder nowhere.jsonl"),
        ({"path": "./nowhere"}, "no file or folder"),
        ({"path": __file__}, r"cannot read \.py files"),
    ],
)
def test_mistakes_are_explained_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)


# Data sets


def test_one_file_holds_out_a_tenth_by_hash(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", sums(0, 400))
    task = load(path=path)
    assert len(task.train) + len(task.test) == 400 and 20 <= len(task.test) <= 60
    assert not prompts(task.train) & prompts(task.test)
    assert "a tenth" in " ".join(task.notes) and str(len(task.test)) in task.notes[0]
    more = load(path=write_jsonl(tmp_path / "more.jsonl", sums(0, 500)))
    assert prompts(task.test) <= prompts(more.test) and prompts(task.train) <= prompts(more.train)


def test_equal_questions_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 7} ", "answer": str(i)} for i in range(100)]
    task = load(path=write_jsonl(tmp_path / "a.jsonl", rows))
    assert not prompts(task.train) & prompts(task.test)
    assert len({problem.id for problem in (*task.train, *task.test)}) == 100


def test_hashes_are_frozen() -> None:
    assert prompt_hash("What is 9 + 9?") == 9333232273265500925
    assert prompt_hash(" What is 9 + 9?\n") == prompt_hash("What is 9 + 9?")
    messages = [{"role": "user", "content": "hi"}]
    assert prompt_hash(messages) == prompt_hash([{"content": "hi", "role": "user"}])


def test_a_folder_gives_splits_by_file_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", sums(0, 30))
    write_jsonl(tmp_path / "test.jsonl", sums(25, 40))
    write_jsonl(tmp_path / "dev.jsonl", sums(100, 105))
    task = load(path=str(tmp_path))
    assert (len(task.train), len(task.test)) == (25, 15)
    assert "5 training rows dropped: their prompt is held out too" in task.notes
    task = load(path=str(tmp_path), train_split="test", test_split="dev")
    assert (len(task.train), len(task.test)) == (15, 5)
    only = tmp_path / "only"
    only.mkdir()
    write_jsonl(only / "anything.jsonl", sums(0, 30))
    assert load(path=str(only), train_size=5).train[0].id.startswith("train-")
    assert load(path=str(only), train_split="anything", train_size=5).train
    with pytest.raises(UserError, match="no split 'val'; there are dev, test, train"):
        load(path=str(tmp_path), test_split="val")


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "saved"])
def test_file_formats(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    data = Dataset.from_list([{**row, "level": i % 3} for i, row in enumerate(sums(0, 40))])
    path = tmp_path / f"data.{kind}"
    if kind == "saved":
        data.save_to_disk(str(path))
    elif kind == "json":
        path.write_text(json.dumps(data.to_list()))
    elif kind == "csv":
        data.to_csv(str(path))
    else:
        data.to_parquet(str(path))
    task = load(path=str(path))
    by_id = {problem.id: problem for problem in (*task.train, *task.test)}
    assert len(by_id) == 40
    problem = by_id["train-7"]
    assert (problem.prompt, problem.answer) == ("What is 7 + 1?", "8")
    assert problem.columns == {"question": "What is 7 + 1?", "answer": 8, "level": 1}


def test_sizes_take_a_subset_by_hash(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", sums(0, 200))
    full = load(path=path)
    task = load(path=path, train_size=20, test_size=5)
    assert task.train == full.train[:20] and task.test == full.test[:5]
    with pytest.raises(UserError, match=r"task\.train_size asks for 900 problems, the data has"):
        load(path=path, train_size=900)


def test_verl_columns_by_dotted_name(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "here",
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(30)
    ]
    path = write_jsonl(tmp_path / "verl.jsonl", rows)
    task = load(path=path, answer_column="reward_model.ground_truth")
    problem = next(p for p in task.train if p.answer == "7")
    assert problem.prompt == [{"role": "user", "content": "q7"}]
    assert problem.columns["ground_truth"] == "7" and problem.columns["data_source"] == "here"
    assert problem.columns["extra_info"] == {"index": 7}
    with pytest.raises(UserError, match=r"no column 'gold'.*reward_model\.ground_truth"):
        load(path=path, answer_column="gold")


def test_the_answer_goes_by_both_names(tmp_path: Path) -> None:
    rows = [{"problem": f"q{i}", "solution": f"s{i}", "other": None} for i in range(30)]
    problem = load(path=write_jsonl(tmp_path / "a.jsonl", rows)).train[0]
    assert problem.columns["solution"] == problem.answer and "answer" not in problem.columns
    rows = [{"prompt": f"q{i}", "answer": "no", "gold": f"s{i}"} for i in range(30)]
    path = write_jsonl(tmp_path / "b.jsonl", rows)
    problem = load(path=path, answer_column="gold").train[0]
    assert problem.columns["gold"] == problem.answer and "answer" not in problem.columns


def test_data_without_answers_has_no_default_reward(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"q{i}"} for i in range(30)])
    task = load(path=path)
    assert task.reward_funcs == () and task.train[0].answer is None


def test_rows_without_a_prompt_are_dropped_and_said(tmp_path: Path) -> None:
    rows = [*sums(0, 30), {"question": "", "answer": 1}, {"question": None, "answer": 1}]
    task = load(path=write_jsonl(tmp_path / "a.jsonl", rows))
    assert len(task.train) + len(task.test) == 30
    assert "train: 2 rows dropped: their prompt is empty" in task.notes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "q"}, "no column prompt, question, problem; the data has text"),
        ({"prompt": 3}, "a string or a list of messages, not int"),
        ({"prompt": ["hi"]}, "a message is"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "content must be text"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "ends with an assistant message",
        ),
    ],
)
def test_bad_rows_are_explained(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(path=write_jsonl(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize("text", ["", "\n", "[]", "{not json\n", '{"a": 1}\n[1, 2]\n'])
def test_broken_files_are_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.jsonl"):
        load(path=str(path))


# GSM8K


def test_gsm8k_takes_what_follows_the_mark(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"{i} + 1 = ...\n#### 1,{i:03}"} for i in range(30)]
    path = write_jsonl(tmp_path / "gsm.jsonl", rows)
    task = load(name="gsm8k", path=path)
    problem = next(p for p in (*task.train, *task.test) if p.prompt == "q7")
    assert problem.answer == "1007" and problem.columns["solution"].endswith("#### 1,007")
    assert task.reward_funcs == ("last_number",) and "####" in task.system_prompt
    assert any("task.answer_format hashes" in note for note in load(path=path).notes)
    hashes = load(path=path, answer_format="hashes")
    assert {p.answer for p in hashes.train} <= {f"1,{i:03}" for i in range(30)}
    with pytest.raises(UserError, match=r"train-0: the answer has no '#### \.\.\.'"):
        load(name="gsm8k", path=write_jsonl(tmp_path / "b.jsonl", sums(0, 30)))


@pytest.mark.skipif(not GSM8K.exists(), reason=f"no GSM8K at {GSM8K}")
def test_gsm8k_whole() -> None:
    task = load(name="gsm8k", path=str(GSM8K))
    assert (len(task.train), len(task.test)) == (7473, 1319)
    assert not prompts(task.train) & prompts(task.test)
    assert all(problem.answer.lstrip("-").replace(".", "").isdigit() for problem in task.train)


# Imports


def test_tasks_import_nothing_heavy() -> None:
    code = (
        "import sys, qerl.tasks, qerl.tasks.worker, qerl.tasks.pool, qerl.tasks.rewards\n"
        "import qerl.tasks.prompts\n"
        "heavy = ('torch', 'transformers', 'datasets', 'reasoning_gym', 'math_verify', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


def test_the_registry_is_what_the_manual_lists() -> None:
    manual = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
    assert all(f"`{name}" in manual for name in TASKS)
    assert set(TASKS) == {*DATASETS, "reasoning-gym", "dataset"}
