"""Compare arms: the same training run with another base format, noise, or any other setting, over several seeds.

    python -m qerl.compare --model quickstart --arms nvfp4+aqn,nvfp4,nf4,bf16 --seeds 0,1,2
    python -m qerl.compare --config configs/compare-quickstart.toml --minutes 25

Every arm and seed is a training run of its own (qerl.train), in a process of its own, with everything equal but what the
arm is about; `--at-once 4` runs four of them side by side, which small models leave room for. The same command again continues where it stopped; `--minutes` ends a session on time. At the end, and
whenever it stops, it writes report.html, report.md and report.json into the comparison's folder.

Exit code: 0 all runs finished; 1 a run failed; 75 stopped before all were finished; 2 bad input.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.callable_module import CallableModule
from qerl.comparison.arms import Comparison, make_comparison
from qerl.comparison.runner import Runner, say
from qerl.errors import UserError
from qerl.settings.cli import ExtraFlag, parse_arguments, run_main

if TYPE_CHECKING:
    from qerl.reporting.comparison import ComparisonReport

UNFINISHED = 75
"""EX_TEMPFAIL: give the same command again."""
FLAGS = (
    ExtraFlag(
        "arms",
        "What is compared, with commas between; see qerl/comparison/arms.py.",
        takes_value=True,
    ),
    ExtraFlag("seeds", "Seeds of every arm, with commas between.", takes_value=True),
    ExtraFlag("baseline", "The arm that the others are compared with.", takes_value=True),
    ExtraFlag("target_accuracy", "Report steps and minutes to these accuracies.", takes_value=True),
    ExtraFlag(
        "minutes", "Stop after so many minutes; the same command continues.", takes_value=True
    ),
    ExtraFlag(
        "at_once",
        "Runs side by side; on a GPU --memory-gib says how much each may take.",
        takes_value=True,
    ),
    ExtraFlag("dry_run", "Print the commands of all runs and stop."),
    ExtraFlag("report_only", "Write the report of what there is and stop."),
)


def main(argv: list[str] | None = None) -> int:
    """Parse, run what is not finished, report. Returns the process' exit code."""
    flags, options = parse_arguments(
        sys.argv[1:] if argv is None else argv,
        prog="python -m qerl.compare",
        description="Train the same run with several arms and seeds, and report how they differ.",
        extra_flags=FLAGS,
    )
    comparison = make_comparison(flags, options.config, vars_of(options))
    from qerl.model.source import check_model

    check_model(comparison.config.model, comparison.config.revision)
    if options.dry_run:
        for planned in comparison.runs:
            say(planned.command)
        return 0
    at_once = _at_once(options.at_once, comparison)
    runner = Runner(comparison, _minutes(options.minutes), at_once)
    if not options.report_only:
        runner.run_all()
    return finish(comparison, runner)


def finish(comparison: Comparison, runner: Runner) -> int:
    """Write the report, say where the comparison stands, and turn that into an exit code."""
    states = [runner.state_of(planned) for planned in comparison.runs]
    done = states.count("finished")
    if any((planned.run_dir / "metrics.jsonl").exists() for planned in comparison.runs):
        report = make_report(comparison.folder)
        for sentence in report.sentences:
            say(sentence)
        say(f"report: {comparison.folder / 'report.html'}")
    for planned, state in zip(comparison.runs, states, strict=True):
        if state == "failed":
            say(f"failed: {planned.name}: {runner.runs[planned.name]['message']}")
    if done < len(states):
        say(f"{done} of {len(states)} runs finished; the same command goes on with the others")
    if runner.stop_signal is not None:
        return 128 + runner.stop_signal
    if "failed" in states:
        return 1
    return 0 if done == len(states) else UNFINISHED


def make_report(folder: Path) -> "ComparisonReport":
    """Read a comparison's runs and write its page, table and raw numbers. Imports numpy and what reads run folders."""
    from qerl.reporting.comparison import read_comparison
    from qerl.reporting.comparison_page import write_comparison

    report = read_comparison(folder)
    write_comparison(report)
    return report


def vars_of(options: Any) -> dict[str, Any]:
    """The command line's words for the keys of the [compare] table."""
    names = ("arms", "seeds", "baseline", "target_accuracy")
    return {name: getattr(options, name) for name in names}


def _at_once(text: str | None, comparison: Comparison) -> int:
    if text is None:
        return 1
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"--at-once {text}: give a whole number of runs, 1 or more")
    config, count = comparison.config, int(text)
    on_gpu = config.device != "cpu" and Path("/dev/nvidiactl").exists()
    if count > 1 and on_gpu and config.memory_gib is None:
        raise UserError(
            f"--at-once {count}: say with --memory-gib how much of the GPU each run may take, "
            "or the first one takes all of it"
        )
    return count


def _minutes(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise UserError(f"--minutes {text}: give a number above 0")
    return minutes


sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    sys.exit(run_main(main))
