"""Every command and configuration block in the documents works.

    ```bash      run, in an empty folder that holds the document's named blocks; `make X` must be a target
    ```toml      read and validated as a settings file
    ```python    run; a block that begins with "# NAME.py" is also a file for the commands
    ```text      only shown

A comment above a bash block changes how it is run:

    <!-- test: dry -->             lines are parsed and validated, nothing is started
    <!-- test: tiny -->            run with the tiny model in place of `quickstart`, and a finished run in runs/NAME
    <!-- test: skip (reason) -->   not run
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from qerl.settings.cli import parse_config
from qerl.settings.layers import Setting, build_config
from qerl.train import DRY_RUN

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LANGUAGES = ("bash", "toml", "python", "text", "")
FENCE = re.compile(r"^```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"<!-- test: (?P<how>dry|tiny|skip)(?: \((?P<reason>.+)\))? -->\n$")
FILE_NAME = re.compile(r"# ([\w-]+\.(?:toml|py))\b")
MAKE_RUN = (
    "python -m qerl.train --model tiny --run-dir runs/NAME --max-steps 2 --max-completion-length 8 "
    "--task reasoning-gym/chain_sum --task.train-size 16 --task.test-size 4 --eval-size 2 "
    "--num-generations 4 --prompts-per-step 4 --learning-rate 0.1 --warmup-ratio 0 "
    f"--reward-funcs {ROOT}/tests/reward_low_tokens.py:low_tokens"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str
    how: str
    """run, dry, tiny or skip"""
    reason: str

    @property
    def name(self) -> str:
        return f"{self.document.name}:{self.line}"


def find_blocks(document: Path) -> list[Block]:
    """All fenced blocks of a document with their directives."""
    text = document.read_text()
    blocks = []
    for match in FENCE.finditer(text):
        directive = DIRECTIVE.search(text, 0, match.start())
        how, reason = directive.group("how", "reason") if directive else ("run", None)
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(document, line, *match.group("language", "text"), how, reason or ""))
    return blocks


BLOCKS = [block for document in DOCUMENTS for block in find_blocks(document)]


def blocks_in(language: str) -> pytest.MarkDecorator:
    chosen = [block for block in BLOCKS if block.language == language]
    return pytest.mark.parametrize("block", chosen, ids=[block.name for block in chosen])


def write_named_blocks(document: Path, folder: Path) -> None:
    """The document's settings files and Python files, for its commands to find."""
    for block in find_blocks(document):
        if name := FILE_NAME.match(block.text):
            (folder / name[1]).write_text(block.text)


def command_lines(text: str) -> list[list[str]]:
    """The words of each line, without comments."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def as_module(words: list[str]) -> list[str]:
    """`python -m qerl.train ...` and `qerl train ...` as ["qerl.train", ...]."""
    if words[:2] == ["python", "-m"]:
        return words[2:]
    assert words[0] == "qerl", f"not a command of ours: {words}"
    return [f"qerl.{words[1]}", *words[2:]]


def run_bash(script: str, folder: Path) -> None:
    """Run a script with this environment's `python` and the checkout's package; any failing line fails it."""
    tools = folder / ".bin"
    tools.mkdir()
    (tools / "qerl").write_text('#!/bin/sh\nexec python -m qerl "$@"\n')
    (tools / "qerl").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def run_tiny(commands: list[list[str]], folder: Path) -> None:
    """Run our commands on the tiny model, all in one process."""
    modules = [
        ["tiny" if word == "quickstart" else word for word in as_module(words)]
        for words in [shlex.split(MAKE_RUN), *commands]
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "command_runner.py"), json.dumps(modules)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for words, outcome in zip(modules, json.loads(done.stdout), strict=True):
        assert outcome["code"] == 0, (words, outcome["stderr"])


def test_fences_have_a_language_that_is_known():
    assert len(BLOCKS) > 10
    assert {block.language for block in BLOCKS} <= set(LANGUAGES)
    assert all(block.reason for block in BLOCKS if block.how == "skip")


@blocks_in("bash")
def test_commands(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if block.how == "skip":
        pytest.skip(block.reason)
    write_named_blocks(block.document, tmp_path)
    if block.how == "tiny":
        run_tiny(command_lines(block.text), tmp_path)
    elif block.how == "dry":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "configs").symlink_to(ROOT / "configs")
        for words in command_lines(block.text):
            module, *arguments = as_module(words)
            assert module == "qerl.train", f"only training is dry: {words}"
            parse_config(arguments, prog="", description="", extra_flags=(DRY_RUN,))
    else:
        lines = block.text.splitlines(keepends=True)
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        for line in (line for line in lines if line.startswith("make ")):
            assert line.split()[1] in targets, line
        script = "".join(line for line in lines if not line.startswith("make "))
        if script.strip():
            run_bash(script, tmp_path)


@blocks_in("toml")
def test_settings_files(block: Block, tmp_path: Path):
    path = tmp_path / "settings.toml"
    path.write_text(block.text)
    build_config({"model": Setting("tiny", "the test")}, str(path))


@blocks_in("python")
def test_python(block: Block, tmp_path: Path):
    (tmp_path / "block.py").write_text(block.text)
    run_bash("python block.py", tmp_path)
