"""Data sets by name, on local files that have the columns of the real ones; answer formats; rows by filter and level.

The layouts are those of the data sets' cards on the Hugging Face hub, listed in qerl/tasks/catalog.py.
"""

import json
from pathlib import Path

import pytest

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import Task, load_task
from qerl.tasks.answers import ANSWER_FORMATS, format_asked_for, gold_answer, is_right
from qerl.tasks.shots import demonstrate

DAPO_ASKS = "Work through this problem. End with a line of the form Answer: $Answer, where $Answer is the result.\n\n"


def load(**settings: object) -> Task:
    return load_task(TaskConfig(**settings))


def write(folder: Path, **splits: list[dict]) -> str:
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def math_row(i: int) -> dict:
    return {
        "problem": f"What is ${i} + 1$?",
        "level": f"Level {i % 5 + 1}",
        "type": "Algebra",
        "solution": rf"Adding gives \boxed{{{i + 1}}}.",
    }


def math_500_row(i: int) -> dict:
    return {
        "problem": f"Problem {i}",
        "solution": rf"... \boxed{{{i}}}",
        "answer": str(i),
        "subject": "Algebra",
        "level": i % 5 + 1,
        "unique_id": f"test/algebra/{i}.json",
    }


def dapo_processed_row(i: int) -> dict:
    messages = [{"content": f"{DAPO_ASKS}Problem {i}", "role": "user"}]
    return {
        "prompt": f"Problem {i}",
        "solution": str(i),
        "data_source": "math_dapo",
        "source_prompt": messages,
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"index-{i}"},
    }


def dapo_original_row(i: int) -> dict:
    row = dapo_processed_row(i)
    return {
        **{name: row[name] for name in ("data_source", "ability", "reward_model", "extra_info")},
        "prompt": row["source_prompt"],
    }


def test_math_has_levels_and_reads_the_solution(tmp_path: Path) -> None:
    path = write(
        tmp_path, train=[*map(math_row, range(60))], test=[*map(math_row, range(100, 110))]
    )
    task = load(name="math", path=path, levels=(3, 4))
    assert len(task.train) == 24 and len(task.test) == 4
    assert {p.columns["level"] for p in (*task.train, *task.test)} == {"Level 3", "Level 4"}
    assert all(p.prompt == f"What is ${int(p.answer) - 1} + 1$?" for p in task.train)
    assert task.reward_funcs == ("boxed",) and r"\boxed" in task.system_prompt
    assert "train: 24 of 60 rows kept by filter and levels" in task.notes


def test_a_few_solutions_without_an_answer_are_dropped_and_many_are_other_data(
    tmp_path: Path,
) -> None:
    rows = [*map(math_row, range(100))]
    rows[7]["solution"] = "It is obvious."
    task = load(name="math", path=write(tmp_path, train=rows))
    assert any("1 rows dropped: their answer has no" in note for note in task.notes)
    for row in rows[:50]:
        row["solution"] = "It is obvious."
    with pytest.raises(UserError, match=r"train-0: the answer has no .*for other data"):
        load(name="math", path=write(tmp_path, train=rows))


def test_big_math_in_both_layouts(tmp_path: Path) -> None:
    rest = [
        {"source": ["olympiads", "cn_k12"][i % 2], "domain": ["Algebra"], "rate": i / 40}
        for i in range(40)
    ]
    names = {"rate": "llama8b_solve_rate"}
    rest = [{names.get(key, key): value for key, value in row.items()} for row in rest]
    original = [{"problem": f"P{i}", "answer": str(i), **row} for i, row in enumerate(rest)]
    processed = [{"prompt": f"P{i}", "solution": str(i), **row} for i, row in enumerate(rest)]
    tasks = [
        load(
            name="big-math",
            path=write(tmp_path, train=[*rows, rows[3]]),
            filter={"llama8b_solve_rate": {"min": 0.25}, "source": ["olympiads"]},
        )
        for rows in (original, processed)
    ]
    answers = [sorted(p.answer for p in (*task.train, *task.test)) for task in tasks]
    assert answers[0] == answers[1] == sorted(str(i) for i in range(10, 40, 2))
    everything = load(name="big-math", path=write(tmp_path, train=[*original, original[3]]))
    assert any("1 rows dropped: their prompt is there already" in n for n in everything.notes)


def test_levels_of_big_math_choose_a_configuration_of_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[TaskConfig] = []

    def read(path: str, config: TaskConfig) -> dict:
        seen.append(config)
        return {"train": [{"prompt": f"P{i}", "solution": str(i)} for i in range(30)]}

    monkeypatch.setattr("qerl.tasks.data.read_splits", read)
    load(name="big-math", levels=(5, 3, 4))
    load(name="big-math")
    assert [config.config for config in seen] == ["level_3_4_5", "all"]


def test_dapo_asks_for_what_its_prompts_ask_for(tmp_path: Path) -> None:
    rows = [*map(dapo_processed_row, range(30))]
    processed = load(name="dapo-math-17k", path=write(tmp_path, train=rows))
    assert processed.reward_funcs == ("boxed",) and r"\boxed" in processed.system_prompt
    rows = [dapo_original_row(i % 30) for i in range(90)]
    original = load(name="dapo-math-17k", path=write(tmp_path, train=rows))
    assert len(original.train) + len(original.test) == 30
    assert original.reward_funcs == ("answer_line",) and original.system_prompt is None
    assert {p.answer for p in original.train} <= {str(i) for i in range(30)}
    chosen = load(name="dapo-math-17k", path=str(tmp_path), answer_format="boxed")
    assert chosen.reward_funcs == ("boxed",) and r"\boxed" in chosen.system_prompt


EVALUATION = {
    "math-500": math_500_row,
    "aime24": lambda i: {
        "id": i,
        "problem": f"Problem {i}",
        "solution": f"... {i}",
        "answer": f"{i:03}",
        "url": "https://example.org",
        "year": "2024",
    },
    "aime25": lambda i: {"problem": f"Problem {i}", "answer": str(i), "id": str(i)},
    "amc23": lambda i: {
        "id": i,
        "question": f"Problem {i}",
        "answer": float(i),
        "url": "https://example.org",
    },
}


@pytest.mark.parametrize("name", EVALUATION)
@pytest.mark.parametrize("split", ["train", "test"])
def test_evaluation_sets_have_nothing_to_train_on(tmp_path: Path, name: str, split: str) -> None:
    task = load(name=name, path=write(tmp_path, **{split: [*map(EVALUATION[name], range(12))]}))
    assert task.train == () and len(task.test) == 12
    assert task.reward_funcs == ("boxed",) and r"\boxed" in task.system_prompt
    problem = next(p for p in task.test if p.prompt == "Problem 7")
    assert is_right("boxed", r"so \boxed{7}", problem.answer)
    with pytest.raises(UserError, match="evaluation only"):
        load(name=name, path=str(tmp_path), train_size=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filter": {"lvel": 3}}, "no column 'lvel'.*level"),
        ({"filter": {"level": "Level 9"}}, "leaves no row.*Level 1, Level 2"),
        ({"filter": {"level": {"min": 2}}}, "no number"),
        ({"filter": {"level": {"least": 2}}}, "min and max"),
        ({"filter": {"level": {"min": "2"}}}, "numbers min and max"),
        ({"levels": (9,)}, "leaves no row"),
        ({"weights": {"a": 1.0}}, "task.weights means nothing"),
        ({"test_split": "dev"}, "no split 'dev'"),
    ],
)
def test_wrong_choices_of_rows_are_explained(tmp_path: Path, settings: dict, message: str) -> None:
    path = write(tmp_path, train=[*map(math_row, range(20))], test=[*map(math_row, range(20, 30))])
    with pytest.raises(UserError, match=message):
        load(name="math", path=path, **settings)


def test_levels_need_a_column_level(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(20)]
    with pytest.raises(UserError, match=r"no column 'level'.*question, answer"):
        load(path=write(tmp_path, train=rows), levels=(3,))


# Answer formats

RIGHT = {
    "boxed": [r"thus \boxed{18}", r"\boxed{1} no: $\boxed{18.0}$", r"\fbox{18}"],
    "hashes": ["so\n#### 18", "#### 17\n#### 18\nThat is all.", "#### $18"],
    "tags": ["<answer>18</answer>", "<answer>1</answer> <answer>\n18 </answer>"],
    "answer_line": ["so\nAnswer: 18", "**Answer:** 18", "Answer: $18$", "answer: 1\nAnswer: 18"],
    "last_number": ["it is 18.", "$18", "1 2 18"],
    "exact": ["18", " 18\n"],
}
WRONG = {
    "boxed": ["18", r"\boxed{}", r"\boxed{18", r"\boxed{18} no: \boxed{19}", ""],
    "hashes": ["18", "####", "### 18", "#### 18\n#### 19", ""],
    "tags": ["18", "<answer></answer>", "<answer>18", "<answer>19</answer>", ""],
    "answer_line": ["18", "Answer:", "The answer: is 18", "Answer: 18\nAnswer: 19", ""],
    "last_number": ["18 19", "eighteen", ""],
    "exact": ["it is 18", "18.0", ""],
}


@pytest.mark.parametrize("name", ANSWER_FORMATS)
def test_an_answer_counts_only_where_the_format_says(name: str) -> None:
    assert [text for text in RIGHT[name] if not is_right(name, text, "18")] == []
    assert [text for text in WRONG[name] if is_right(name, text, "18")] == []


@pytest.mark.parametrize("name", ANSWER_FORMATS)
@pytest.mark.parametrize("answer", ["18", "1,234", "-3.5", "0"])
def test_what_a_format_writes_it_finds_again(name: str, answer: str) -> None:
    form = ANSWER_FORMATS[name]
    assert is_right(name, form.write(answer), answer)
    if form.mark is not None:
        assert form.mark in form.write(answer) and form.mark in form.instruction


def test_texts_and_expressions_are_compared_too() -> None:
    assert is_right("tags", "<answer>Paris</answer>", "Paris")
    assert is_right("boxed", r"\boxed{\frac{1}{2}}", "0.5")
    assert not is_right("tags", "<answer>Rome</answer>", "Paris")


def test_gold_answers_are_read_where_the_data_have_the_mark() -> None:
    assert gold_answer("work\n#### 1,018", "hashes") == "1,018"
    assert gold_answer(r"so \boxed{\frac12}", "boxed") == r"\frac12"
    assert gold_answer(" 18 ", "boxed") == "18"
    assert gold_answer("work\n#### 18", None) == "work\n#### 18"


def test_the_form_that_prompts_ask_for_is_seen() -> None:
    asks = ["Put it in \\boxed{}."] * 9
    assert format_asked_for([*asks, "Hello"]) == "boxed"
    assert format_asked_for([*asks, "Hello", "Hello"]) is None
    assert format_asked_for([]) is None


@pytest.mark.parametrize("name", [name for name in ANSWER_FORMATS if name != "exact"])
def test_a_file_with_an_answer_format(tmp_path: Path, name: str) -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": i + 1} for i in range(30)]
    task = load(path=write(tmp_path, train=rows), answer_format=name)
    assert task.reward_funcs == (name,) and task.answer_format == name
    assert task.system_prompt == ANSWER_FORMATS[name].instruction
    assert all(is_right(name, demonstrate(p, name), p.answer) for p in task.train)


# Several generated families


def test_families_are_mixed_in_proportion() -> None:
    task = load(
        name="reasoning-gym/chain_sum+products",
        weights={"chain_sum": 3},
        params={"products": {"max_digits": 3}},
        train_size=80,
        test_size=20,
    )
    families = [problem.columns["family"] for problem in task.train]
    assert (families.count("chain_sum"), families.count("products")) == (60, 20)
    assert not {p.prompt for p in task.train} & {p.prompt for p in task.test}
    assert {p.columns["params"].get("max_digits") for p in task.train} == {None, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params": {"max_terms": 3}}, "'max_terms' is no family"),
        ({"weights": {"chain": 1.0}}, "'chain' is no family"),
        ({"weights": {"products": 0.0}}, "above 0"),
        ({"params": {"products": 3}}, "takes a table"),
        ({"name": "reasoning-gym/chain_sum", "weights": {"chain_sum": 1.0}}, "several families"),
        ({"name": "reasoning-gym/chain_sum+chain_sum"}, "twice"),
        ({"name": "reasoning-gym/chain_sum+chainsum"}, "no reasoning-gym family 'chainsum'"),
        ({"name": "reasoning-gym/chain_sum+"}, "no reasoning-gym family ''"),
        ({"levels": (1,)}, "task.levels means nothing"),
    ],
)
def test_wrong_mixes_are_explained(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(**{"name": "reasoning-gym/chain_sum+products", "train_size": 8, **settings})
