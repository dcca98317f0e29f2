"""What a training command would need, without doing any of it: sizes, memory, downloads, disk, steps, rough time.

    python -m qerl.plan --model qwen2.5-32b --task gsm8k        the same as qerl.train ... --dry-run

    python -m qerl.plan --model qwen2.5-32b --device cuda --memory-gib 74.5    for a card that is not here

Of a model that is not on this machine only config.json is fetched; the presets' shapes are known without it. Its prompts
cannot be counted in tokens without a tokenizer, so they are taken to be as long as max_prompt_length allows.
"""

import sys
from typing import TYPE_CHECKING

from qerl.config import Config
from qerl.errors import UserError
from qerl.settings.cli import parse_config, run_main

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from qerl.model.source import Download
    from qerl.planning.run_plan import Plan
    from qerl.run import Preparation


def main(argv: list[str] | None = None) -> int:
    """Print the plan; exit code 2 if it does not fit."""
    config, _ = parse_config(
        argv,
        prog="python -m qerl.plan",
        description="Say what a training command would need, and whether it fits.",
    )
    from qerl.metrics import say
    from qerl.planning.run_plan import check_plan, format_plan

    plan = plan_for(config)
    say(format_plan(plan))
    check_plan(plan)
    return 0


def plan_for(config: Config) -> "Plan":
    """The plan of a config: exact where the model is on this machine, from its config.json alone where it is not.

    With device=cuda on a machine without a GPU it is a plan for another machine, whose memory memory_gib gives.
    """
    import torch

    from qerl.build import context_limit, resolve_device, resolve_dtype, run_dir_of
    from qerl.engine.choice import choose_engine, engine_elsewhere
    from qerl.model.source import describe_remote
    from qerl.planning.memory_plan import budget_of, make_memory_plan
    from qerl.planning.run_plan import make_plan
    from qerl.planning.sizes import Place
    from qerl.planning.step_time import measure_speed
    from qerl.quant.layout import build_layout
    from qerl.run import prepare

    elsewhere = config.device == "cuda" and not torch.cuda.is_available()
    device = torch.device("cuda") if elsewhere else resolve_device(config)
    download = describe_remote(config.model, config.revision)
    if download.num_bytes == 0 and not elsewhere:
        return plan_of(prepare(config))
    model_config = _config_of(config, download)
    dtype = resolve_dtype(config, device)
    layout = build_layout(model_config)
    if elsewhere:
        engine = engine_elsewhere(config.engine)
    else:
        engine = choose_engine(config.engine, device, config.quant)
    memory = make_memory_plan(
        config,
        layout,
        Place(device.type, dtype, engine.name, config.rollout.max_prompt_length),
        budget_of(config, device),
        context_limit=context_limit(model_config)[0],
    )
    return make_plan(
        config,
        layout,
        memory,
        origin=config.model,
        download=download.text,
        download_bytes=download.num_bytes,
        num_steps=_num_steps(config),
        engine=engine,
        run_dir=run_dir_of(config),
        speed=measure_speed(device, dtype),
    )


def plan_of(prepared: "Preparation") -> "Plan":
    """The plan of a run whose model files and data are on this machine."""
    from qerl.planning.run_plan import make_plan
    from qerl.planning.step_time import measure_speed

    return make_plan(
        prepared.config,
        prepared.layout,
        prepared.memory,
        origin=prepared.source.origin,
        download="nothing",
        download_bytes=0,
        num_steps=prepared.num_steps,
        engine=prepared.engine,
        run_dir=prepared.run_dir,
        speed=measure_speed(prepared.device, prepared.dtype),
    )


def _config_of(config: Config, download: "Download") -> "PreTrainedConfig":
    """The model's config: from its files, the hub, or the table of known models, whichever there is."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from qerl.model.source import resolve_model
    from qerl.planning.known_models import known_config

    if download.num_bytes == 0:
        return AutoConfig.from_pretrained(resolve_model(config.model, config.revision).folder)
    if download.num_bytes is None:
        known = known_config(config.model)
        if known is None:
            raise UserError(
                f"{config.model} is not on this machine and its config cannot be read "
                f"({download.text}), so its sizes are not known; there is no plan without them"
            )
        return known
    try:
        return AutoConfig.from_pretrained(config.model, revision=config.revision)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"the config of {config.model} cannot be read ({str(error).splitlines()[0]}), "
            "so its sizes are not known; there is no plan without them"
        ) from error


def _num_steps(config: Config) -> int | None:
    """Steps of the run; None when they depend on a task whose data cannot be read here."""
    from qerl.run import num_steps_of
    from qerl.tasks import load_task

    if config.train.max_steps is not None:
        return config.train.max_steps
    try:
        return num_steps_of(config, len(load_task(config.task).train))
    except UserError:
        return None


if __name__ == "__main__":
    sys.exit(run_main(main))
