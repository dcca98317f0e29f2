"""Reading rows with the `datasets` library: files, folders, and data sets of the Hugging Face hub.

Files and folders need no network, and no code in them is ever run. A folder's splits are its files' names (train.jsonl,
test.jsonl); other layouts are left to `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qerl.errors import UserError
from qerl.tasks.problems import Row

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from qerl.config import TaskConfig

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
HUB_TIMEOUT_S = 6.0
SAVED_MARKERS = ("dataset_dict.json", "state.json")
"""Files that `datasets`' save_to_disk leaves in a folder."""


def read_splits(path: str, config: TaskConfig) -> dict[str, list[Row]]:
    """Rows of each split of a file, a folder or a hub data set. Raises UserError for what cannot be read."""
    local = Path(path).expanduser()
    if not local.exists() and (local.suffix in READERS or path.startswith((".", "/", "~"))):
        raise UserError(f"no file or folder {path}")
    if local.is_file() and local.suffix not in READERS:
        raise UserError(
            f"{path}: cannot read {local.suffix or 'this kind of'} files, only {', '.join(READERS)}"
        )
    try:
        with _quiet(local.exists()):
            splits = (
                _read_local(local, config.train_split)
                if local.exists()
                else _read_hub(path, config)
            )
            return {str(name): split.to_list() for name, split in splits.items()}
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, _dataset_error()) as error:  # RuntimeError: a script
        raise UserError(_explain(path, local.exists(), error)) from error


def _read_local(path: Path, train_split: str) -> DatasetDict:
    import datasets

    if path.is_file():
        files = {"train": path}
    elif any((path / marker).exists() for marker in SAVED_MARKERS):
        _check_saved(path)
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.DatasetDict):
            return saved
        return datasets.DatasetDict({"train": saved})
    else:
        files = {file.stem: file for file in sorted(path.iterdir()) if file.suffix in READERS}
        if train_split not in files and len(files) == 1:
            files = {"train": next(iter(files.values()))}
        elif train_split not in files:
            return datasets.load_dataset(str(path))
    return datasets.DatasetDict({split: _read_file(file) for split, file in files.items()})


def _check_saved(path: Path) -> None:
    """Raise UserError where a saved data set names files outside its folder, which `datasets` would read."""
    for state in path.rglob("state.json"):
        for entry in json.loads(state.read_text(encoding="utf-8")).get("_data_files", ()):
            file = state.parent / entry["filename"]
            if not file.resolve().is_relative_to(path.resolve()):
                raise UserError(f"{state} names a file outside its folder: {entry['filename']}")


def _read_file(path: Path) -> Dataset:
    import datasets

    reader = READERS[path.suffix]
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train")
    except (StopIteration, ValueError) as error:  # what `datasets` raises for a file without rows
        if path.stat().st_size == 0 or "corresponds to no data" in str(error):
            raise UserError(f"{path} is empty") from error
        raise


def _read_hub(path: str, config: TaskConfig) -> DatasetDict:
    import datasets

    with _ask_hub(path, config.revision):
        return datasets.load_dataset(path, config.config, revision=config.revision)


@contextmanager
def _ask_hub(path: str, revision: str | None) -> Iterator[None]:
    """Ask once, with a short limit, whether the hub has the data set; where it does not answer, only the cache is read.

    `datasets` would try for half a minute, with a page of messages. Raises UserError for what the hub does not give.
    """
    from datasets import config as datasets_config
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (as in model/hub.py)
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    was_offline = datasets_config.HF_HUB_OFFLINE
    if not was_offline:
        try:
            HfApi().dataset_info(path, revision=revision, timeout=HUB_TIMEOUT_S)
        except GatedRepoError as error:
            raise UserError(
                f"{path} is given out after one agrees to its terms: open https://huggingface.co/datasets/{path}, then "
                "`hf auth login`"
            ) from error
        except RevisionNotFoundError as error:
            raise UserError(f"{path} has no revision {revision!r} on the hub") from error
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise UserError(
                f"task.path {path!r}: no file or folder, and no data set of the Hugging Face hub (or a private one: "
                "`hf auth login`)"
            ) from error
        except (HTTPError, OSError):
            datasets_config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets_config.HF_HUB_OFFLINE = was_offline


def _dataset_error() -> type[Exception]:
    from datasets.exceptions import DatasetsError

    return DatasetsError


def _explain(path: str, is_local: bool, error: Exception) -> str:
    reason = " ".join(str(error.__cause__ or error).split())[:300]
    if is_local:
        return f"{path} cannot be read: {reason}"
    return (
        f"{path} is no local file, and not to be had from the Hugging Face hub: {reason}; "
        "a copy on this machine is given with --task.path"
    )


@contextmanager
def _quiet(is_local: bool) -> Iterator[None]:
    """No progress bars for local files; a download keeps them."""
    import datasets

    hide = is_local and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()
