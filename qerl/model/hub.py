"""Models of the Hugging Face hub: ask, download, or fall back to what an earlier run downloaded.

Only safetensors are downloaded. Pickled weights run code when they are read, so a repository that has nothing else
is refused. Hub errors become one line each that says what to do; a hub that does not answer is given up after
`HUB_TIMEOUT_S`, and then the Hugging Face cache is used.
"""

import shutil
from pathlib import Path

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    # Whatever httpx the hub client was built on (httpx for 1.x, httpx2 for 2.x) raises this.
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, get_session

from qerl.errors import UserError
from qerl.settings.presets import nearest_model_names

HUB_TIMEOUT_S = 6.0

ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
IGNORE_PATTERNS = ["*/*", "consolidated*"]
"""Subfolders hold exports in other formats; Mistral's consolidated* repeats the weights under other names."""

PICKLES = (".bin", ".pt", ".pth", ".gguf")


class HubUnreachableError(Exception):
    """The hub did not answer, or we were told not to ask (HF_HUB_OFFLINE)."""


def hub_info(name: str, revision: str | None) -> ModelInfo:
    """What the hub knows about a model, with file sizes, from one request.

    Raises:
        UserError: no such model or revision, no access to it, or no safetensors in it.
        HubUnreachableError: no answer.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachableError("HF_HUB_OFFLINE is set")
    try:
        info = HfApi().model_info(
            name, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise _gated(name) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r} on the Hugging Face hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"unknown model {name!r}: no folder, and not on the Hugging Face hub (or private: "
            f"`hf auth login`); {nearest_model_names(name)}"
        ) from error
    except (HTTPError, OSError) as error:
        raise HubUnreachableError(_one_line(error)) from error
    suffixes = {Path(file.rfilename).suffix for file in info.siblings or ()}
    if ".safetensors" not in suffixes:
        present = ", ".join(sorted(suffixes.intersection(PICKLES))) or "no weights"
        raise UserError(f"{name} has no safetensors but {present}; other formats are not read")
    return info


def ask_hub() -> None:
    """One small request, to see whether the hub answers. Raises HubUnreachableError when it does not."""
    if constants.HF_HUB_OFFLINE:
        raise HubUnreachableError("HF_HUB_OFFLINE is set")
    try:
        url = f"{constants.ENDPOINT}/api/models?limit=1"
        get_session().get(url, timeout=HUB_TIMEOUT_S).raise_for_status()
    except (HTTPError, OSError) as error:
        raise HubUnreachableError(_one_line(error)) from error


def missing_files(name: str, info: ModelInfo) -> tuple[tuple[str, int], ...]:
    """(file name, bytes) of each wanted file that is not in the Hugging Face cache."""
    wanted = filter_repo_objects(
        info.siblings or (),
        allow_patterns=ALLOW_PATTERNS,
        ignore_patterns=IGNORE_PATTERNS,
        key=lambda file: file.rfilename,
    )
    return tuple(
        (file.rfilename, file.size or 0)
        for file in wanted
        if not isinstance(try_to_load_from_cache(name, file.rfilename, revision=info.sha), str)
    )


def download(name: str, revision: str | None, info: ModelInfo) -> Path:
    """Fetch what is missing of a model; returns its folder in the Hugging Face cache, named by its commit.

    Raises:
        UserError: no space, no access, or the connection broke.
    """
    cache = Path(constants.HF_HUB_CACHE)
    num_bytes = sum(size for _, size in missing_files(name, info))
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if num_bytes > free:
        raise UserError(
            f"no disk space: {name} needs {num_bytes / 1e9:.1f} GB and {cache} has {free / 1e9:.1f} GB "
            "free; set HF_HOME to a folder with room"
        )
    try:
        # By its name, not by info.sha: only then does the cache learn what the name points to, for later without a hub.
        return _snapshot(name, revision, local_files_only=False)
    except GatedRepoError as error:
        raise _gated(name) from error
    except (HTTPError, OSError) as error:
        raise UserError(
            f"the download of {name} failed ({_one_line(error)}); the same command again continues it"
        ) from error


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The model's folder in the Hugging Face cache, without asking the hub; None if it is not there."""
    try:
        folder = _snapshot(name, revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    # Another tool may have fetched only the tokenizer.
    return folder if (folder / "config.json").is_file() else None


def _snapshot(name: str, revision: str | None, *, local_files_only: bool) -> Path:
    folder = snapshot_download(
        name,
        revision=revision,
        allow_patterns=ALLOW_PATTERNS,
        ignore_patterns=IGNORE_PATTERNS,
        local_files_only=local_files_only,
    )
    return Path(folder)


def _gated(name: str) -> UserError:
    return UserError(
        f"{name} is gated: accept its licence at huggingface.co/{name}, then `hf auth login` or set HF_TOKEN"
    )


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
