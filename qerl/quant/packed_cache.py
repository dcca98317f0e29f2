"""The packed base on disk, so that a model is packed once and later starts read it.

The cache is a checkpoint as `checkpoint_writer` makes it, in compressed-tensors' canonical layout (a kernel's own layout
differs between GPUs and is made in memory), under `CACHE/packed/KEY`. KEY hashes everything that the bytes depend on:
the source's config, the names, sizes, times and last 64 KiB of its files (archives set all times alike, so two
finetunes could differ in nothing else), the rounding and the version of the packing.

A folder that does not match the checksums in its own record is thrown away and built again.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch

from qerl.cache import build_once
from qerl.quant.checkpoint_reader import Checkpoint
from qerl.quant.checkpoint_writer import (
    PACKING_FILE,
    PACKING_VERSION,
    copied_files,
    file_checksum,
    write_packed,
)
from qerl.quant.nvfp4 import Rounding
from qerl.quant.report import PackingReport, report_from_json

_TAIL_BYTES = 1 << 16


def cached_checkpoint(
    source: Checkpoint, cache_dir: Path, *, rounding: Rounding, device: torch.device
) -> tuple[Checkpoint, PackingReport]:
    """The packed form of a dense checkpoint, from the cache or built into it, and what packing it did.

    Raises UserError as `checkpoint_writer.write_packed` does.
    """

    def build(aside: Path) -> None:
        write_packed(source, aside, rounding=rounding, device=device)

    folder = cache_dir / "packed" / cache_key(source, rounding)
    report = read_whole(folder)
    if report is None:
        _discard(folder)
        build_once(folder, build)
        report = read_whole(folder)
        assert report is not None, f"{folder} was damaged while it was written"
    return Checkpoint(folder), report


def cache_key(source: Checkpoint, rounding: Rounding) -> str:
    """Name of the cache folder, e.g. qwen2-nvfp4-four_over_six-0f3a...: changes with anything that the bytes depend on."""
    files = [*source.weight_files, *copied_files(source.folder)]
    facts = {
        "version": PACKING_VERSION,
        "rounding": rounding,
        "config": source.config_data,
        "files": [_fingerprint(path) for path in files],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{source.config_data['model_type']}-nvfp4-{rounding}-{digest[:24]}"


def read_whole(folder: Path) -> PackingReport | None:
    """The folder's packing report; None unless every file has the size and checksum that its record says."""
    try:
        record = json.loads((folder / PACKING_FILE).read_text())
        for name, expected in record["files"].items():
            path = folder / name
            if (
                path.stat().st_size != expected["nbytes"]
                or file_checksum(path) != expected["crc32"]
            ):
                return None
        return report_from_json(record["report"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _fingerprint(path: Path) -> list:
    status = path.stat()
    with path.open("rb") as file:
        file.seek(max(0, status.st_size - _TAIL_BYTES))
        tail = hashlib.sha256(file.read()).hexdigest()
    return [path.name, status.st_size, status.st_mtime_ns, tail]


def _discard(folder: Path) -> None:
    """Move a damaged folder away, then delete it: nobody sees it half deleted. Another process may have done so."""
    away = folder.with_name(f".{folder.name}.damaged-{os.getpid()}")
    with suppress(FileNotFoundError):
        folder.rename(away)
        shutil.rmtree(away)
