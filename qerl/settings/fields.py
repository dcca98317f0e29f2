"""The configuration as a flat table of fields, and the rules by which a written name finds its field.

Command line, settings files, `--help`, docs/configuration.md and error messages all read this one table, so they
cannot disagree. It is derived from `Config`'s own JSON schema: types, ranges, choices and docstrings stand there once.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.foreign import explain_name

Kind = Literal["switch", "integer", "number", "text", "choice", "list", "table"]

ALIASES: dict[str, str] = {
    "task": "task.name",
    "num_steps": "train.max_steps",
    "output_dir": "run_dir",
    "dataset_name": "task.path",
}
"""Names of other trainers that mean exactly the same and are simply accepted."""


@dataclass(frozen=True)
class FieldSpec:
    """One setting."""

    path: str
    """Full name, e.g. rollout.num_generations; top-level settings have no dot."""
    kind: Kind
    choices: tuple[str, ...]
    allowed: str
    """What may be written, in words: "an integer, at least 2"."""
    optional: bool
    """None is allowed."""
    required: bool
    default: Any
    help: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def fields() -> dict[str, FieldSpec]:
    """Every field by path, in the order of the config: top level first, then section by section."""
    schema = Config.model_json_schema()
    top, nested = {}, {}
    for name, entry in schema["properties"].items():
        if "$ref" not in entry:
            top[name] = _field_spec(name, entry, schema)
            continue
        section = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        for leaf, leaf_entry in section["properties"].items():
            nested[f"{name}.{leaf}"] = _field_spec(f"{name}.{leaf}", leaf_entry, section)
    return top | nested


@cache
def sections() -> dict[str, str]:
    """Section name -> what it is about, in order."""
    schema = Config.model_json_schema()
    return {
        name: schema["$defs"][entry["$ref"].rpartition("/")[2]]["description"]
        for name, entry in schema["properties"].items()
        if "$ref" in entry
    }


@cache
def unique_leaves() -> dict[str, str]:
    """Leaf -> path, for leaves that name one field only and neither a section nor a top-level field."""
    counts: dict[str, list[str]] = {}
    for field in fields().values():
        counts.setdefault(field.leaf, []).append(field.path)
    return {
        leaf: paths[0]
        for leaf, paths in counts.items()
        if len(paths) == 1 and leaf not in sections()
    }


def find_field(
    name: str, what: str, written: str, reserved: Collection[str] = ()
) -> tuple[FieldSpec, str | None]:
    """The field that `name` means, and the key inside it when the name goes on into a table (task.params.KEY).

    Args:
        name: without dashes in front; hyphens and underscores are the same.
        what: how to call it in messages: "flag" or "key".
        written: how it was written, for messages.
        reserved: flags of the command line that are not settings; a leaf of that name needs its section.

    Raises:
        UserError: no field, or several, have this name; the message explains names of other trainers.
    """
    plain = name.replace("-", "_")
    table, leaves = fields(), unique_leaves()
    path = plain if plain in table else ALIASES.get(plain)
    if path is None and plain in leaves and plain not in reserved:
        path = leaves[plain]
    if path is None and "." in plain:
        # An alias written with the section of the field it stands for.
        section, _, leaf = plain.rpartition(".")
        if ALIASES.get(leaf, "").startswith(f"{section}."):
            path = ALIASES[leaf]
    if path is not None:
        return table[path], None
    for field in table.values():
        if field.kind == "table":
            for prefix in (field.path, field.leaf):
                if plain.startswith(f"{prefix}.") and len(plain) > len(prefix) + 1:
                    return field, plain[len(prefix) + 1 :]
    raise UserError(_unknown(plain, what, written, reserved))


def _unknown(name: str, what: str, written: str, reserved: Collection[str]) -> str:
    table, leaves = fields(), unique_leaves()
    if name in sections():
        members = ", ".join(field.path for field in table.values() if field.section == name)
        return f"{written} is a section and needs one of its settings: {members}"
    leaf = name.rpartition(".")[2]
    same_leaf = [field.path for field in table.values() if field.leaf == leaf]
    if same_leaf:
        return f"unknown {what} {written}: {leaf} is called {' or '.join(same_leaf)} here"
    explanation = explain_name(name)
    if explanation:
        return f"{written}: {explanation}"
    candidates = [*table, *leaves, *ALIASES, *reserved]
    near = difflib.get_close_matches(name, candidates, n=6, cutoff=0.55)
    short = {path: leaf for leaf, path in leaves.items()}
    near = list(dict.fromkeys(short.get(match, match) for match in near))[:3]
    return f"unknown {what} {written}; " + (
        f"nearest: {', '.join(near)}" if near else "--help lists all"
    )


def _field_spec(path: str, entry: dict[str, Any], owner: dict[str, Any]) -> FieldSpec:
    parts = [part for part in entry.get("anyOf", [entry]) if part.get("type") != "null"]
    kind, allowed = _kind_and_words(parts[0])
    return FieldSpec(
        path=path,
        kind=kind,
        choices=_choices(parts[0]),
        allowed=allowed,
        optional="anyOf" in entry,
        required=path in owner.get("required", ()),
        default=entry.get("default"),
        help=re.sub(r"\s+", " ", entry["description"]),
    )


def _choices(schema: dict[str, Any]) -> tuple[str, ...]:
    if "const" in schema:
        return (schema["const"],)
    return tuple(schema.get("enum", ()))


def _kind_and_words(schema: dict[str, Any]) -> tuple[Kind, str]:
    bounds = [
        f"{words} {schema[key]:g}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in schema
    ]
    rest = ", " + " and ".join(bounds) if bounds else ""
    choices = _choices(schema)
    if choices:
        only = f"{choices[0]}, the only choice yet"
        return "choice", only if len(choices) == 1 else "one of " + ", ".join(choices)
    match schema["type"]:
        case "boolean":
            return "switch", "true or false"
        case "integer":
            return "integer", f"an integer{rest}"
        case "number":
            return "number", f"a number{rest}"
        case "string":
            # The patterns in use are escaped literals.
            pattern = re.sub(r"\\(.)", r"\1", schema.get("pattern", ""))
            return "text", f"text that contains {pattern}" if pattern else "text"
        case "array":
            return "list", f"{_plural(schema['items']['type'])} with commas between"
        case "object":
            return "table", "a table, e.g. '{\"key\": 1}' or '{key = 1}'"
    raise AssertionError(f"no words for {schema}")


def _plural(json_type: str) -> str:
    return {"string": "names", "number": "numbers", "integer": "integers"}[json_type]
