"""What --help prints: the settings grouped by section, with defaults, ranges and examples."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qerl.settings.fields import FieldSpec, fields, sections, unique_leaves
from qerl.settings.presets import preset_names, preset_summary

if TYPE_CHECKING:
    from qerl.settings.cli import ExtraFlag

_RULES = """\
Precedence: defaults < preset < --config FILE.toml < flags. Hyphens and underscores are the same. A setting whose
last part is unique needs no section: --temperature 0.7 is --rollout.temperature 0.7. Switches are --NAME or
--no-NAME; lists have commas between; tables are JSON or TOML: --task.params '{min_terms = 2}'."""


def help_text(
    prog: str, description: str, extra_flags: "Sequence[ExtraFlag]", examples: Sequence[str]
) -> str:
    """The whole help page."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    positionals = [flag.written for flag in extra_flags if flag.positional]
    words = positionals or ["--model NAME"]
    blocks = [
        " ".join(["usage:", prog, *words, "[--config FILE.toml] [--SETTING VALUE ...]"]),
        textwrap.fill(description, width),
        "\n".join(
            ["Examples:", *(f"  {example}" for example in examples or _examples(prog, positionals))]
        ),
        "\n".join(
            [
                "Presets (--model NAME):",
                *_rows([(name, preset_summary(name)) for name in preset_names()], width),
            ]
        ),
        "How settings are written:\n"
        + textwrap.indent(textwrap.fill(" ".join(_RULES.split()), width - 2), "  "),
        "\n".join(
            ["Flags:", *_rows([(_extra_label(flag), flag.help) for flag in extra_flags], width)]
        ),
    ]
    for section, about in {"": "The model and the run.", **sections()}.items():
        rows = [
            (_label(field), _describe(field))
            for field in fields().values()
            if field.section == section
        ]
        blocks.append("\n".join([f"{section}: {about}" if section else about, *_rows(rows, width)]))
    return "\n\n".join(blocks) + "\n"


_VAGUE_LEAVES = {"name", "path", "config", "revision", "params", "mode", "scope", "schedule"}
"""Shown with their section, since alone they do not say what of."""


def flag_name(field: FieldSpec) -> str:
    """The flag that sets a field, as short as it is clear."""
    if field.path == "task.name":
        return "--task"
    short = field.leaf if unique_leaves().get(field.leaf) == field.path else field.path
    short = field.path if field.leaf in _VAGUE_LEAVES else short
    return "--" + short.replace("_", "-")


def show_default(field: FieldSpec) -> str:
    """The default as it would be written, or an empty string where there is none to show."""
    match field.default:
        case None | "" | [] | ():
            return ""
        case bool():
            return str(field.default).lower()
        case list() | tuple():
            return ",".join(str(item) for item in field.default)
        case dict():
            return "" if not field.default else str(field.default)
        case float():
            return f"{field.default:g}"
    return str(field.default)


_SAMPLE_WORDS = {"RUN": "runs/my-run", "PROMPT": '"What is 3 + 4?"'}


def _examples(prog: str, positionals: Sequence[str]) -> list[str]:
    if positionals:
        words = [_SAMPLE_WORDS.get(name, name) for name in positionals]
        without_run = [word for word in words if word != _SAMPLE_WORDS["RUN"]]
        return [
            " ".join([prog, *words]),
            " ".join([prog, *words, "--temperature 0.7 --seed 1"]),
            " ".join([prog, "--model quickstart", *without_run]),
        ]
    return [
        f"{prog} --model quickstart",
        f"{prog} --model qwen2.5-7b --quant qlora --learning-rate 2e-5 --dry-run",
        f"{prog} --model Qwen/Qwen3-4B --task reasoning-gym/chain_sum --reward-funcs my_rewards.py:brevity",
    ]


def _label(field: FieldSpec) -> str:
    word = {
        "choice": "NAME",
        "integer": "INT",
        "number": "NUMBER",
        "text": "TEXT",
        "list": "A,B,...",
        "table": "TABLE",
    }
    return f"{flag_name(field)} {word.get(field.kind, '')}".rstrip()


def _extra_label(flag: "ExtraFlag") -> str:
    return f"{flag.written} VALUE" if flag.takes_value else flag.written


def _describe(field: FieldSpec) -> str:
    notes = [field.help]
    if field.choices:
        notes.append(f"Choices: {', '.join(field.choices)}.")
    elif ", " in field.allowed and field.kind in ("integer", "number"):
        notes.append(f"({field.allowed.partition(', ')[2]})")
    if show_default(field):
        notes.append(f"[{show_default(field)}]")
    return " ".join(notes)


def _rows(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    column = 34
    lines = []
    for label, text in rows:
        wrapped = textwrap.wrap(text, max(width - column, 20)) or [""]
        if len(label) > column - 4:
            lines.append(f"  {label}")
        else:
            lines.append(f"  {label:<{column - 2}}{wrapped.pop(0)}")
        lines += [" " * column + line for line in wrapped]
    return lines
