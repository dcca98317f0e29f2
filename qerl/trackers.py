"""wandb and TensorBoard: the only importer of either.

Each gets the numbers of metrics.jsonl under the same names, so charts are grouped as train/ and eval/, and some of each
step's completions as a table; all of them are in the run folder.
"""

import html
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.errors import UserError

WANDB_ID = "wandb_id"
ROWS_SHOWN = 32
"""Completions of a step that a tracker gets"""
COLUMNS_SHOWN = ("prompt", "completion", "answer", "reward", "advantage")


def open_tracker(
    report_to: str, run_dir: Path, config: dict[str, Any], resume_step: int | None
) -> "_Wandb | _TensorBoard | None":
    """The tracker that `log.report_to` names, or None. Raises UserError if its package is missing or does not start."""
    match report_to:
        case "none":
            return None
        case "wandb":
            return _Wandb(run_dir, config)
        case "tensorboard":
            return _TensorBoard(run_dir, resume_step)
    raise ValueError(f"unknown tracker {report_to!r}")


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / WANDB_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    run_id = path.read_bytes().strip()
    if not re.fullmatch(rb"[A-Za-z0-9_-]{1,64}", run_id):
        raise UserError(
            f"{path} is damaged: it holds no id of a wandb run; delete it to begin a new one"
        )
    return run_id.decode()


class _Wandb:
    """One wandb run for one run folder, however often it is resumed: its id is kept in the folder."""

    def __init__(self, run_dir: Path, config: dict[str, Any]):
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise UserError("report_to=wandb needs a package: pip install wandb") from error
        run_id = _wandb_id(run_dir)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "qerl"),
                name=run_dir.name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=config,
            )
        except WandbError as error:
            raise UserError(
                f"wandb does not start: {error}. Run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        # wandb's own step cannot go back to a checkpoint's; a metric of ours as the x axis can.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_completions(self, step: int, rows: Sequence[dict[str, Any]], kind: str) -> None:
        """The first rows as the table KIND/completions; a later step adds one and replaces none."""
        import wandb

        columns, cells = _table(rows)
        table = wandb.Table(columns=columns, data=cells)  # pyright: ignore[reportArgumentType]
        self._run.log({"step": step, f"{kind}/completions": table})

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Event files in the run folder's `tensorboard/`; steps after the resumed one are hidden by purge_step."""

    def __init__(self, run_dir: Path, resume_step: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "report_to=tensorboard needs a package: pip install tensorboard"
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_completions(self, step: int, rows: Sequence[dict[str, Any]], kind: str) -> None:
        """The first rows as the text KIND/completions, a Markdown table."""
        columns, cells = _table(rows)
        lines = [columns, ["---"] * len(columns), *cells]
        text = "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)
        self._writer.add_text(f"{kind}/completions", text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells of the rows that are shown, reward terms last."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in COLUMNS_SHOWN if name in names]
    columns += [name for name in names if name.startswith("reward/")]
    return columns, [[row.get(name) for name in columns] for row in rows[:ROWS_SHOWN]]


def _markdown_cell(value: Any) -> str:
    """A cell that neither ends its row nor is taken for markup."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
