"""Arguments of commands that look at a model or a finished run: a run folder, or --model with or without --adapter."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.cli import ExtraFlag, parse_arguments
from qerl.settings.layers import Layer, Setting, build_config

RUN = ExtraFlag("run", "Run folder: its settings, and its adapter.", positional=True)
ADAPTER = ExtraFlag(
    "adapter",
    "Folder of a PEFT adapter, or a run folder: its adapter and settings.",
    takes_value=True,
)


def parse_run_arguments(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    extra_flags: Sequence[ExtraFlag] = (),
    examples: Sequence[str] = (),
) -> tuple[Config, Namespace, Path | None]:
    """Parse; returns the config, the other arguments and the adapter's folder (None: the base alone).

    With a run folder, given as RUN or as --adapter, the config is the run's, and flags override it: what was trained is
    asked as it was trained. Raises UserError for a folder that is no run and for an adapter that is not there.
    """
    argv = sys.argv[1:] if argv is None else argv
    names_model = any(word.partition("=")[0] == "--model" for word in argv)
    layer, options = parse_arguments(
        argv,
        prog=prog,
        description=description,
        extra_flags=(ADAPTER, *extra_flags) if names_model else (RUN, ADAPTER, *extra_flags),
        examples=examples,
    )
    run = None if names_model else options.run
    if run is None and options.adapter is not None and _is_run(Path(options.adapter)):
        run = options.adapter
    if run is None and not names_model and options.config is None:
        raise UserError(f"which model? {prog} RUN takes a run folder; or give --model NAME")
    base = None
    if run is not None:
        from qerl.run_folder import read_run_config

        base = read_run_config(Path(run))["config"]
        layer = _with_the_model_of_a_preset(layer)
    config, _ = build_config(layer, options.config, base)
    folder = options.adapter or run
    return config, options, None if folder is None else _adapter_folder(Path(folder))


def _is_run(folder: Path) -> bool:
    return (folder / "adapter").is_dir() and (folder / "config.json").is_file()


def _with_the_model_of_a_preset(layer: Layer) -> Layer:
    """A preset's name stands for its model only: its other settings would override the run's."""
    if "model" not in layer:
        return layer
    config, preset = build_config({"model": layer["model"]})
    model = Setting(config.model, layer["model"].origin)
    return layer | {"model": model} if preset else layer


def _adapter_folder(folder: Path) -> Path:
    for candidate in (folder, folder / "adapter"):
        if (candidate / "adapter_config.json").exists():
            return candidate
    raise UserError(
        f"{folder} holds no adapter (no adapter_config.json there or in adapter/); "
        "a run has one after its first checkpoint"
    )
