"""From problems to prompt tokens.

A model that has a chat template was trained on nothing else, so a string prompt is wrapped as one user turn, and that
is said. Prompts that are too long are dropped and counted, never cut: a cut question has another answer.

What the data held decides what reward functions see: strings give string completions, messages give message lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from qerl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qerl.config import PromptConfig
    from qerl.tasks.shots import Shot
    from qerl.types import Message, Problem

PLACE = "{prompt}"


@dataclass(frozen=True)
class EncodedProblems:
    """Problems that fit, in the order given; all tuples have one entry a problem."""

    problems: tuple[Problem, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    conversational: tuple[bool, ...]
    """True where the data's prompt is a list of messages."""
    num_dropped: int
    """Problems whose prompt was too long."""
    notes: tuple[str, ...]
    """Lines to show at the start of a run."""


def encode_problems(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    config: PromptConfig,
    system_prompt: str | None,
    max_prompt_length: int,
    shots: Sequence[Shot] = (),
) -> EncodedProblems:
    """Tokens of every prompt, ending where the assistant's turn begins.

    `system_prompt` is put before each conversation that has none, `shots` before each problem. Raises UserError for a template that is missing or
    does not fit, and when no prompt fits into `max_prompt_length` tokens.
    """
    template = _chat_template(tokenizer, config.chat_template)
    conversational = tuple(not isinstance(problem.prompt, str) for problem in problems)
    if template is None:
        notes = _check_plain(conversational, config, system_prompt)
        examples = "".join(f"{_fill(config, shot.prompt)}\n{shot.answer}\n\n" for shot in shots)
        texts = [examples + _fill(config, str(problem.prompt)) for problem in problems]
        encoded = tokenizer(texts)["input_ids"] if texts else []
    else:
        conversations = [
            _conversation(problem, config, system_prompt, shots) for problem in problems
        ]
        kwargs = _template_arguments(template, config)
        encoded = _apply(tokenizer, template, conversations, kwargs)
        notes = _describe_chat(conversational, config)
    kept = [index for index, ids in enumerate(encoded) if len(ids) <= max_prompt_length]
    num_dropped = len(problems) - len(kept)
    if problems and not kept:
        shortest = min(map(len, encoded))
        raise UserError(
            f"all {len(problems)} prompts are longer than max_prompt_length={max_prompt_length}; "
            f"the shortest has {shortest} tokens"
        )
    if num_dropped:
        notes.append(
            f"{num_dropped} of {len(problems)} problems dropped: prompt longer than {max_prompt_length} tokens"
        )
    return EncodedProblems(
        tuple(problems[index] for index in kept),
        tuple(tuple(encoded[index]) for index in kept),
        tuple(conversational[index] for index in kept),
        num_dropped,
        tuple(notes),
    )


def _chat_template(tokenizer: PreTrainedTokenizerBase, choice: str | None) -> str | None:
    """Jinja text of the template to use, or None to send plain text."""
    if choice == "none" or (choice is None and tokenizer.chat_template is None):
        return None
    if choice is None:
        return tokenizer.get_chat_template()
    try:
        return Path(choice).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f'chat_template {choice!r} cannot be read ({error}); give a Jinja file, or "none"'
        ) from error


def _check_plain(
    conversational: Sequence[bool], config: PromptConfig, system_prompt: str | None
) -> list[str]:
    """Notes on sending plain text; UserError for what plain text cannot carry."""
    why = (
        'chat_template is "none"'
        if config.chat_template == "none"
        else "the tokenizer has no chat template"
    )
    if any(conversational):
        raise UserError(
            f"the data's prompts are messages, but {why}; give chat_template a Jinja file"
        )
    if config.enable_thinking is not None:
        raise UserError(f"enable_thinking is the chat template's, and {why}")
    if config.system_prompt:
        raise UserError(f"system_prompt cannot be sent: {why}; put its text into prompt_template")
    notes = [f"prompts are sent as plain text: {why}"]
    if system_prompt:
        notes.append("the task's system prompt is not sent; prompt_template can carry instructions")
    return notes


def _conversation(
    problem: Problem,
    config: PromptConfig,
    system_prompt: str | None,
    shots: Sequence[Shot],
) -> list[Message]:
    """System message, examples as turns of their own, the problem."""
    if isinstance(problem.prompt, str):
        messages = [{"role": "user", "content": _fill(config, problem.prompt)}]
    else:
        messages = problem.prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if messages[0]["role"] == "system":
        system, messages = messages[:1], messages[1:]
    turns = [
        {"role": role, "content": text}
        for shot in shots
        for role, text in (("user", _fill(config, shot.prompt)), ("assistant", shot.answer))
    ]
    return [*system, *turns, *messages]


def _fill(config: PromptConfig, prompt: str) -> str:
    return config.prompt_template.replace(PLACE, prompt)


def _template_arguments(template: str, config: PromptConfig) -> dict[str, Any]:
    """What the chat template is given. UserError for a thinking switch that the template does not have."""
    kwargs = dict(config.chat_template_kwargs)
    if config.enable_thinking is None:
        return kwargs
    if "enable_thinking" not in template:
        raise UserError(
            "prompt.enable_thinking: this model's chat template has no such switch; leave it out"
        )
    if kwargs.setdefault("enable_thinking", config.enable_thinking) != config.enable_thinking:
        raise UserError(
            "prompt.enable_thinking and chat_template_kwargs say different things; give one of them"
        )
    return kwargs


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    conversations: list[list[Message]],
    kwargs: dict[str, Any],
) -> list[list[int]]:
    if not conversations:
        return []
    try:
        encoded = tokenizer.apply_chat_template(
            conversations,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **kwargs,
        )
        return cast(list[list[int]], encoded)
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"the chat template does not take these prompts: {error}") from error


def _describe_chat(conversational: Sequence[bool], config: PromptConfig) -> list[str]:
    notes = []
    if not all(conversational):
        notes.append(
            'string prompts are wrapped as one user turn (chat_template "none" sends them as they are)'
        )
    if any(conversational) and config.prompt_template != PLACE:
        notes.append(
            "prompt_template is for string prompts; prompts that are messages go without it"
        )
    return notes
