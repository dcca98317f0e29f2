"""Whatever stands on a command line or in a settings file: a valid config or one line, and nothing in silence."""

import json

import pytest
from children import NUM_CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.cli import parse_config
from qerl.settings.fields import fields

VALUES = st.one_of(
    st.integers(-2, 10**12).map(str),
    st.floats(width=32).map(str),
    st.sampled_from(["", "true", "no", "none", "null", "auto", "{}", "[]", '{"a": 1}', "1,2", "é", "-"]),
    st.text(max_size=8),
)  # fmt: skip


def bounded(share: float):
    return settings(
        max_examples=max(5, int(NUM_CASES * share)),
        derandomize=NUM_CASES <= 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def parsed(argv: list[str]) -> Config | None:
    """The config, or None if it was refused in one line."""
    try:
        return parse_config(argv, prog="qerl", description="")[0]
    except UserError as error:
        assert str(error) and len(str(error)) < 2000
        return None


@bounded(0.15)
@given(flags=st.lists(st.tuples(st.sampled_from(sorted(fields())), VALUES), max_size=4))
def test_flags_are_taken_or_refused(flags):
    argv = ["--model", "tiny", *(f"--{path}={value}" for path, value in flags)]
    config = parsed(argv)
    if config is not None:
        # What was accepted is what another process would read back.
        assert Config.model_validate(json.loads(config.model_dump_json())) == config


@bounded(0.05)
@given(words=st.lists(st.text(max_size=12), max_size=4))
def test_arbitrary_words_are_refused(words):
    config = parsed(["--model", "tiny", *words])
    assert config is None or not [word for word in words if word.startswith("--") and "=" in word]


@bounded(0.1)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.tuples(st.sampled_from([*sorted(fields()), "unknown", "algo.x"]), VALUES),
            max_size=4,
        ).map(lambda rows: "\n".join(f"{path} = {value}" for path, value in rows)),
    )
)
def test_settings_files_are_taken_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(text, encoding="utf-8", errors="ignore")
    config = parsed(["--model", "tiny", "--config", str(path)])
    if config is not None and "unknown" in text:
        assert "unknown" not in {line.partition(" =")[0] for line in text.splitlines()}


@pytest.mark.parametrize(
    "argv", [["--seed"], ["--", "x"], ["--=1"], ["--seed=1", "--seed=2"], ["=", "--"]]
)
def test_odd_words_are_one_line(argv):
    parsed(["--model", "tiny", *argv])
