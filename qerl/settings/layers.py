"""Settings in layers: files and flags laid on each other by full path, then validated as one `Config`.

Each value remembers where it was written, so that a message can say which file or flag to change. A task named by a
higher layer starts the `task` section afresh: the parameters that a preset gives its own task mean nothing to another.
"""

import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.fields import FieldSpec, fields, find_field, sections
from qerl.settings.foreign import VALUES
from qerl.settings.presets import preset_folder, preset_names, read_toml


@dataclass(frozen=True)
class Setting:
    """A value as it was written, and where."""

    value: Any
    origin: str
    """For messages: "--lr", or "FILE: lr"."""


Layer = dict[str, Setting]
"""Settings by full path."""


def build_config(
    flags: Layer, config_file: str | None = None, base: Mapping[str, Any] | None = None
) -> tuple[Config, str | None]:
    """Put the layers on each other and validate; returns the config and the preset's name, if any.

    Args:
        flags: the topmost layer.
        config_file: a settings file.
        base: resolved settings (a run's config.json) that stand in for defaults and preset.

    Raises:
        UserError: an unknown key, a value out of range, settings that contradict each other, no model.
    """
    file_layer = read_layer(Path(config_file)) if config_file else {}
    model = flags.get("model") or file_layer.get("model")
    preset = model.value if model and model.value in preset_names() else None
    layers = [layer_of(base, "the run's config") if base else {}]
    if preset:
        layers.append(read_layer(preset_folder() / f"{preset}.toml"))
        # What the name stands for is the preset's to say.
        file_layer.pop("model", None)
        flags = {path: setting for path, setting in flags.items() if path != "model"}
    return validate_layer(stack([*layers, file_layer, flags])), preset


def stack(layers: Iterable[Layer]) -> Layer:
    """Layers on each other, the later over the earlier; a task of another name drops the settings of the one below."""
    merged: Layer = {}
    for layer in layers:
        if (
            "task.name" in layer
            and "task.name" in merged
            and layer["task.name"].value != merged["task.name"].value
        ):
            merged = {
                path: setting for path, setting in merged.items() if not path.startswith("task.")
            }
        merged |= layer
    return merged


def read_layer(path: Path) -> Layer:
    """The settings in a TOML file, by full path."""
    return layer_of(read_toml(path), str(path))


def validate_layer(layer: Layer) -> Config:
    """Nest and validate settings.

    Raises:
        UserError: naming field, value, where it was written, and what is allowed.
    """
    if "model" not in layer:
        raise UserError(
            "--model is missing: a preset such as quickstart or qwen2.5-7b (--help lists them), a Hugging Face id, "
            "a folder, or tiny"
        )
    nested: dict[str, Any] = {}
    for path, setting in layer.items():
        section, _, leaf = path.rpartition(".")
        target = nested.setdefault(section, {}) if section else nested
        target[leaf] = _coerce(fields()[path], setting)
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        raise UserError(_explain(error, layer)) from error


def layer_of(tree: Mapping[str, Any], origin: str, prefix: str = "") -> Layer:
    """Settings of nested tables by full path; tables that are themselves values stay whole."""
    layer: Layer = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name.replace("-", "_") in sections():
            layer |= layer_of(value, origin, f"{name}.")
            continue
        try:
            field, inner = find_field(name, "key", name)
        except UserError as error:
            raise UserError(f"{origin}: {error}") from error
        put(layer, field, inner, value, f"{origin}: {name}")
    return layer


def put(layer: Layer, field: FieldSpec, key: str | None, value: Any, origin: str) -> None:
    """Write a setting into a layer; `key` writes one entry of a table and keeps the others."""
    if key is None:
        layer[field.path] = Setting(value, origin)
        return
    current = layer.get(field.path)
    table = _coerce(field, current) if current else {}
    layer[field.path] = Setting({**table, key: _literal(value)}, origin)


def _literal(text: Any) -> Any:
    """A table entry written on the command line: a TOML value where it is one, else the text itself."""
    if not isinstance(text, str):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _coerce(field: FieldSpec, setting: Setting) -> Any:
    """Text to what pydantic types further: lists are split, tables parsed, "none" is None where that is allowed."""
    value = setting.value
    if isinstance(value, bool) and field.kind in ("integer", "number"):
        raise UserError(
            f"{field.path} = {str(value).lower()} ({setting.origin}): must be {field.allowed}"
        )
    if not isinstance(value, str):
        return value
    if (
        field.optional
        and field.kind not in ("text", "choice")
        and value.lower() in ("none", "null")
    ):
        return None
    if field.kind == "list":
        if value.lstrip().startswith("["):
            return _parse_inline(field, setting)
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if field.kind == "table":
        return _parse_inline(field, setting)
    return value


def _parse_inline(field: FieldSpec, setting: Setting) -> Any:
    try:
        return json.loads(setting.value)
    except (ValueError, RecursionError):
        try:
            return tomllib.loads(f"value = {setting.value}")["value"]
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{field.path} = {shlex.quote(setting.value)} ({setting.origin}): must be {field.allowed}"
            ) from error


def _explain(error: ValidationError, layer: Layer) -> str:
    """All complaints of pydantic in our words, in one line."""
    return "; ".join(dict.fromkeys(_explain_one(complaint, layer) for complaint in error.errors()))


def _explain_one(complaint: Mapping[str, Any], layer: Layer) -> str:
    location = [str(part) for part in complaint["loc"]]
    path = next(
        (".".join(location[:n]) for n in (2, 1) if ".".join(location[:n]) in fields()), None
    )
    if path is None:
        # A contradiction between settings: config.py says which.
        return (
            str(complaint["ctx"]["error"])
            if "error" in complaint.get("ctx", {})
            else complaint["msg"]
        )
    field, setting = fields()[path], layer.get(path)
    written = setting.value if setting else complaint["input"]
    shown = written if isinstance(written, str) else json.dumps(written, default=str)
    where = f" ({setting.origin})" if setting else ""
    rule = (
        str(complaint["ctx"]["error"])
        if complaint["type"] == "value_error"
        else f"must be {field.allowed}"
    )
    known = VALUES.get((path, str(written).lower()))
    return f"{path} = {shown}{where}{': ' + known if known else ''}: {rule}"
