"""Arms of a comparison: one training configuration, several values of what is compared. Imports no torch.

An arm is a name and the settings that make it different. `FORMAT` and `FORMAT+aqn` (nvfp4, nf4, bf16, nvfp4+aqn, ...)
are known; a settings file may add to these and define others:

    model = "quickstart"            # everything outside the two tables is what all arms share

    [compare]
    arms = ["nvfp4+aqn", "nf4", "late-clean"]
    seeds = [0, 1, 2]
    baseline = "nf4"                # default: nf4, else bf16, else the first arm
    target_accuracy = [0.5]         # "steps and minutes to an accuracy of"; default: halfway from start to best

    [arms.nf4]
    learning_rate = 2e-4            # beside what nf4 is

    [arms.late-clean]
    like = "nvfp4+aqn"
    noise.stop_at = 0.6

Every run of a comparison is an ordinary training run with a command line of its own, so each can be repeated alone.
"""

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.layers import Layer, Setting, build_config, layer_of, stack
from qerl.settings.presets import read_toml

FORMATS = ("nvfp4", "nf4", "bf16")
KNOWN_ARMS: dict[str, dict[str, str]] = {
    **{name: {"quant": name, "noise.scope": "off"} for name in FORMATS},
    **{f"{name}+aqn": {"quant": name, "noise.scope": "rollout"} for name in FORMATS},
}
DEFAULT_ARMS = ("nvfp4+aqn", "nvfp4", "nf4", "bf16")
BASELINES = ("nf4", "bf16")
ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
COMPARE_KEYS = ("arms", "seeds", "baseline", "target_accuracy")


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    run_dir: Path
    words: tuple[str, ...]
    """Arguments of `python -m qerl.train`, complete: no file but presets is needed to repeat the run."""

    @property
    def name(self) -> str:
        return f"{self.arm}/seed-{self.seed}"

    @property
    def command(self) -> str:
        return shlex.join(("python", "-m", "qerl.train", *self.words))


@dataclass(frozen=True)
class Comparison:
    """What is compared, and where it is kept."""

    folder: Path
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    target_accuracy: tuple[float, ...]
    """Empty: one is chosen from the results."""
    differences: dict[str, dict[str, Any]]
    """Arm -> the settings that make it."""
    config: Config
    """Of the first run."""
    runs: tuple[PlannedRun, ...]
    """Seed by seed, so that an interrupted comparison has whole seeds."""


def make_comparison(
    flags: Layer, config_file: str | None, options: Mapping[str, Any]
) -> Comparison:
    """Arms x seeds of a settings file and flags, each validated as a whole config.

    `options` may hold the keys of the [compare] table, as text (a, b) or lists; they override the file's. Raises
    UserError for unknown arms, settings that an arm would override, and all that is wrong with a resulting config.
    """
    tree = read_toml(Path(config_file)) if config_file else {}
    table = _compare_table(tree.pop("compare", {}), config_file)
    table |= {key: value for key, value in options.items() if value is not None}
    own = _own_arms(tree.pop("arms", {}), config_file)
    shared = stack([layer_of(tree, str(config_file)), flags])
    if "seed" in shared:
        raise UserError(f"{shared['seed'].origin}: a comparison has several; give --seeds 0,1,2")
    folder = shared.pop("run_dir", None)
    names = _texts(table.get("arms", DEFAULT_ARMS), "arms")
    arms = {name: _settings_of(name, own) for name in names}
    seeds = _seeds(table.get("seeds", (0, 1, 2)))
    for path in flags:
        setter = next((name for name, layer in arms.items() if path in layer), None)
        if setter:
            raise UserError(f"{flags[path].origin}: arm {setter} sets {path} itself")
    configs = {name: _config(name, [shared, layer], seeds[0]) for name, layer in arms.items()}
    first = next(iter(configs.values()))
    root = Path(folder.value) if folder else _default_folder(str(shared["model"].value), first)
    return Comparison(
        folder=root,
        arms=tuple(arms),
        seeds=seeds,
        baseline=_baseline(table.get("baseline"), list(arms)),
        target_accuracy=_targets(table.get("target_accuracy", ())),
        differences={
            name: {path: setting.value for path, setting in layer.items()}
            for name, layer in arms.items()
        },
        config=first,
        runs=tuple(
            _planned(root, name, seed, stack([shared, arms[name]]))
            for seed in seeds
            for name in arms
        ),
    )


def words_of(layer: Layer) -> tuple[str, ...]:
    """A layer of settings as command line words, sorted by name, so that equal settings are equal words."""
    return tuple(
        f"--{path.replace('_', '-')}={_written(setting.value)}"
        for path, setting in sorted(layer.items())
    )


def _planned(root: Path, arm: str, seed: int, layer: Layer) -> PlannedRun:
    run_dir = root / arm / f"seed-{seed}"
    own = {"seed": Setting(seed, "--seeds"), "run_dir": Setting(str(run_dir), "the comparison")}
    return PlannedRun(arm, seed, run_dir, words_of(layer | own))


def _written(value: Any) -> str:
    if isinstance(value, bool | dict | list | tuple):
        return json.dumps(value)
    return str(value)


def _config(name: str, layers: Sequence[Layer], seed: int) -> Config:
    try:
        return build_config(stack(layers) | {"seed": Setting(seed, "--seeds")})[0]
    except UserError as error:
        raise UserError(f"arm {name}: {error}") from error


def _compare_table(table: Any, file: str | None) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UserError(f"{file}: compare is a table, [compare]")
    for key in table:
        if key not in COMPARE_KEYS:
            near = difflib.get_close_matches(key, COMPARE_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMPARE_KEYS)}"
            raise UserError(f"{file}: no compare.{key}; {hint}")
    return dict(table)


def _own_arms(tables: Any, file: str | None) -> dict[str, tuple[str | None, Layer]]:
    """Name -> (the arm it is like, its settings)."""
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UserError(f"{file}: arms are tables, [arms.NAME]; which of them run is compare.arms")
    own = {}
    for name, table in tables.items():
        like = table.get("like")
        settings = {key: value for key, value in table.items() if key != "like"}
        own[name] = (like, layer_of(settings, f"{file}: arms.{name}"))
    return own


def _settings_of(
    name: str, own: Mapping[str, tuple[str | None, Layer]], above: tuple[str, ...] = ()
) -> Layer:
    """What an arm sets: its own table over the arm that it is like, or over the known arm of its name."""
    if not ARM_NAME.fullmatch(name):
        raise UserError(f"arm {name!r}: a name has letters, digits, '.', '_', '+' and '-'")
    if name in above:
        raise UserError(f"arm {name} is like itself: {' -> '.join((*above, name))}")
    known = {
        path: Setting(value, f"arm {name}") for path, value in KNOWN_ARMS.get(name, {}).items()
    }
    if name not in own:
        if not known:
            there = [*KNOWN_ARMS, *own]
            near = difflib.get_close_matches(name, there, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there)}"
            raise UserError(f"no arm {name!r}; {hint} A settings file defines others: [arms.NAME]")
        return known
    like, layer = own[name]
    below = known if like is None else _settings_of(like, own, (*above, name))
    settings = stack([below, layer])
    for path in ("seed", "run_dir"):
        if path in settings:
            raise UserError(f"{settings[path].origin}: the comparison sets {path} itself")
    return settings


def _baseline(name: str | None, arms: Sequence[str]) -> str:
    if name is None:
        return next((arm for arm in BASELINES if arm in arms), arms[0])
    if name not in arms:
        raise UserError(f"baseline {name} is not among the arms {', '.join(arms)}")
    return name


def _texts(value: Any, what: str) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    texts = [str(part).strip() for part in parts if str(part).strip()]
    if not texts or len(set(texts)) < len(texts):
        raise UserError(f"{what} = {value!r}: give at least one, each once, with commas between")
    return texts


def _seeds(value: Any) -> tuple[int, ...]:
    texts = _texts([value] if isinstance(value, int) else value, "seeds")
    if not all(text.isdecimal() for text in texts):
        raise UserError(f"seeds = {value!r}: give whole numbers with commas between, such as 0,1,2")
    return tuple(int(text) for text in texts)


def _targets(value: Any) -> tuple[float, ...]:
    if isinstance(value, int | float):
        value = [value]
    try:
        targets = tuple(float(text) for text in (_texts(value, "target_accuracy") if value else ()))
    except ValueError as error:
        raise UserError(f"target_accuracy = {value!r}: give numbers such as 0.5") from error
    if not all(0 < target <= 1 for target in targets):
        raise UserError(f"target_accuracy = {value!r}: accuracies lie between 0 and 1")
    return targets


def _default_folder(model: str, config: Config) -> Path:
    model = model.rstrip("/").rpartition("/")[2].replace(":", "-")
    task = (config.task.name or "dataset").replace("/", "-")
    return Path("runs") / f"compare-{model}-{task}".lower()
