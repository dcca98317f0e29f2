"""Prompt tokens: templates, system prompts, lengths, and what each case tells the user."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl.config import PromptConfig
from qerl.errors import UserError
from qerl.model.source import resolve_model
from qerl.tasks.prompts import EncodedProblems, encode_problems
from qerl.types import Problem

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model("tiny").folder)


@pytest.fixture
def plain_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same, as a base model has it: without a chat template."""
    plain = AutoTokenizer.from_pretrained(resolve_model("tiny").folder)
    plain.chat_template = None
    return plain


def encode(
    tokenizer: PreTrainedTokenizerBase,
    *prompts: str | list,
    system: str | None = None,
    longest: int = 512,
    **settings: object,
) -> EncodedProblems:
    problems = [Problem(f"p{i}", prompt, "1", {}) for i, prompt in enumerate(prompts)]
    return encode_problems(problems, tokenizer, PromptConfig(**settings), system, longest)


def text_of(tokenizer: PreTrainedTokenizerBase, encoded: EncodedProblems, index: int = 0) -> str:
    return tokenizer.decode(encoded.prompt_ids[index])


def test_a_string_is_wrapped_as_one_user_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode(tokenizer, "hi", MESSAGES)
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(tokenizer, encoded, 0) == text_of(tokenizer, encoded, 1) == turn
    assert all(type(token) is int for ids in encoded.prompt_ids for token in ids)
    assert encoded.conversational == (False, True)
    assert "one user turn" in encoded.notes[0]
    assert encode(tokenizer, MESSAGES).notes == ()


def test_the_tokens_are_the_tokenizers_own(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    expected = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert list(encode(tokenizer, MESSAGES, system="Be brief.").prompt_ids[0]) == expected


def test_the_system_prompt_goes_first_unless_there_is_one(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    own = [{"role": "system", "content": "mine"}, *MESSAGES]
    encoded = encode(tokenizer, "hi", own, system="yours")
    assert text_of(tokenizer, encoded, 0).startswith("<|im_start|>system\nyours<|im_end|>")
    assert "yours" not in text_of(tokenizer, encoded, 1) and "mine" in text_of(
        tokenizer, encoded, 1
    )
    assert encoded.problems[1].prompt == own


def test_plain_text(
    tokenizer: PreTrainedTokenizerBase, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    encoded = encode(tokenizer, "2 + 2 =", chat_template="none", prompt_template="Q: {prompt} {x}")
    assert text_of(tokenizer, encoded) == "Q: 2 + 2 = {x}"
    assert encoded.notes == ('prompts are sent as plain text: chat_template is "none"',)
    encoded = encode(plain_tokenizer, "2 + 2 =", system="of the task")
    assert text_of(tokenizer, encoded) == "2 + 2 ="
    assert (
        "no chat template" in encoded.notes[0] and "system prompt is not sent" in encoded.notes[1]
    )


def test_a_template_file_replaces_the_tokenizers(
    tmp_path: Path, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{{ mood }}>")
    settings = {"chat_template": str(file), "chat_template_kwargs": {"mood": "calm"}}
    encoded = encode(plain_tokenizer, "hi", **settings)
    assert text_of(plain_tokenizer, encoded) == "[user] hi calm>"


def test_long_prompts_are_dropped_never_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode(tokenizer, "a" * 10, "b" * 90, "c" * 20, longest=60)
    assert [problem.id for problem in encoded.problems] == ["p0", "p2"]
    assert encoded.num_dropped == 1 and len(encoded.prompt_ids) == len(encoded.conversational) == 2
    assert "1 of 3 problems dropped: prompt longer than 60 tokens" in encoded.notes
    shortest = len(encoded.prompt_ids[0])
    with pytest.raises(UserError, match=f"all 2 prompts.*=5; the shortest has {shortest} tokens"):
        encode(tokenizer, "b" * 90, "a" * 10, longest=5)
    assert encode(tokenizer, "a" * 10, longest=shortest).num_dropped == 0


def test_nothing_to_encode_is_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode(tokenizer).problems == ()
    assert encode(tokenizer, chat_template="none").prompt_ids == ()


def test_mistakes_are_explained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, plain_tokenizer: PreTrainedTokenizerBase
) -> None:
    refuses = tmp_path / "refuses.jinja"
    refuses.write_text("{{ raise_exception('roles must alternate') }}")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    cases = [
        (tokenizer, {"chat_template": "none.jinja"}, "cannot be read"),
        (tokenizer, {"chat_template": str(refuses)}, "roles must alternate"),
        (tokenizer, {"chat_template": str(broken)}, "does not take these prompts"),
        (tokenizer, {"chat_template": "none"}, "prompts are messages"),
        (plain_tokenizer, {}, "prompts are messages, but the tokenizer has no chat template"),
    ]
    for which, settings, message in cases:
        with pytest.raises(UserError, match=message):
            encode(which, MESSAGES, **settings)
    with pytest.raises(UserError, match="put its text into prompt_template"):
        encode(plain_tokenizer, "hi", system="s", system_prompt="s")


def test_problems_come_back_as_they_went_in(tokenizer: PreTrainedTokenizerBase) -> None:
    problem = Problem("p", "hi", "2", {"level": 1})
    encoded = encode_problems([problem], tokenizer, PromptConfig(), "s", 100)
    assert encoded.problems == (problem,)
