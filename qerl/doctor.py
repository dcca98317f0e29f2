"""Is this machine fit for qerl? Driver, packages, compilers, disk, hub, and every kernel against its reference.

    python -m qerl.doctor

Takes less than a minute, trains nothing, and ends in a block to paste into an issue. Without a GPU it looks at the
rest and says what was not looked at. Exit code 0, or 1 when something that is needed fails.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl import __version__
from qerl.errors import UserError
from qerl.settings.cli import run_main

if TYPE_CHECKING:
    from qerl.checkup.finding import Check

USAGE = """\
usage: python -m qerl.doctor [--seconds N]

Look at driver, CUDA, packages, compilers, disk and hub access, then run every kernel against its reference on this card.
Prints a line for each, ok, warning or FAILED, with what to do, and a block to paste into an issue.
Exit code 0, or 1 when something that is needed fails.

  --seconds N   How long the kernels may take, compiling included. [50]
"""
SECONDS = 50.0
_EXPLAINING = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "QERL_CACHE",
    "CC",
)
"""Variables that explain findings."""


def main(argv: list[str] | None = None) -> int:
    """Look, say, and judge. Returns the process' exit code."""
    seconds = _parse(sys.argv[1:] if argv is None else argv)
    started = time.monotonic()
    checks: list[Check] = []

    def tell(check: "Check") -> None:
        checks.append(check)
        _say(check.text())

    _say(f"qerl {__version__} looks at this machine; kernels come last\n")
    _look(tell, seconds)
    _say(f"\n{verdict(checks)} {time.monotonic() - started:.0f} s.")
    _say(f"\nTo paste into an issue:\n\n{block(checks)}")
    return int(any(check.status == "FAILED" for check in checks))


def _look(tell: "Callable[[Check], None]", seconds: float) -> None:
    """Everything: what needs no torch here, the rest in a process of its own."""
    from qerl.checkup import machine, packages
    from qerl.checkup.child import look_at_device, run_in_child
    from qerl.checkup.finding import guarded

    driver = machine.read_driver()
    tell(machine.check_driver(driver))
    tell(machine.check_gpu_memory(driver))
    tell(machine.check_size())
    tell(packages.check_python())
    for name in packages.SHOWN:
        tell(packages.check_package(name))
    tell(packages.check_other_packages())
    tell(packages.check_triton(driver.has_gpu))
    tell(guarded("C compiler, headers", lambda: machine.check_compiler(driver.has_gpu)))
    for what, folder in machine.disk_folders().items():
        name = f"disk: {what}"
        tell(guarded(name, lambda what=what, folder=folder: machine.check_disk(what, folder)))
    tell(guarded("Hugging Face hub", machine.check_hub))
    run_in_child(partial(look_at_device, driver), seconds, tell)


def verdict(checks: "list[Check]") -> str:
    """How it stands, in a sentence."""
    failed = [check.name for check in checks if check.status == "FAILED"]
    if failed:
        return f"NOT fit: {len(failed)} of {len(checks)} failed ({', '.join(failed)})."
    warnings = [check.name for check in checks if check.status == "warning"]
    return f"Fit: nothing that is needed failed; warnings: {', '.join(warnings) or 'none'}."


def block(checks: "list[Check]") -> str:
    """Everything that was found, fenced; the user's home folder is not named."""
    lines = [f"qerl {__version__} doctor: {verdict(checks)}"]
    lines += [check.text() for check in checks]
    lines += [f"{name}={os.environ[name]}" for name in _EXPLAINING if name in os.environ]
    text = "\n".join(lines).replace(str(Path.home()), "~")
    return f"```text\n{text}\n```"


def _say(text: str) -> None:
    """Not metrics.say: that module needs packages which may be what is missing."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parse(words: list[str]) -> float:
    if "--help" in words or "-h" in words:
        _say(USAGE.rstrip())
        raise SystemExit(0)
    if not words:
        return SECONDS
    flag, *values = words[0].split("=", 1) if len(words) == 1 else words
    if flag != "--seconds" or len(values) != 1:
        raise UserError(
            f"unexpected {' '.join(words)!r}: doctor takes --seconds N and nothing else"
        )
    try:
        seconds = float(values[0])
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise UserError(f"--seconds {values[0]}: give a number of seconds from 1 to 3600")
    return seconds


if __name__ == "__main__":
    run_main(main)
