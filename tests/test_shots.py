"""Few-shot prompts and the thinking switch."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl.config import PromptConfig, TaskConfig
from qerl.errors import UserError
from qerl.model.source import resolve_model
from qerl.tasks import Task, load_task
from qerl.tasks.prompts import encode_problems
from qerl.tasks.shots import Shot, demonstrate, take_shots
from qerl.types import Problem

SHOTS = (Shot("1 + 1?", "#### 2"), Shot("1 + 2?", "#### 3"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("tiny").folder)


def sums(folder: Path, **settings: object) -> Task:
    rows = [
        {
            "question": f"What is {i} + 1?",
            "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}",
        }
        for i in range(40)
    ]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(TaskConfig(name="gsm8k", path=str(path), **settings))


def test_examples_come_from_training_and_leave_it(tmp_path: Path) -> None:
    whole = sums(tmp_path)
    rest, shots = take_shots(whole, 3)
    shown = {shot.prompt for shot in shots}
    assert len(shown) == 3 and shown <= {p.prompt for p in whole.train}
    assert not shown & {p.prompt for p in (*rest.train, *rest.test)}
    assert len(rest.train) == len(whole.train) - 3 and rest.test == whole.test
    assert "3 training problems are examples and not trained on" in rest.notes
    assert take_shots(whole, 3)[1] == shots and take_shots(whole, 0) == (whole, ())
    more = take_shots(whole, 5)[1]
    assert more[:3] == shots


def test_too_few_examples_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"num_shots=100: gsm8k has .* training split only"):
        take_shots(sums(tmp_path), 100)


def test_an_example_is_what_the_reward_wants(tmp_path: Path) -> None:
    _, (shot,) = take_shots(sums(tmp_path, answer_format="hashes"), 1)
    number = int(shot.prompt.split()[2]) + 1
    assert shot.answer == f"{number - 1} + 1 = {number}\n#### {number}"
    _, (shot,) = take_shots(sums(tmp_path, answer_format="boxed"), 1)
    assert shot.answer == rf"\boxed{{{number}}}"
    problem = Problem("p", "q", "18", {"solution": "We take 17."})
    assert demonstrate(problem, "last_number") == "18"
    assert demonstrate(problem, None) == "We take 17."


def test_examples_are_turns_before_the_problem(tokenizer: PreTrainedTokenizerBase) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "9 + 9?"}]
    problems = [Problem("a", "9 + 9?", "18"), Problem("b", own, "18")]
    config = PromptConfig(prompt_template="Q: {prompt}")
    encoded = encode_problems(problems, tokenizer, config, "yours", 999, SHOTS)
    turns = "".join(
        f"<|im_start|>user\nQ: {shot.prompt}<|im_end|>\n<|im_start|>assistant\n{shot.answer}<|im_end|>\n"
        for shot in SHOTS
    )
    ask = "<|im_start|>user\n{}9 + 9?<|im_end|>\n<|im_start|>assistant\n"
    texts = [tokenizer.decode(ids) for ids in encoded.prompt_ids]
    assert texts[0] == f"<|im_start|>system\nyours<|im_end|>\n{turns}{ask.format('Q: ')}"
    assert texts[1] == f"<|im_start|>system\nmine<|im_end|>\n{turns}{ask.format('')}"


def test_examples_in_plain_text(tokenizer: PreTrainedTokenizerBase) -> None:
    config = PromptConfig(chat_template="none", prompt_template="Q: {prompt}\nA:")
    encoded = encode_problems([Problem("a", "9 + 9?", "18")], tokenizer, config, None, 999, SHOTS)
    assert tokenizer.decode(encoded.prompt_ids[0]) == (
        "Q: 1 + 1?\nA:\n#### 2\n\nQ: 1 + 2?\nA:\n#### 3\n\nQ: 9 + 9?\nA:"
    )


def test_thinking_is_switched_where_the_template_can(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}[no]{% endif %}>"
    )

    def text(**settings: object) -> str:
        config = PromptConfig(**settings)
        encoded = encode_problems([Problem("a", "hi", None)], tokenizer, config, None, 99)
        return tokenizer.decode(encoded.prompt_ids[0])

    there = {"chat_template": str(template)}
    assert [text(**there, enable_thinking=on) for on in (None, True, False)] == [
        "hi>",
        "hi>",
        "hi[no]>",
    ]
    with pytest.raises(UserError, match="no such switch"):
        text(enable_thinking=False)
    with pytest.raises(UserError, match="different things"):
        text(**there, enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(UserError, match="enable_thinking is the chat template's"):
        text(chat_template="none", enable_thinking=True)
