"""What a training command would need, without doing any of it: sizes, memory, downloads, disk, steps, rough time.

    python -m qerl.plan --model qwen2.5-32b --task gsm8k        the same as qerl.train ... --dry-run

Of a model that is not on this machine only config.json is fetched. Its prompts cannot be counted in tokens without a
tokenizer, so they are taken to be as long as max_prompt_length allows.
"""

import sys
from typing import TYPE_CHECKING

from qerl.cli import parse_config, run_main
from qerl.config import Config
from qerl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from qerl.planning import Plan
    from qerl.run import Preparation


def main(argv: list[str] | None = None) -> int:
    """Print the plan; exit code 2 if it does not fit."""
    config, _ = parse_config(
        argv,
        prog="python -m qerl.plan",
        description="Say what a training command would need, and whether it fits.",
    )
    from qerl.metrics import say
    from qerl.planning import check_plan, format_plan

    plan = plan_for(config)
    say(format_plan(plan))
    check_plan(plan)
    return 0


def plan_for(config: Config) -> "Plan":
    """The plan of a config: exact where the model is on this machine, from its config.json alone where it is not."""
    from qerl.build import resolve_device, resolve_dtype, run_dir_of
    from qerl.engine.choice import choose_engine
    from qerl.model.source import describe_remote
    from qerl.planning import make_plan, measure_speed
    from qerl.run import num_steps_of, prepare
    from qerl.tasks import load_task

    device = resolve_device(config)
    download = describe_remote(config.model, config.revision)
    if download.num_bytes == 0:
        return plan_of(prepare(config))
    if download.num_bytes is None:
        raise UserError(
            f"{config.model} is not on this machine and its config cannot be read "
            f"({download.text}), so its sizes are not known; there is no plan without them"
        )
    dtype = resolve_dtype(config, device)
    return make_plan(
        config,
        _remote_config(config),
        origin=config.model,
        download=download.text,
        download_bytes=download.num_bytes,
        num_steps=num_steps_of(config, len(load_task(config.task).train)),
        longest_prompt=config.rollout.max_prompt_length,
        device=device,
        dtype=dtype,
        engine=choose_engine(config.engine, device, config.quant),
        run_dir=run_dir_of(config),
        speed=measure_speed(device, dtype),
    )


def plan_of(prepared: "Preparation") -> "Plan":
    """The plan of a run whose model files and data are on this machine."""
    from transformers import AutoConfig

    from qerl.planning import make_plan, measure_speed

    test = prepared.data.test
    prompts = [*prepared.data.train.prompt_ids, *(test.prompt_ids if test else ())]
    return make_plan(
        prepared.config,
        AutoConfig.from_pretrained(prepared.source.folder),
        origin=prepared.source.origin,
        download="nothing",
        download_bytes=0,
        num_steps=prepared.num_steps,
        longest_prompt=max(len(ids) for ids in prompts),
        device=prepared.device,
        dtype=prepared.dtype,
        engine=prepared.engine,
        run_dir=prepared.run_dir,
        speed=measure_speed(prepared.device, prepared.dtype),
    )


def _remote_config(config: Config) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.model, revision=config.revision)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the config of {config.model} cannot be read ({str(error).splitlines()[0]}), "
            "so its sizes are not known; there is no plan without them"
        ) from error


if __name__ == "__main__":
    sys.exit(run_main(main))
