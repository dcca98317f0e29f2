"""Folders that are built once and reused: where they live, and how two processes do not trip over each other.

A folder is either absent or whole. It is built aside, under a lock, and renamed into place; a process that died
while building leaves an aside folder that the next builder removes. The lock is advisory (flock) and freed by the
operating system when its owner dies, so it is never stale.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from qerl.errors import UserError


def cache_root() -> Path:
    """Folder of everything qerl derives and can derive again: `QERL_CACHE`, or `~/.cache/qerl`."""
    chosen = os.environ.get("QERL_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "qerl"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, after `build(aside)` filled it if it did not exist.

    Safe with several processes at once: one builds, the others wait for it.

    Raises:
        UserError: the folder cannot be written (no space, no permission).
    """
    if folder.is_dir():
        return folder
    aside = folder.with_name(f".{folder.name}.building")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                build(aside)
                os.rename(aside, folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"cannot write {folder}: {error.strerror or error}; set QERL_CACHE to a folder with room"
        ) from error
    return folder
