"""Checkpoints: written aside, flushed to disk, renamed into place; read only when every byte is as it was written.

    RUN/checkpoints/STEP/adapter_model.safetensors, adapter_config.json    the adapter, in PEFT's format
                         optimizer.safetensors, state.json                 the rest of the training state
                         manifest.json                                     size and sha256 of every other file
    RUN/adapter/                                                           copy of the newest checkpoint's adapter
    RUN/best/                                                              copy of the best one's, if one is scored

A process can be killed at any instant. A checkpoint is written in `checkpoints/.tmp-STEP` and only a finished one is
renamed to `checkpoints/STEP`, so what stands there is whole; the manifest, which has a checksum of its own, catches
what happens to it later (a cut copy, a failing disk). Older ones are deleted only after the new one is in place, and
the best one never: which it is stands in the manifests, nowhere else, so it cannot get out of step with them.

`adapter/` must be loadable at every instant, also while it is replaced and on file systems without symbolic links.
So it appears by one rename, and later its files are replaced one by one, each by a rename. In between it has a new
configuration beside old weights, which differ in nothing that matters: within a run the configuration never changes.

Tensors are stored with safetensors and the rest as JSON. Nothing is pickled.
"""

import filecmp
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

from qerl.errors import RunError, UserError
from qerl.manifest import Score, damage, read_manifest, write_manifest

GIB = 2**30
ADAPTER = "adapter"
BEST = "best"
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
    score: Score | None = None,
) -> Path:
    """Write checkpoint `step`, refresh `adapter/`, delete the oldest beyond `save_total_limit`; return its folder.

    `write_adapter(folder)` writes the adapter in PEFT's format (`save_pretrained`), about `adapter_bytes`. `state` is
    JSON. With a `score`, the best checkpoint by that metric is kept too and `best/` is its adapter. If a whole
    checkpoint of this step exists it is kept. Raises RunError if there is not enough disk space or a file cannot be
    written; the checkpoints and `adapter/` are then as they were.
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
            write_manifest(aside, step, adapter_files, score)
            _put_in_place(aside, target)
        refresh_adapter(run_dir, target)
        best = find_best_checkpoint(run_dir, score.metric) if score else None
        if best is not None and best[0].path == target:
            refresh_adapter(run_dir, target, BEST)
        _prune(folder, save_total_limit, None if best is None else best[0].path)
    except (OSError, SafetensorError, UserError) as error:
        _remove_after_failure(run_dir)
        raise RunError(
            "checkpoint",
            f"cannot save checkpoint {step} in {folder}: {error}. Earlier checkpoints are intact; "
            "make room or fix the folder, then give the same command to continue",
        ) from error
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


def find_best_checkpoint(run_dir: Path, metric: str) -> tuple[CheckpointInfo, float] | None:
    """The whole checkpoint with the highest score by `metric`, the earliest of equals, and its score; None: no such."""
    best = None
    for step, path in reversed(_numbered(Path(run_dir) / "checkpoints")):
        if damage(path) is not None:
            continue
        score = read_manifest(path)["score"]
        if score is None or score["metric"] != metric:
            continue
        if best is None or score["value"] > best[1]:
            best = CheckpointInfo(step, path), score["value"]
    return best


def checkpoint_at(path: Path) -> CheckpointInfo:
    """The checkpoint in folder `path`; raises UserError if it is not a whole one."""
    path = Path(path)
    problem = damage(path)
    if problem is not None:
        raise UserError(f"{path} is not a whole checkpoint: {problem}")
    return CheckpointInfo(read_manifest(path)["step"], path)


def load_checkpoint(info: CheckpointInfo) -> Checkpoint:
    """Read a checkpoint's tensors (on the CPU) and state; the adapter is left to PEFT, in `adapter_dir`."""
    return Checkpoint(
        step=info.step,
        adapter_dir=info.path,
        optimizer_tensors=load_file(info.path / OPTIMIZER),
        state=json.loads((info.path / STATE).read_text()),
    )


def refresh_adapter(run_dir: Path, checkpoint: Path, name: str = ADAPTER) -> None:
    """Make `adapter/` (or `best/`) the adapter of the checkpoint in folder `checkpoint`."""
    adapter = Path(run_dir) / name
    names = read_manifest(checkpoint)["adapter_files"]
    first_time = not adapter.exists()
    aside = adapter.with_name(TMP_PREFIX + adapter.name) if first_time else adapter
    aside.mkdir(exist_ok=True)
    for name in names:
        if (aside / name).is_file() and filecmp.cmp(checkpoint / name, aside / name, shallow=False):
            continue
        copy = aside / f"{TMP_PREFIX}{name}"
        shutil.copyfile(checkpoint / name, copy)
        flush_to_disk(copy)
        os.replace(copy, aside / name)
    flush_to_disk(aside)
    if first_time:
        aside.rename(adapter)
    flush_to_disk(adapter.parent)


def refresh_best(run_dir: Path, metric: str) -> None:
    """Make `best/` the adapter of the best checkpoint there is: a kill may have come before it, or others set aside."""
    best = find_best_checkpoint(run_dir, metric)
    if best is not None:
        refresh_adapter(run_dir, best[0].path, BEST)
    elif (Path(run_dir) / BEST).exists():
        shutil.rmtree(Path(run_dir) / BEST)


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
    for name in (ADAPTER, BEST):
        for path in Path(run_dir).glob(f"{TMP_PREFIX}{name}"):
            shutil.rmtree(path)
        for path in (Path(run_dir) / name).glob(f"{TMP_PREFIX}*"):
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


def _put_in_place(aside: Path, target: Path) -> None:
    for path in aside.iterdir():
        flush_to_disk(path)
    flush_to_disk(aside)
    if target.exists():  # damaged, or it would have been kept
        shutil.rmtree(target)
    aside.rename(target)
    flush_to_disk(target.parent)


def _prune(folder: Path, save_total_limit: int, best: Path | None) -> None:
    """Keep the newest `save_total_limit` whole checkpoints and the best; delete all else that is older than those."""
    num_whole = 0
    for _, path in _numbered(folder):
        if num_whole >= save_total_limit:
            if path != best:
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
