"""Arguments of commands that look at a model or a finished run: a run folder, or --model with or without --adapter."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from qerl.cli import ExtraFlag, parse_arguments
from qerl.config import Config
from qerl.errors import UserError
from qerl.layers import build_config

RUN = ExtraFlag("run", "Run folder: its settings, and its adapter.", positional=True)
ADAPTER = ExtraFlag("adapter", "Folder of a PEFT adapter, or a run folder.", takes_value=True)


def parse_run_arguments(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    extra_flags: Sequence[ExtraFlag] = (),
) -> tuple[Config, Namespace, Path | None]:
    """Parse; returns the config, the other arguments and the adapter's folder (None: the base alone).

    With a run folder the config is the run's, and flags override it. Raises UserError for a folder that is no run
    and for an adapter that is not there.
    """
    argv = sys.argv[1:] if argv is None else argv
    names_model = any(word.partition("=")[0] == "--model" for word in argv)
    layer, options = parse_arguments(
        argv,
        prog=prog,
        description=description,
        extra_flags=(ADAPTER, *extra_flags) if names_model else (RUN, ADAPTER, *extra_flags),
    )
    run = None if names_model else options.run
    if run is None and not names_model and options.config is None:
        raise UserError(f"which model? {prog} RUN takes a run folder; or give --model NAME")
    base = None
    if run is not None:
        from qerl.run_folder import read_run_config

        base = read_run_config(Path(run))["config"]
    config, _ = build_config(layer, options.config, base)
    folder = options.adapter or run
    return config, options, None if folder is None else _adapter_folder(Path(folder))


def _adapter_folder(folder: Path) -> Path:
    for candidate in (folder, folder / "adapter"):
        if (candidate / "adapter_config.json").exists():
            return candidate
    raise UserError(
        f"{folder} holds no adapter (no adapter_config.json there or in adapter/); "
        "a run has one after its first checkpoint"
    )
