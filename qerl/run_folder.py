"""The run folder: which run it holds, whether this command may continue it, and that only one process writes it.

`config.json` is written when a run starts: the resolved configuration, what it is besides (`identity.py`), the machine,
the versions and the git revision. The same command again finds the same and continues. A different one is refused
with the differing fields, because a run of two halves is neither. What may differ is a list; a change is
recorded in config.json under `changes`, with the step, and what follows from it is said (`continuation.py`). A folder that
is not empty and holds no run is never written to.

The lock is an flock on `.lock`: the kernel drops it with the process, so a killed run leaves nothing to clean up.
"""

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import IO, Any

from qerl.checkpoint import (
    TMP_PREFIX,
    CheckpointInfo,
    checkpoint_at,
    find_latest_checkpoint,
    refresh_adapter,
    refresh_best,
    remove_unfinished,
    set_aside_after,
    write_json_atomically,
)
from qerl.continuation import (
    TAKE_OVER,
    change_notes,
    check_same,
    differences,
    git_revision,
    versions,
)
from qerl.errors import UserError

CONFIG = "config.json"
LOCK = ".lock"
_STORED: dict[str, type | UnionType] = {
    "config": dict,
    "model_origin": dict,
    "data": dict,
    "rewards": dict,
    "machine": dict,
    "num_steps": int,
    "changes": list,
    "branched_from": str | None,
    "versions": dict,
}


@dataclass(frozen=True)
class RunState:
    """An open run folder."""

    run_dir: Path
    checkpoint: CheckpointInfo | None
    """Where to continue; None: from the start."""
    notes: tuple[str, ...]
    """What the user should know: skipped checkpoints, changed versions."""
    lock: IO[str]
    """Holds the run's lock while it is open."""


def open_run(
    run_dir: Path,
    config: dict[str, Any],
    resume: str,
    *,
    identity: dict[str, Any],
    machine: dict[str, Any],
    num_steps: int,
) -> RunState:
    """Start or continue the run in `run_dir` and lock it.

    `config` is the resolved configuration as JSON, `identity` what `identity.identity_of` returns; both must be what
    the folder's run has. `machine` (device, dtype, engine, and sizes where numbers are to repeat) and `num_steps` may differ,
    and what follows is said.
    `resume` is auto, never, or a checkpoint folder (of this run, or, for a new `run_dir`, of another run with the same
    configuration). Raises UserError, with nothing overwritten, if the folder holds another run or other files, is in
    use, or cannot be written, or if the checkpoint is not whole.
    """
    run_dir = Path(run_dir)
    new = {"config": config, **identity, "machine": machine, "num_steps": num_steps}
    _check_contents(run_dir, resume)
    start = None if resume in ("auto", "never") else checkpoint_at(Path(resume))
    lock = _lock(run_dir)
    try:
        return _open_locked(run_dir, new, start, lock)
    except OSError as error:
        lock.close()
        raise UserError(f"cannot write the run folder {run_dir}: {error}") from error
    except UserError:
        lock.close()
        raise


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """`config.json` of a run: config, model_origin, data, rewards, machine, changes, branched_from, versions,
    git_revision. UserError if there is none, or none that can be read."""
    stored = _stored_run(Path(run_dir))
    if stored is None:
        raise UserError(f"{run_dir} is not a run folder: it has no {CONFIG} written by qerl")
    return stored


def _open_locked(
    run_dir: Path, new: dict[str, Any], start: CheckpointInfo | None, lock: IO[str]
) -> RunState:
    run = start.path.resolve().parent.parent if start else run_dir
    elsewhere = run.resolve() != run_dir.resolve()
    if start is not None and not elsewhere:
        checkpoint, notes = start, ()
    else:
        checkpoint, notes = find_latest_checkpoint(run_dir)
        if notes and checkpoint is None:
            notes += (f"no checkpoint in {run_dir} is whole; starting from the beginning",)
        checkpoint = checkpoint or start
    step = checkpoint.step if checkpoint else 0
    known = None
    for folder in (run, run_dir) if elsewhere else (run_dir,):
        if (found := _stored_run(folder)) is not None:
            check_same(folder, found, new)
            known = found
    if known is not None:
        notes = change_notes(known, new, step) + notes
    branched_from = str(start.path.resolve()) if start and elsewhere else None
    stored = _begin(run_dir, new, branched_from)
    remove_unfinished(run_dir)
    if start is not None and not elsewhere:
        notes += set_aside_after(run_dir, start.step)
    if checkpoint is not None and checkpoint.path.parent.parent.resolve() == run_dir.resolve():
        refresh_adapter(run_dir, checkpoint.path)
    if new["config"]["log"]["save_best"] != "off":
        refresh_best(run_dir, new["config"]["log"]["save_best"])
    _record_changes(run_dir, stored, new, step)
    return RunState(run_dir, checkpoint, notes, lock)


def _begin(run_dir: Path, new: dict[str, Any], branched_from: str | None) -> dict[str, Any]:
    """Write config.json of a new run; return what is there."""
    stored = _stored_run(run_dir)
    if stored is None:
        stored = new | {
            "changes": [],
            "branched_from": branched_from,
            "versions": versions(),
            "git_revision": git_revision(),
        }
        write_json_atomically(run_dir / CONFIG, stored)
    elif branched_from not in (None, stored["branched_from"]):
        raise UserError(
            f"{run_dir} already holds a run that did not start from {branched_from}; "
            "continue that checkpoint in a new --run-dir"
        )
    return stored


def _record_changes(run_dir: Path, stored: dict[str, Any], new: dict[str, Any], step: int) -> None:
    """config.json gets the new settings, and under `changes` what they were."""
    kept = {name: stored[name] for name in new}
    if kept == new:
        return
    fields = {name: list(pair) for name, pair in differences(kept, new).items()}
    changes = [*stored["changes"], {"after_step": step, "fields": fields}]
    write_json_atomically(run_dir / CONFIG, stored | new | {"changes": changes})


def _check_contents(run_dir: Path, resume: str) -> None:
    """Look before touching: a file in the way, somebody else's folder, or resume=never with something there."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; choose another --run-dir")
    if not run_dir.exists() or not _contents(run_dir):
        return
    if _stored_run(run_dir) is None:
        raise UserError(
            f"{run_dir} is not empty and holds no run of qerl (it has {_contents(run_dir)[0]}, ...); "
            "nothing was written, choose another --run-dir"
        )
    if resume == "never":
        raise UserError(
            f"{run_dir} already holds a run and resume is never; choose another --run-dir, "
            "or --resume auto to continue it"
        )


def _contents(run_dir: Path) -> list[str]:
    """Names in the folder, without what a process killed before it wrote config.json leaves."""
    names = (path.name for path in run_dir.iterdir())
    return sorted(name for name in names if name not in (LOCK, TMP_PREFIX + CONFIG))


def _stored_run(run_dir: Path) -> dict[str, Any] | None:
    """The folder's config.json if it is one of ours (a model folder has a file of that name too)."""
    try:
        stored = json.loads((run_dir / CONFIG).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if _looks_like_a_run(run_dir):
            raise UserError(
                f"{run_dir / CONFIG} cannot be read ({error}), so it is not known which run this is. Nothing was "
                f"changed; {TAKE_OVER}"
            ) from error
        return None
    if isinstance(stored, dict) and all(isinstance(stored.get(k), t) for k, t in _STORED.items()):
        return stored
    if _looks_like_a_run(run_dir):
        raise UserError(
            f"{run_dir / CONFIG} is damaged, or of an early version of qerl. Nothing was changed; {TAKE_OVER}"
        )
    return None


def _looks_like_a_run(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() or (run_dir / "checkpoints").is_dir()


def _lock(run_dir: Path) -> IO[str]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK).open("a")
    except OSError as error:
        raise UserError(f"cannot write the run folder {run_dir}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UserError(
            f"another process is running {run_dir}; wait for it or choose another --run-dir"
        ) from error
    return lock
