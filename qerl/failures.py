"""What ends a run, in one line: the phase, what happened, what to lower. The traceback goes to RUN/error.log.

A UserError is a mistake that its message explains, and passes through. Everything else that is raised while a run is
open becomes a RunError, so the terminal shows a line and not forty, and nothing is lost.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl.errors import RunError, UserError
from qerl.heartbeat import entered
from qerl.memory import is_out_of_memory

ERROR_LOG = "error.log"

LESS_MEMORY = {
    "setup": "lower --memory-gib, which the plan may use, or take a smaller model, or --quant nvfp4",
    "sync": "lower --memory-gib, which the plan may use",
    "rollout": "lower --max-batch-size, or --max-completion-length in a new --run-dir",
    "eval": "lower --max-batch-size, or --max-completion-length in a new --run-dir",
    "update": "lower --max-tokens-per-microbatch or --memory-gib, or set --gradient-checkpointing",
    "probe": "lower --max-tokens-per-microbatch or --memory-gib, or set --gradient-checkpointing",
}
"""What makes a phase need less; all but the model may change when the run is continued."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Turn whatever is raised inside into a RunError of this phase, unless it already is one or a UserError.

    The watchdog knows the phase while it lasts.
    """
    try:
        with entered(name):
            yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            hint = LESS_MEMORY.get(name, "close what else uses the memory")
            raise RunError(
                name, f"out of memory; {hint}, then give the same command again"
            ) from error
        text = "".join(traceback.format_exception_only(error)).strip()
        raise RunError(name, text) from error


@contextmanager
def failure_log(run_dir: Path) -> Iterator[None]:
    """Append the traceback of a RunError to RUN/error.log, and say in its message that it is there."""
    try:
        yield
    except RunError as error:
        path = run_dir / ERROR_LOG
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{traceback.format_exc()}\n")
            where = f"the traceback is in {path}"
        except OSError as problem:
            where = f"the traceback could not be written to {path} ({problem.strerror})"
        raise RunError(error.phase, f"{error.message}; {where}") from error
