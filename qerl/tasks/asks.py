r"""What a reward looks for in a completion, and whether the prompts ask for it.

A format reward whose tags no prompt mentions gives 0 for ever, and nothing says why. The built-in rewards know their
mark; for a user's function it is taken from the texts in its source: tags such as <think>, `####`, \boxed.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from qerl.tasks.answers import ANSWER_FORMATS
from qerl.tasks.calls import RewardSpec

# Not the name of a regular expression's group, (?P<name>.
_TAG = re.compile(r"(?<!\?P)<(?P<name>[A-Za-z_][\w-]*)>")


def marks_of_builtin(name: str) -> tuple[str, ...]:
    """What a built-in reward looks for."""
    if name == "boxed_format":
        name = "boxed"
    form = ANSWER_FORMATS.get(name)
    return (form.mark,) if form is not None and form.mark is not None else ()


def marks_of_source(tree: ast.Module, function: str) -> tuple[str, ...]:
    """What a function of a file looks for: marks in its own texts and in those assigned to the file's names it uses."""
    body = next(
        (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        ),
        None,
    )
    if body is None:
        return ()
    used = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    nodes: list[ast.AST] = list(body.body)
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id in used for target in targets):
            nodes.append(node)
    texts = [
        part.value
        for node in nodes
        if not _is_docstring(node)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return _marks(texts)


def marks_of_callable(function: Callable[..., Any]) -> tuple[str, ...]:
    """The same for a function of a notebook; nothing where its source cannot be had."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ()
    return marks_of_source(tree, function.__name__) if inspect.isfunction(function) else ()


def notes_on_marks(rewards: Sequence[RewardSpec], prompts: Sequence[str]) -> list[str]:
    """A warning for each reward that looks for what not one of the prompts, as the model sees them, mentions."""
    notes = []
    for spec in rewards:
        missing = [mark for mark in spec.marks if not any(mark in prompt for prompt in prompts)]
        if missing and prompts:
            notes.append(
                f"warning: reward {spec.name} looks for {', '.join(missing)}, which no prompt mentions; say so in "
                "system_prompt or prompt_template, or it may stay 0 for ever"
            )
    return notes


def _marks(texts: Iterable[str]) -> tuple[str, ...]:
    marks: dict[str, None] = {}
    for text in texts:
        marks.update({f"<{match['name']}>": None for match in _TAG.finditer(text)})
        if "####" in text:
            marks["####"] = None
        if "boxed" in text:
            marks["\\boxed"] = None
    return tuple(marks)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
