"""The console script `qerl`: `qerl train ...` is `python -m qerl.train ...`, and so on."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from qerl import __version__
from qerl.errors import UserError
from qerl.settings.cli import run_main

COMMANDS = {
    "train": "Train an adapter: the main job.",
    "check": "Before training: the prompt, the rewards on gold answers, a dry sample, a verdict.",
    "diagnose": "Say from a run's folder why it learns, or does not.",
    "evaluate": "Score a run's adapter, or a bare model, on held-out problems.",
    "quantize": "Pack a checkpoint into NVFP4, with the loss of every layer.",
    "sample": "Write completions of one prompt with a run's adapter.",
    "compare": "Train several arms over several seeds and report how they differ.",
    "report": "Draw a page about runs: charts, and a browser of their completions.",
    "parity": "Compare the log-probabilities of trainer and engine.",
    "plan": "What a training command would need; the same as `qerl train --dry-run`.",
    "bench": "How fast is this card: update, rollout or whole steps against QLoRA and the hardware.",
    "doctor": "Is this machine fit: driver, packages, disk, and every kernel against its reference.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its module is imported only then."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case [] | ["--help" | "-h" | "help"]:
            sys.stdout.write(_usage())
            return 0
        case ["--version" | "-V" | "version"]:
            sys.stdout.write(f"qerl {__version__}\n")
            return 0
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"nearest: {near[0]}" if near else f"commands: {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}; {hint}")
    if name == "plan":
        name, rest = "train", [*rest, "--dry-run"]
    return importlib.import_module(f"qerl.{name}").main(rest) or 0


def console() -> NoReturn:
    """Entry point of the installed script."""
    run_main(main)


def _usage() -> str:
    rows = "\n".join(f"  qerl {name:<10}{about}" for name, about in COMMANDS.items())
    return f"""\
qerl {__version__}: reinforcement learning on large language models, one GPU, one NVFP4 copy of the base.

{rows}

  qerl COMMAND --help explains one; qerl --version.

First run, on any machine, a few minutes on a CPU:
  qerl train --model quickstart
"""


if __name__ == "__main__":
    console()
