"""Checkpoints: written aside, flushed to disk, renamed into place; read only when every byte is as it was written.

    RUN/checkpoints/STEP/adapter_model.safetensors, adapter_config.json    the adapter, in PEFT's format
                         optimizer.safetensors, state.json                 the rest of the training state
                         manifest.json                                     size and sha256 of every other file
    RUN/adapter/                                                           copy of the newest checkpoint's adapter

A process can be killed at any instant. A checkpoint is written in `checkpoints/.tmp-STEP` and only a finished one is
renamed to `checkpoints/STEP`, so what stands there is whole; the manifest catches what happens to it later (a cut
copy, a failing disk). Older ones are deleted only after the new one is in place.

`adapter/` must be loadable at every instant, also while it is replaced and on file systems without symbolic links.
So it appears by one rename, and later its files are replaced one by one, each by a rename. In between it has a new
configuration beside old weights, which differ in nothing that matters: within a run the configuration never changes.

Tensors are stored with safetensors and the rest as JSON. Nothing is pickled.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl.errors import UserError

GIB = 2**30
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
TMP_PREFIX = ".tmp-"
FREE_RESERVE_BYTES = 64 * 2**20
"""Space left free beside a checkpoint, for metrics and completions."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint on disk."""

    step: int
    """Optimizer steps done when it was written."""
    path: Path
    """Folder; PEFT can load the adapter from it."""


@dataclass(frozen=True)
class Checkpoint:
    """What `save_checkpoint` was given."""

    step: int
    adapter_dir: Path
    optimizer_tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    run_dir: Path,
    step: int,
    *,
    write_adapter: Callable[[Path], None],
    adapter_bytes: int,
    optimizer_tensors: dict[str, Tensor],
    state: dict[str, Any],
    save_total_limit: int,
) -> Path:
    """Write checkpoint `step`, refresh `adapter/`, delete the oldest beyond `save_total_limit`; return its folder.

    `write_adapter(folder)` writes the adapter in PEFT's format (`save_pretrained`), about `adapter_bytes`. `state` is
    JSON. If a whole checkpoint of this step exists it is kept. Raises UserError if there is not enough disk space or
    a file cannot be written; the checkpoints and `adapter/` are then as they were.
    """
    run_dir = Path(run_dir)
    folder = run_dir / "checkpoints"
    target = folder / str(step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(run_dir)
        if damage(target) is not None:
            optimizer_bytes = sum(t.numel() * t.element_size() for t in optimizer_tensors.values())
            check_disk_space(folder, optimizer_bytes + 2 * adapter_bytes)
            aside = folder / f"{TMP_PREFIX}{step}"
            aside.mkdir()
            write_adapter(aside)
            adapter_files = sorted(path.name for path in aside.iterdir())
            save_file(optimizer_tensors, aside / OPTIMIZER)
            (aside / STATE).write_text(json.dumps(state, indent=1))
            _write_manifest(aside, step, adapter_files)
            _put_in_place(aside, target)
        refresh_adapter(run_dir, target)
    except (OSError, SafetensorError) as error:
        _remove_after_failure(run_dir)
        raise UserError(
            f"cannot save checkpoint {step} in {folder}: {error}. Earlier checkpoints are intact; "
            "make room or fix the folder, then run the same command to continue"
        ) from error
    _prune(folder, save_total_limit)
    return target


def find_latest_checkpoint(run_dir: Path) -> tuple[CheckpointInfo | None, tuple[str, ...]]:
    """The newest whole checkpoint (None: no such), and a sentence for each newer one that had to be skipped."""
    notes = []
    for step, path in _numbered(Path(run_dir) / "checkpoints"):
        problem = damage(path)
        if problem is None:
            return CheckpointInfo(step, path), tuple(notes)
        notes.append(f"checkpoint {step} is damaged ({problem}) and was skipped")
    return None, tuple(notes)


def checkpoint_at(path: Path) -> CheckpointInfo:
    """The checkpoint in folder `path`; raises UserError if it is not a whole one."""
    path = Path(path)
    problem = damage(path)
    if problem is not None:
        raise UserError(f"{path} is not a whole checkpoint: {problem}")
    return CheckpointInfo(json.loads((path / MANIFEST).read_text())["step"], path)


def load_checkpoint(info: CheckpointInfo) -> Checkpoint:
    """Read a checkpoint's tensors (on the CPU) and state; the adapter is left to PEFT, in `adapter_dir`."""
    return Checkpoint(
        step=info.step,
        adapter_dir=info.path,
        optimizer_tensors=load_file(info.path / OPTIMIZER),
        state=json.loads((info.path / STATE).read_text()),
    )


def refresh_adapter(run_dir: Path, checkpoint: Path) -> None:
    """Make `adapter/` the adapter of the checkpoint in folder `checkpoint`."""
    adapter = Path(run_dir) / "adapter"
    names = json.loads((checkpoint / MANIFEST).read_text())["adapter_files"]
    first_time = not adapter.exists()
    aside = adapter.with_name(TMP_PREFIX + adapter.name) if first_time else adapter
    aside.mkdir(exist_ok=True)
    for name in names:
        copy = aside / f"{TMP_PREFIX}{name}"
        shutil.copyfile(checkpoint / name, copy)
        flush_to_disk(copy)
        os.replace(copy, aside / name)
    flush_to_disk(aside)
    if first_time:
        aside.rename(adapter)
    flush_to_disk(adapter.parent)


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint in folder `path`; None if every file is as the manifest says."""
    if not (path / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        step, files = manifest["step"], manifest["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    if path.name.isdecimal() and path.name != str(step):
        return f"it is checkpoint {step}, renamed"
    for name, (size, sha256) in expected.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (actual := (path / name).stat().st_size) != size:
            return f"{name} has {actual} of {size} bytes"
        if _sha256(path / name) != sha256:
            return f"the bytes of {name} have changed"
    return None


def set_aside_after(run_dir: Path, step: int) -> tuple[str, ...]:
    """Rename the checkpoints later than `step`, where a run is told to go on from; say what was renamed."""
    notes = []
    for later, path in _numbered(Path(run_dir) / "checkpoints"):
        if later <= step:
            break
        target = path.with_name(f"superseded-{later}-{time.strftime('%Y%m%d-%H%M%S')}")
        path.rename(target)
        notes.append(f"checkpoint {later} comes after the one resumed from; renamed to {target}")
    return tuple(notes)


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raise UserError unless the disk of `folder` (which may not exist yet) has room for `needed_bytes`."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + FREE_RESERVE_BYTES:
        raise UserError(
            f"not enough disk space for {folder}: {needed_bytes / GIB:.2f} GiB for checkpoints and "
            f"{FREE_RESERVE_BYTES / GIB:.2f} GiB in reserve are needed, {free / GIB:.2f} GiB is free; "
            "make room or choose another --run-dir"
        )


def remove_unfinished(run_dir: Path) -> None:
    """Delete what a killed process left half written. Only for the process that holds the run's lock."""
    for path in (Path(run_dir) / "checkpoints").glob(f"{TMP_PREFIX}*"):
        shutil.rmtree(path)
    for path in Path(run_dir).glob(f"{TMP_PREFIX}adapter*"):
        shutil.rmtree(path)
    for path in (Path(run_dir) / "adapter").glob(f"{TMP_PREFIX}*"):
        path.unlink()


def write_json_atomically(path: Path, value: Any) -> None:
    """Replace the file `path` with `value` as JSON: at every instant it is the old or the new one, whole."""
    aside = path.with_name(TMP_PREFIX + path.name)
    aside.write_text(json.dumps(value, indent=1) + "\n")
    flush_to_disk(aside)
    os.replace(aside, path)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder (whose entries, such as renames, are then safe from a power cut)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_manifest(folder: Path, step: int, adapter_files: list[str]) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"step": step, "adapter_files": adapter_files, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _put_in_place(aside: Path, target: Path) -> None:
    for path in aside.iterdir():
        flush_to_disk(path)
    flush_to_disk(aside)
    if target.exists():  # damaged, or it would have been kept
        shutil.rmtree(target)
    aside.rename(target)
    flush_to_disk(target.parent)


def _prune(folder: Path, save_total_limit: int) -> None:
    """Keep the newest `save_total_limit` whole checkpoints; delete everything older than the oldest of them."""
    num_whole = 0
    for _, path in _numbered(folder):
        if num_whole >= save_total_limit:
            shutil.rmtree(path)
        elif damage(path) is None:
            num_whole += 1


def _remove_after_failure(run_dir: Path) -> None:
    """The error that led here is the one to report: a read-only disk fails here too, and nothing is lost by it."""
    try:
        remove_unfinished(run_dir)
    except OSError:
        return


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders, newest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(((int(p.name), p) for p in paths if p.name.isdecimal()), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
