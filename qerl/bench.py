"""How fast is this card with qerl, against QLoRA and against what the hardware allows? A few minutes, a short table.

    python -m qerl.bench update  --model qwen2.5-7b
    python -m qerl.bench rollout --model qwen2.5-32b --sequences 8,64
    python -m qerl.bench step    --model 7b --json step.json

Weights are random, so nothing is downloaded. Every arm runs in a process of its own; what the figures mean is in
docs/performance.md. Without a GPU the same runs on the CPU at small sizes, in fp32.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qerl.errors import RunError, UserError
from qerl.settings.cli import run_main

if TYPE_CHECKING:
    from qerl.benchmarking.processes import Measure, Row
    from qerl.benchmarking.summary import Summary

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": "qwen2.5-7b",
        "tokens": 8192,
        "sequences": (8, 64),
        "prompt": 256,
        "completion": {"update": 512, "rollout": 128, "step": 512},
        "problems": 16,
        "samples": 8,
    },
    "cpu": {
        "model": "tiny",
        "tokens": 512,
        "sequences": (8,),
        "prompt": 32,
        "completion": {"update": 32, "rollout": 16, "step": 16},
        "problems": 4,
        "samples": 4,
    },
}
LAYERS = {"update": 8, "rollout": None, "step": 8}
"""Layers that are measured unless --layers says otherwise, so that it takes minutes; None: all"""


@dataclass(frozen=True)
class Plan:
    """What is measured, and what it is called."""

    title: str
    arms: tuple[tuple[str, "Measure", tuple[Any, ...]], ...]
    """Name, function and arguments of each"""
    summarize: "Callable[[Sequence[Row]], Summary]"


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Returns the process' exit code: 0, or 1 when an arm could not be measured."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    started = time.monotonic()
    from qerl.benchmarking.device import default_device, describe
    from qerl.benchmarking.processes import measure_in_process
    from qerl.metrics import say

    device = default_device()
    plan = _plan(options, device.type)
    facts = describe(device)
    say(f"{plan.title}\non {facts['device']}, random weights\n")
    rows: list[Row] = []
    failures: dict[str, str] = {}
    with tempfile.NamedTemporaryFile(prefix="qerl-bench-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    for name, measure, arguments in plan.arms:
        say(f"measuring {name} ...")
        outcome = measure_in_process(measure, *arguments, tell=rows.append, log=log)
        if outcome.failure:
            failures[name] = outcome.failure
    engines = dict.fromkeys(row["engine"] for row in rows if "engine" in row)
    summary = plan.summarize(rows)
    say("\n".join(["", *(f"engine: {engine}" for engine in engines), *summary.lines]))
    for name, failure in failures.items():
        say(f"{name} was not measured: {failure} (all of it: {log})")
    if not failures:
        log.unlink()
    say(f"{time.monotonic() - started:.0f} s in all.")
    if options.json:
        report = {
            **facts,
            "benchmark": plan.title,
            "rows": rows,
            "ratios": summary.ratios,
            "failures": failures,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not rows:
        raise RunError("setup", f"nothing could be measured; {log} has what was said")
    return int(bool(failures))


def _plan(options: argparse.Namespace, device_type: str) -> Plan:
    """The arms of the asked benchmark, with the device's sizes where none are given."""
    from qerl.benchmarking.synthetic import model_config

    what, defaults = options.benchmark, DEFAULTS[device_type]
    sizes = {name: getattr(options, name, None) or value for name, value in defaults.items()}
    sizes["completion"] = defaults["completion"][what]
    whole = model_config(sizes["model"]).num_hidden_layers
    layers = whole if options.layers == "all" else options.layers
    if layers is None:
        layers = min(LAYERS[what] or whole, whole)
    model_config(sizes["model"], layers)  # raises for more than the model has
    depth = f"{layers} of {whole} layers" if layers < whole else f"all {whole} layers"
    plan = {"update": _update_plan, "rollout": _rollout_plan, "step": _step_plan}[what](
        sizes, layers, whole, device_type == "cuda"
    )
    title = f"{what}: {sizes['model']}, {depth}, adapter of rank 32, {plan.title}"
    return replace(plan, title=title)


def _update_plan(sizes: dict[str, Any], layers: int, whole: int, on_gpu: bool) -> Plan:
    from qerl.benchmarking import update_arms
    from qerl.benchmarking.summary import summarize_update

    prompt, completion, tokens = sizes["prompt"], sizes["completion"], sizes["tokens"]
    depths = (layers, max(1, layers // 4)) if layers > 1 else (layers,)
    work = update_arms.UpdateWork(sizes["model"], depths, (tokens,), prompt, completion)
    arms = ("ours", "floor", "hf-nf4" if on_gpu else "hf-fp32")
    title = f"{tokens} tokens a microbatch in sequences of {prompt} + {completion}"
    if layers < whole:
        title += f"\nthe whole model is computed from {depths[0]} and {depths[-1]} layers"
    return Plan(
        title,
        tuple((update_arms.ARMS[arm], update_arms.measure, (arm, work)) for arm in arms),
        partial(summarize_update, num_layers=whole),
    )


def _rollout_plan(sizes: dict[str, Any], layers: int, whole: int, on_gpu: bool) -> Plan:
    from qerl.benchmarking import rollout_arms
    from qerl.benchmarking.summary import ROLLOUT_ARMS, summarize_rollout

    prompt, completion = sizes["prompt"], sizes["completion"]
    work = rollout_arms.RolloutWork(sizes["model"], layers, sizes["sequences"], prompt, completion)
    title = f"{prompt} tokens of prompt, {completion} generated"
    if layers < whole:
        title += "\nin a model of few layers the head weighs more than in the whole one"
    start = rollout_arms.start_ours
    return Plan(
        title,
        tuple(
            (name, rollout_arms.measure, (arm, start, work)) for arm, name in ROLLOUT_ARMS.items()
        ),
        summarize_rollout,
    )


def _step_plan(sizes: dict[str, Any], layers: int, whole: int, on_gpu: bool) -> Plan:
    from qerl import bench_step
    from qerl.benchmarking.summary import STEP_ARMS, summarize_step

    work = bench_step.StepWork(
        sizes["model"],
        layers,
        problems=sizes["problems"],
        samples=sizes["samples"],
        prompt=sizes["prompt"],
        completion=sizes["completion"],
        steps=3,
    )
    title = f"{work.problems} problems x {work.samples} samples of {work.prompt} + {work.completion} tokens"
    if layers < whole:
        title += "\nin a model of few layers head and rewards weigh more than in the whole one"
    if not on_gpu:
        title += "\nno GPU: the update of QLoRA as practised is transformers + PEFT in fp32"
    arms = ("ours", "ours-equal-work", bench_step.PRACTISED)
    return Plan(
        title,
        tuple((STEP_ARMS[arm], bench_step.measure, (arm, work)) for arm in arms),
        summarize_step,
    )


class _Parser(argparse.ArgumentParser):
    """Mistakes in one line, as everywhere in qerl."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; python -m qerl.bench --help explains")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m qerl.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="benchmark", metavar="update|rollout|step", required=True)
    about = {
        "update": "forward and backward, against transformers + PEFT + bitsandbytes and the bare matrix products",
        "rollout": "sampling, against an NF4 base and the memory bound",
        "step": "whole training steps, against QLoRA as practised",
    }
    for name, text in about.items():
        kind = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        kind.add_argument("--model", help="a preset (qwen2.5-7b) or a shape (0.5b to 32b, tiny)")
        kind.add_argument(
            "--layers",
            type=_layers,
            help=f"how many are measured, or all [{LAYERS[name] or 'all'}]",
        )
        kind.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures there")
        if name == "update":
            kind.add_argument("--tokens", type=_positive, help="of a microbatch [8192]")
        if name == "rollout":
            kind.add_argument(
                "--sequences", type=_sequences, help="decoded at once, commas between [8,64]"
            )
        if name == "step":
            kind.add_argument("--problems", type=_positive, help="of a step [16]")
            kind.add_argument("--samples", type=_positive, help="of a problem [8]")
    return parser.parse_args(words)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _layers(text: str) -> int | str:
    return text if text == "all" else _positive(text)


def _sequences(text: str) -> tuple[int, ...]:
    sizes = tuple(_positive(part) for part in text.split(","))
    if uneven := [size for size in sizes if size > 8 and size % 8]:
        raise argparse.ArgumentTypeError(
            f"{uneven[0]} is not a multiple of 8, the samples of a prompt"
        )
    return sizes


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no such folder, or a folder")
    return path


if __name__ == "__main__":
    sys.exit(run_main(main))
