"""Train a LoRA adapter with reinforcement learning on one GPU, or on a CPU.

    python -m qerl.train --model quickstart           watch a small model learn sums, on any machine
    python -m qerl.train --model qwen2.5-7b --task gsm8k
    python -m qerl.train --model qwen2.5-32b --task gsm8k --dry-run

This is the command; the loop itself is `qerl.loop.train`. torch is imported only after the command line has been read,
so `--help` and mistakes answer at once.
"""

import sys

from qerl.callable_module import CallableModule
from qerl.settings.cli import ExtraFlag, parse_config, run_main

DRY_RUN = ExtraFlag("dry_run", "Print the plan (sizes, memory, downloads, steps, time) and stop.")


def main(argv: list[str] | None = None) -> int:
    """Parse, plan, train; the same command again continues a run. Returns the process' exit code."""
    config, options = parse_config(
        argv,
        prog="python -m qerl.train",
        description="Train a LoRA adapter with reinforcement learning on one GPU, or on a CPU.",
        extra_flags=(DRY_RUN,),
    )
    from qerl.metrics import say
    from qerl.plan import plan_for, plan_of
    from qerl.planning.run_plan import check_plan, format_plan

    if options.dry_run:
        plan = plan_for(config)
        say(format_plan(plan))
        check_plan(plan)
        return 0
    from qerl.loop import train
    from qerl.run import open_training_run, prepare
    from qerl.summary import introduce, summarize

    preparation = prepare(config)
    plan = plan_of(preparation)
    say(format_plan(plan))
    check_plan(plan)
    introduce(preparation)
    with open_training_run(preparation) as run:
        train(run)
        summarize(run)
        return run.exit_code


sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    sys.exit(run_main(main))
