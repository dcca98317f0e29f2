"""The run folder: which run it holds, whether this command may continue it, and that only one process writes it.

`config.json` is written when a run starts: the resolved configuration, the model's origin, the versions and the git
revision. The same command again finds the same configuration and continues. A different one is refused with the
differing fields, because a run of two halves is neither; only settings that do not change what is learnt
(`RESUMABLE_FIELDS`) may differ. A folder that is not empty and holds no run is never written to.

The lock is an flock on `.lock`: the kernel drops it with the process, so a killed run leaves nothing to clean up.
"""

import fcntl
import json
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import IO, Any

from qerl.checkpoint import (
    TMP_PREFIX,
    CheckpointInfo,
    checkpoint_at,
    find_latest_checkpoint,
    refresh_adapter,
    remove_unfinished,
    set_aside_after,
    write_json_atomically,
)
from qerl.errors import UserError

RESUMABLE_FIELDS = (
    "run_dir",
    "resume",
    "memory_gib",
    "log.",
    "reward.reward_workers",
    "reward.reward_timeout_s",
    "rollout.max_batch_size",
    "train.max_tokens_per_microbatch",
    "train.gradient_checkpointing",
)
"""Settings that may change when a run continues; a trailing dot means the whole section. The last three cut the same
work differently: what a run that ran out of memory has to lower. They change results by rounding only."""

PACKAGES = ("qerl", "torch", "transformers", "peft", "bitsandbytes", "safetensors")
MAX_FIELDS_SHOWN = 8
CONFIG = "config.json"
LOCK = ".lock"


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
    run_dir: Path, config: dict[str, Any], resume: str, *, model_origin: dict[str, Any]
) -> RunState:
    """Start or continue the run in `run_dir` and lock it.

    `config` is the resolved configuration as JSON, `model_origin` what identifies the base model's bytes; both must
    be what the folder's run has. `resume` is auto, never, or a checkpoint folder (of this run, or, for a new
    `run_dir`, of another run with the same configuration). Raises UserError, with nothing overwritten, if the folder
    holds another run or other files, is in use, or cannot be written, or if the checkpoint is not whole.
    """
    run_dir = Path(run_dir)
    _check_contents(run_dir, resume)
    start = None if resume in ("auto", "never") else checkpoint_at(Path(resume))
    lock = _lock(run_dir)
    try:
        return _open_locked(run_dir, config, model_origin, start, lock)
    except OSError as error:
        lock.close()
        raise UserError(f"cannot write the run folder {run_dir}: {error}") from error
    except UserError:
        lock.close()
        raise


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """`config.json` of a run: config, model_origin, branched_from, versions, git_revision. UserError if there is none."""
    stored = _stored_run(Path(run_dir))
    if stored is None:
        raise UserError(f"{run_dir} is not a run folder: it has no {CONFIG} written by qerl")
    return stored


def config_differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) of the fields that differ and may not; a field that one side lacks is "(absent)"."""
    old_fields, new_fields = _flatten(old), _flatten(new)
    names = sorted(old_fields.keys() | new_fields.keys())
    pairs = {n: (old_fields.get(n, "(absent)"), new_fields.get(n, "(absent)")) for n in names}
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1] and not _is_resumable(n)}


def _open_locked(
    run_dir: Path,
    config: dict[str, Any],
    model_origin: dict[str, Any],
    start: CheckpointInfo | None,
    lock: IO[str],
) -> RunState:
    run = start.path.resolve().parent.parent if start else run_dir
    elsewhere = run.resolve() != run_dir.resolve()
    identity = {"config": config, "model_origin": model_origin}
    notes: tuple[str, ...] = ()
    for folder in (run, run_dir) if elsewhere else (run_dir,):
        if (known := _stored_run(folder)) is not None:
            _check_same(folder, known, identity)
            notes = _version_notes(known["versions"])
    branched_from = str(start.path.resolve()) if start and elsewhere else None
    _write_config(run_dir, identity, branched_from)
    remove_unfinished(run_dir)
    if start is not None and not elsewhere:
        checkpoint, more = start, set_aside_after(run_dir, start.step)
    else:
        checkpoint, more = find_latest_checkpoint(run_dir)
        if more and checkpoint is None:
            more += (f"no checkpoint in {run_dir} is whole; starting from the beginning",)
    if checkpoint is not None:
        refresh_adapter(run_dir, checkpoint.path)
    return RunState(run_dir, checkpoint or start, notes + more, lock)


def _write_config(run_dir: Path, identity: dict[str, Any], branched_from: str | None) -> None:
    """Write config.json of a new run; in a run that continues, only its resumable settings can be new."""
    stored = _stored_run(run_dir)
    if stored is None:
        stored = identity | {
            "branched_from": branched_from,
            "versions": _versions(),
            "git_revision": _git_revision(),
        }
        write_json_atomically(run_dir / CONFIG, stored)
    elif branched_from not in (None, stored["branched_from"]):
        raise UserError(
            f"{run_dir} already holds a run that did not start from {branched_from}; "
            "continue that checkpoint in a new --run-dir"
        )
    elif stored["config"] != identity["config"]:
        write_json_atomically(run_dir / CONFIG, stored | {"config": identity["config"]})


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
        stored = json.loads((run_dir / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    ours = (
        isinstance(stored, dict)
        and {"config", "model_origin", "branched_from", "versions"} <= stored.keys()
    )
    return stored if ours else None


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


def _check_same(run_dir: Path, stored: dict[str, Any], new: dict[str, Any]) -> None:
    differences = config_differences(stored["config"], new["config"])
    differences |= config_differences(
        {"model_origin": stored["model_origin"]}, {"model_origin": new["model_origin"]}
    )
    if not differences:
        return
    shown = list(differences.items())[:MAX_FIELDS_SHOWN]
    text = ", ".join(f"{name}: {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in shown)
    more = len(differences) - len(shown)
    raise UserError(
        f"{run_dir} holds another run; what differs (there -> now): {text}"
        f"{f' and {more} more' if more else ''}. Repeat its settings to continue it, or start a new run "
        "with another --run-dir (--init-adapter takes over what this one learnt)"
    )


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _is_resumable(name: str) -> bool:
    return any(
        name == field or (field[-1] == "." and name.startswith(field)) for field in RESUMABLE_FIELDS
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _version_notes(old: dict[str, str | None]) -> tuple[str, ...]:
    changed = [f"{k} {old.get(k)} -> {v}" for k, v in _versions().items() if old.get(k) != v]
    if not changed:
        return ()
    return (f"versions changed since the run began, so its numbers may too: {', '.join(changed)}",)


def _git_revision() -> str | None:
    """Commit that this package's source is at, "+changes" if edited; None where it is not a git checkout's file."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if not git("ls-files", "--error-unmatch", Path(__file__).name):
        return None
    return f"{git('rev-parse', 'HEAD')}{'+changes' if git('status', '--porcelain', '-uno', '.') else ''}"
