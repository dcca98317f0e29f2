"""Settings of every kind of wrongness: one line that names what to change, or a config that says what was written.

"Never a silent default": what is accepted is found in the config, with the meaning of the text.
"""

import json
import math
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import cases
from damage import damages
from hypothesis import given
from hypothesis import strategies as st

from qerl.config import Config
from qerl.errors import UserError
from qerl.plan import plan_for
from qerl.settings.cli import parse_config
from qerl.settings.fields import FieldSpec, fields
from qerl.settings.layers import build_config
from qerl.settings.presets import preset_folder, preset_names

FIELDS = {path: field for path, field in fields().items() if path != "model"}
NUMBERS = st.one_of(st.integers(-2, 10**20), st.floats(), st.sampled_from([0, 1, 2, 0.5, 1e308]))
WORDS = st.one_of(
    st.sampled_from(
        ["", " ", "true", "false", "none", "null", "nan", "inf", "-1", "0", "1", "2.5", "1e3", "[]",
         "{}", "[1,2]", "a,b", ",", "{a = 1}", '{"a": 1}', "auto", "cosine", "nvfp4", "tiny", "\u2212", "\x00",
         "/", "..", "~", "x" * 5000, "[" * 5000, "--beta", "1_000", "0x10", "١٢"]
    ),
    st.text(max_size=8),
    NUMBERS.map(str),
)  # fmt: skip
VALUES = st.one_of(
    WORDS,
    NUMBERS,
    st.booleans(),
    st.lists(st.one_of(WORDS, NUMBERS), max_size=3),
    st.dictionaries(st.text(max_size=4), st.one_of(WORDS, NUMBERS), max_size=2),
)


def leaf(config: Config, path: str):
    section, _, name = path.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def means(field: FieldSpec, written: object, value: object) -> bool:
    """Whether a config's value is what was written, as a string or as a value of TOML."""
    if isinstance(written, str) and written.lower() in ("none", "null") and value is None:
        return field.optional
    match field.kind:
        case "integer" | "number":
            return not isinstance(written, bool) and float(written) == float(value)
        case "switch":
            return str(written).lower() in (
                ("true", "yes", "on", "1", "1.0", "t", "y")
                if value
                else ("false", "no", "off", "0", "0.0", "-0.0", "f", "n")
            )
        case "list":
            if isinstance(written, str) and not written.lstrip().startswith("["):
                written = [part.strip() for part in written.split(",") if part.strip()]
            elif isinstance(written, str):
                written = parsed(written)
            return [str(x) for x in value] == [str(x) for x in written] or [
                float(x) for x in value
            ] == [float(x) for x in written]
        case "table":
            return value == (parsed(written) if isinstance(written, str) else written)
        case _:
            return value == written or (field.kind == "choice" and value in field.choices)


def parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return tomllib.loads(f"value = {text}")["value"]


def check_message(error: UserError) -> None:
    assert str(error).strip() and len(str(error)) < 12_000


@cases(0.2)
@given(path=st.sampled_from(sorted(FIELDS)), text=WORDS)
def test_a_flag_means_what_it_says_or_is_refused(path, text):
    field = FIELDS[path]
    try:
        config, _ = parse_config(["--model", "tiny", f"--{path}={text}"], prog="x", description="x")
    except UserError as error:
        check_message(error)
    else:
        assert means(field, text, leaf(config, path)), (path, text, leaf(config, path))


@cases(0.1)
@given(
    words=st.lists(
        st.one_of(
            st.sampled_from(sorted(FIELDS)).map(lambda path: f"--{path}"),
            st.sampled_from(["--model", "--config", "--", "-", "--no-share-prompts", "--no-beta", "--=", "--dry-run"]),
            WORDS,
            WORDS.map(lambda word: f"--{word}"),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_any_command_line(words):
    if {"--help", "-h"} & set(words):
        return
    try:
        config, _ = parse_config(words, prog="x", description="x")
    except UserError as error:
        check_message(error)
    else:
        assert isinstance(config, Config)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def toml_value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float() if math.isnan(value) or math.isinf(value):
            return str(value)
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case list():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case dict():
            return (
                "{"
                + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items())
                + "}"
            )
    raise TypeError(value)


@cases(0.15)
@given(path=st.sampled_from(sorted(FIELDS)), value=VALUES)
def test_a_settings_file_means_what_it_says_or_is_refused(scratch, path, value):
    section, _, name = path.rpartition(".")
    file = scratch / "settings.toml"
    head = f"[{section}]\n" if section else ""
    file.write_text(
        f"{head}{name} = {toml_value(value)}\n", encoding="utf-8", errors="surrogatepass"
    )
    try:
        config, _ = parse_config(
            ["--model", "tiny", "--config", str(file)], prog="x", description="x"
        )
    except UserError as error:
        check_message(error)
    else:
        assert means(FIELDS[path], value, leaf(config, path)), (path, value, leaf(config, path))


@cases(0.05)
@given(name=st.sampled_from(sorted(preset_names())), damage=damages())
def test_a_damaged_settings_file(scratch, name, damage):
    file = scratch / "preset.toml"
    if file.is_dir():
        file.rmdir()
    file.write_bytes((preset_folder() / f"{name}.toml").read_bytes())
    damage[1](file)
    try:
        build_config({}, str(file))
    except UserError as error:
        check_message(error)


NUMERIC = [path for path, field in FIELDS.items() if field.kind in ("integer", "number")]


@cases(0.05)
@given(
    flags=st.dictionaries(
        st.sampled_from(NUMERIC),
        st.one_of(st.integers(0, 20), st.sampled_from([10**6, 10**12, 1e-9, 0.5, 1e300])),
        min_size=1,
        max_size=3,
    )
)
def test_extreme_numbers_make_a_plan_or_are_refused(flags):
    words = ["--model", "tiny", "--device", "cpu", "--task", "reasoning-gym/chain_sum"]
    words += ["--task.train_size", "20", "--task.test_size", "5"]
    flags = {path: value for path, value in flags.items() if not path.startswith("task.")}
    for path, value in flags.items():
        words.append(f"--{path}={value}")
    try:
        config, _ = parse_config(words, prog="x", description="x")
        plan_for(config)
    except UserError as error:
        check_message(error)
