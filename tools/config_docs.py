"""Write docs/configuration.md from `qerl/config.py` and the tables of names; a test holds the two together.

python tools/config_docs.py
"""

from pathlib import Path

from qerl.settings.cli_help import flag_name, show_default
from qerl.settings.fields import ALIASES, FieldSpec, fields, sections
from qerl.settings.foreign import EXPLAINED, RENAMED, VALUES

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"

_HEAD = """\
# Configuration

*Generated from `qerl/config.py` by `python tools/config_docs.py`; do not edit.*

A run is determined by one frozen, typed config. Values come from four layers, the later over the earlier:

1. the defaults below, which are the recipe of the QeRL paper ([arXiv 2510.11696](https://arxiv.org/abs/2510.11696));
2. a preset, when `--model` names one: `configs/NAME.toml`;
3. a settings file: `--config FILE.toml`;
4. flags.

The result is written to `RUN/config.json`. `--dry-run` prints the plan it leads to and stops.

<!-- test: dry -->
```bash
qerl train --model quickstart
qerl train --model qwen2.5-7b --task gsm8k --learning-rate 2e-5 --dry-run
qerl train --model qwen2.5-7b --config mine.toml --no-skip-zero-advantage
```

```toml
# mine.toml: any subset of the settings. Sections are tables; a name that is unique needs none.
max_steps = 200

[task]
name = "reasoning-gym/products"
params = { min_terms = 2, max_terms = 2 }

[rollout]
num_generations = 16
```

How names and values are written:

- `--section.name VALUE`, or `--name VALUE` where the name is unique; `--name=VALUE` too. Hyphens and underscores are
  the same.
- Switches: `--name`, `--no-name`, `--name false`.
- Lists: `--lora-target-modules q_proj,v_proj`.
- Tables: `--task.params '{"min_terms": 2}'` (JSON), `--task.params '{min_terms = 2}'` (TOML), or one entry at a time:
  `--task.params.min_terms 2`.
- `none` unsets a number or switch that has no default.
- A task named by a higher layer starts the `task` section afresh: a preset's parameters belong to its own task.
- Anything wrong is one line on stderr and exit code 2, before anything expensive starts.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for section, about in {"": "The model and the run.", **sections()}.items():
        members = [field for field in fields().values() if field.section == section]
        title = f"## `{section}`: {about}" if section else f"## {about}"
        parts.append("\n".join([title, "", *_table(members)]) + "\n")
    parts.append(_aliases())
    parts.append(_foreign())
    return "\n".join(parts)


def _table(members: list[FieldSpec]) -> list[str]:
    rows = ["| flag | values | default | what it does |", "|---|---|---|---|"]
    for field in members:
        default = f"`{show_default(field)}`" if show_default(field) else ""
        rows.append(
            f"| `{flag_name(field)}` | {_cell(field.allowed)} | {default} | {_cell(field.help)} |"
        )
    return rows


def _aliases() -> str:
    rows = [f"| `{alias}` | `{path}` |" for alias, path in ALIASES.items()]
    rows += [
        "| `quant = qlora`, `quant = lora` | `quant = nf4`, `quant = bf16` |",
        "| `scale_rewards = true`, `= false` | `scale_rewards = group`, `= none` |",
        "| `dtype = bf16`, `= fp32` | `dtype = bfloat16`, `= float32` |",
    ]
    return "\n".join(["## Accepted as they are", "", "| also | means |", "|---|---|", *rows]) + "\n"


def _foreign() -> str:
    renamed: dict[str, list[str]] = {}
    for name, path in RENAMED.items():
        renamed.setdefault(path, []).append(f"`{name}`")
    lines = [
        "## If you come from TRL, Unsloth or verl",
        "",
        "These names are not accepted, since they count or mean something a little different; the error says the same.",
        "",
        "| here | there |",
        "|---|---|",
        *(f"| `{path}` | {', '.join(names)} |" for path, names in renamed.items()),
        "",
        "| there | what to do |",
        "|---|---|",
        *(f"| `{name}` | {_cell(text)} |" for name, text in EXPLAINED.items()),
        *(
            f"| `{path.rpartition('.')[2]} = {value}` | {_cell(text)} |"
            for (path, value), text in VALUES.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
