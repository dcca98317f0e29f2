"""A checkpoint's manifest: size and sha256 of every file, its score, and a checksum of the manifest itself.

What `damage` finds nothing wrong with is, byte for byte, what was written; whatever happened to a file since is named.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Score:
    """How good a checkpoint is, for keep-best. Higher is better."""

    metric: str
    value: float


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint in folder `path`; None if every file is as the manifest says."""
    if not (path / MANIFEST).is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    step = manifest["step"]
    if path.name.isdecimal() and path.name != str(step):
        return f"it is checkpoint {step}, renamed"
    for name, written in manifest["files"].items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (actual := (path / name).stat().st_size) != written["size"]:
            return f"{name} has {actual} of {written['size']} bytes"
        try:
            changed = _sha256(path / name) != written["sha256"]
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if changed:
            return f"the bytes of {name} have changed"
    return None


def write_manifest(folder: Path, step: int, adapter_files: list[str], score: Score | None) -> None:
    """Describe the files that are in `folder` now."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {
        "step": step,
        "adapter_files": adapter_files,
        "score": None if score is None else asdict(score),
        "files": files,
    }
    text = json.dumps(manifest | {"checksum": _checksum(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text)


def read_manifest(folder: Path) -> dict[str, Any]:
    """step, adapter_files, score, files. Raises ValueError unless it is as written and names no file elsewhere."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.pop("checksum", None) != _checksum(manifest):
        raise ValueError("its checksum does not fit")
    if any(Path(name).name != name for name in (*manifest["files"], *manifest["adapter_files"])):
        raise ValueError("it names files elsewhere")
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
