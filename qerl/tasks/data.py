"""The task `dataset`: any file, folder or Hugging Face data set, read with the `datasets` library.

Files and folders need no network. A folder's splits are its files' names (train.jsonl, test.jsonl); other layouts are
left to `datasets`. Without a held-out split a tenth of the training rows is held out by a hash of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import UserError
from qerl.tasks.problems import (
    Row,
    Task,
    find_columns,
    is_held_out,
    prompt_hash,
    rows_to_problems,
    take,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from qerl.config import TaskConfig

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
HELD_OUT_ONE_IN = 10
SAVED_MARKERS = ("dataset_dict.json", "state.json")
"""Files that `datasets`' save_to_disk leaves in a folder."""


def load_dataset_task(
    config: TaskConfig,
    *,
    name: str | None = None,
    gold: Callable[[str, str], str] | None = None,
    reward_funcs: tuple[str, ...] = ("math",),
    system_prompt: str | None = None,
) -> Task:
    """The task of a data set. `gold` turns the answer column's text into the gold answer (see `rows_to_problems`)."""
    if config.path is None:
        raise UserError(
            "task dataset needs task.path: a file, a folder or a Hugging Face data set id"
        )
    splits = read_splits(config.path, config)
    train_rows = _split(splits, config.train_split, "train_split", config.path)
    test_split = config.test_split
    if test_split is None and "test" in splits and config.train_split != "test":
        test_split = "test"
    columns = find_columns(train_rows, config.prompt_column, config.answer_column)
    train, num_dropped = rows_to_problems(train_rows, config.train_split, columns, gold)
    notes = []
    if test_split is None:
        test = [problem for problem in train if is_held_out(problem.prompt, HELD_OUT_ONE_IN)]
        train = [problem for problem in train if not is_held_out(problem.prompt, HELD_OUT_ONE_IN)]
        notes.append("no test split: a tenth of the problems is held out, by a hash of the text")
    else:
        test_rows = _split(splits, test_split, "test_split", config.path)
        test, num_dropped_test = rows_to_problems(test_rows, test_split, columns, gold)
        num_dropped += num_dropped_test
        held_out = {prompt_hash(problem.prompt) for problem in test}
        num_before = len(train)
        train = [problem for problem in train if prompt_hash(problem.prompt) not in held_out]
        if num_before > len(train):
            notes.append(
                f"{num_before - len(train)} training rows dropped: their prompt is held out too"
            )
    if num_dropped:
        notes.append(f"{num_dropped} rows dropped: their prompt is empty")
    if not train:
        raise UserError(f"{config.path}: no training problems in split {config.train_split!r}")
    train = take(train, config.train_size, "task.train_size")
    test = take(test, config.test_size, "task.test_size")
    name = name or f"dataset {config.path}"
    notes.insert(0, f"{name}: {len(train)} problems to train on, {len(test)} held out")
    if columns.answer is None:
        reward_funcs = ()
    elif gold is None and all("####" in (problem.answer or "") for problem in train):
        notes.append(
            "the answers hold '####': task gsm8k takes what follows it, task dataset takes them whole"
        )
    return Task(name, train, test, reward_funcs, system_prompt, tuple(notes))


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
    except (OSError, ValueError, _dataset_error()) as error:
        raise UserError(_explain(path, local.exists(), error)) from error


def _read_local(path: Path, train_split: str) -> DatasetDict:
    import datasets

    if path.is_file():
        files = {"train": path}
    elif any((path / marker).exists() for marker in SAVED_MARKERS):
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

    return datasets.load_dataset(path, config.config, revision=config.revision)


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


def _split(splits: dict[str, Any], name: str, option: str, path: str) -> list[Row]:
    if name not in splits:
        raise UserError(
            f"task.{option}: {path} has no split {name!r}; there are {', '.join(splits)}"
        )
    if not splits[name]:
        raise UserError(f"{path}: split {name!r} is empty")
    return splits[name]
