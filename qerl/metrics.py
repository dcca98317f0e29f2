"""What a run tells: metrics.jsonl, the completions tables, a tracker if asked for, and the text on the terminal.

    metrics.jsonl            {"step": 12, "train/reward": 0.41, ...}   a line a step; evaluations have lines of their own
    completions/STEP.parquet  prompt, completion, reward terms, reward, advantage, version, kind (train or eval), ...

The local files are the record and always written; wandb and TensorBoard get the same numbers beside them. A run that
continues at step S first drops what lies beyond S, which a killed process wrote after its last checkpoint, so no step
appears twice. (wandb cannot forget: steps that were done twice have two points there, equal where the run repeats
itself bit for bit.) Functions here return text; `say` alone writes it to stdout.
"""

import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qerl.checkpoint import TMP_PREFIX, flush_to_disk
from qerl.errors import UserError
from qerl.failures import phase
from qerl.trackers import open_tracker

METRICS = "metrics.jsonl"
COMPLETIONS = "completions"
PHASES = ("rollout", "reward", "update")
COLUMN_TYPES = {
    "problem_id": pa.string(),
    "sample_index": pa.int64(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "answer": pa.string(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "num_tokens": pa.int64(),
    "finish_reason": pa.string(),
    "version": pa.int64(),
    "kind": pa.string(),
}
"""Columns of a completions table, beside one float64 column `reward/NAME` a reward function, and one text column
`extra/NAME` for what a function gave to `log_extra`."""


class MetricsWriter:
    """State: the open metrics file, the tracker, and how many values were not finite so far."""

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None,
        report_to: str = "none",
        config: dict[str, Any] | None = None,
    ):
        """Continue the folder's files after step `resume_step` (None: a run from the start, nothing is kept).

        `config` is shown by the tracker. Raises UserError if the tracker's package is missing or refuses to start.
        `notes` says what of the files could not be read and is therefore left out.
        """
        self.run_dir = Path(run_dir)
        self.num_nonfinite = 0
        self._tracker = open_tracker(report_to, self.run_dir, config or {}, resume_step)
        self.notes = truncate_after(self.run_dir, -1 if resume_step is None else resume_step)
        self._file = (self.run_dir / METRICS).open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append a line, flushed to disk. A value that is not finite is written as null and counted in the line."""
        bad = [key for key, value in metrics.items() if not math.isfinite(value)]
        line: dict[str, Any] = {"step": step, **metrics, **dict.fromkeys(bad)}
        if bad:
            line["num_nonfinite"] = len(bad)
            self.num_nonfinite += len(bad)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._tracker is not None:
            self._tracker.log(step, metrics)

    def write_completions(self, step: int, rows: Sequence[dict[str, Any]], kind: str) -> Path:
        """Add rows (keys: COLUMN_TYPES without kind, and reward/NAME) to the step's table; kind is train or eval."""
        path = self.run_dir / COMPLETIONS / f"{step}.parquet"
        path.parent.mkdir(exist_ok=True)
        table = _completions_table([{**row, "kind": kind} for row in rows])
        if path.exists():
            table = pa.concat_tables([read_completions(path), table], promote_options="default")
        aside = path.with_name(TMP_PREFIX + path.name)
        pq.write_table(table, aside, write_page_checksum=True)
        flush_to_disk(aside)
        os.replace(aside, path)
        if self._tracker is not None:
            self._tracker.log_completions(step, rows, kind)
        return path

    def close(self) -> None:
        """Finish the tracker's run and close the file."""
        self._file.close()
        if self._tracker is not None:
            self._tracker.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last one that was cut short by a kill is left out. Empty if there is no file.

    Raises UserError for a line that is damaged.
    """
    path = Path(run_dir) / METRICS
    lines = _whole_lines(path)
    parsed = [_parse_metrics(line) for line in lines]
    for number, line in enumerate(parsed, start=1):
        if line is None:
            raise UserError(
                f"{path}, line {number} is damaged; delete it, or continue the run, which leaves it out"
            )
    return [line for line in parsed if line is not None]


def read_completions(path: Path) -> pa.Table:
    """A step's completions table. Raises UserError if it is damaged."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        table.validate(full=True)
    except FileNotFoundError as error:
        raise UserError(f"{path} is not there") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read ({error}); delete it to go on without it"
        ) from error
    if missing := COLUMN_TYPES.keys() - set(table.column_names):
        raise UserError(f"{path} has no column {min(missing)}; delete it to go on without it")
    return table


def truncate_after(run_dir: Path, step: int) -> tuple[str, ...]:
    """Drop metrics and completions of steps later than `step`, and whatever is half written.

    Damaged lines among those that stay are left out too, which is said; the file as it was is kept beside.
    """
    path = Path(run_dir) / METRICS
    parsed = [_parse_metrics(line) for line in _whole_lines(path)]
    kept = [line for line in parsed if line is not None and line["step"] <= step]
    notes = ()
    if num_damaged := parsed.count(None):
        copy = path.with_name(f"{METRICS}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        shutil.copyfile(path, copy)
        notes = (f"{num_damaged} damaged lines of {path} are left out; the file as it was: {copy}",)
    aside = path.with_name(TMP_PREFIX + path.name)
    aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    flush_to_disk(aside)
    os.replace(aside, path)
    for table in (Path(run_dir) / COMPLETIONS).glob("*.parquet"):
        if not table.stem.isdecimal() or int(table.stem) > step:
            table.unlink()
    return notes


def _whole_lines(path: Path) -> list[bytes]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
    """None unless it is a step's: an object of numbers (or null) with a whole `step`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(value, dict) and all(
        item is None or (isinstance(item, int | float) and not isinstance(item, bool))
        for item in value.values()
    )
    return value if numbers and isinstance(value.get("step"), int) else None


class PhaseTimer:
    """Adds up the seconds spent in named phases: `with timer("rollout"): ...`. Wall-clock of this process.

    What is raised in a phase becomes a RunError that names it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with phase(name):
                yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed

    def metrics(self) -> dict[str, float]:
        """`time/PHASE_s` of each phase."""
        return {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}


def progress_line(
    step: int, num_steps: int, metrics: dict[str, float], seconds_per_step: float
) -> str:
    """One line about a finished step; `metrics` without prefix, what is not among them is left out."""
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    for name, key in (("reward", "reward"), ("accuracy", "accuracy"), ("entropy", "entropy")):
        if key in metrics:
            parts.append(f"{name} {metrics[key]:.3f}")
    if (speed := metrics.get("throughput/rollout_tokens_per_s")) is not None:
        parts.append(f"{speed:,.0f} tok/s")
    phases = [(name, metrics.get(f"time/{name}_s")) for name in PHASES]
    if times := [f"{name} {seconds:.1f}s" for name, seconds in phases if seconds is not None]:
        parts.append(" ".join(times))
    if (memory := metrics.get("memory/peak_gib")) is not None:
        parts.append(f"{memory:.2f} GiB")
    parts.append(f"{format_duration(seconds_per_step * (num_steps - step))} left")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """4 s -> "4s", 200 s -> "3m20s", 8000 s -> "2h13m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_completions(
    rows: Sequence[dict[str, Any]], *, width: int = 100, max_chars: int = 400
) -> str:
    """Rows of a completions table as a table for the terminal; long texts keep their end, where the answer is."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    table.add_column("answer", overflow="fold")
    table.add_column("reward", justify="right")
    for row in rows:
        answer = "" if row.get("answer") is None else row["answer"]
        reward = row["reward"]
        known = reward is not None and not math.isnan(reward)
        table.add_row(
            *(
                Text(printable(text, max_chars))
                for text in (row["prompt"], row["completion"], answer)
            ),
            f"{reward:.2f}" if known else "none",
        )
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def printable(text: str, max_chars: int | None = None) -> str:
    """What a model writes must not steer the terminal: control characters are shown as escapes. Keeps the end."""
    cut = text if max_chars is None or len(text) <= max_chars else f"... {text[-max_chars:]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in cut.strip())


def say(text: str) -> None:
    """Write a line to stdout now, also when stdout is a file or a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _completions_table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    prefixes = {"reward/": pa.float64(), "extra/": pa.string()}
    types = COLUMN_TYPES | {
        name: kind for name in names for prefix, kind in prefixes.items() if name.startswith(prefix)
    }
    unknown = [name for name in names if name not in types]
    if unknown:
        raise ValueError(f"unknown columns in a completions table: {', '.join(unknown)}")
    columns = {
        name: pa.array(
            [row.get(name) for row in rows],
            type=types[name],
            from_pandas=True,  # NaN becomes null: a completion without a reward
        )
        for name in names
    }
    return pa.table(columns)
