"""Whole training steps, rollout + reward + update + sync: this package against QLoRA as practised, in one run.

    python benchmarks/gpu_step.py --shape 32b [--arms ours-equal-work qlora ours own-nf4] [--steps 4] [--rounds 1]

    ours              this package as it is: NVFP4, zero-advantage sequences left out, prompts shared in the update
    ours-equal-work   the same, training on every token that QLoRA trains on
    own-nf4           `ours` on an NF4 base
    own-bf16          `ours` on a bf16 base, where it fits
    qlora             NF4 rollouts in vLLM by this package's engine, transformers + PEFT + bitsandbytes for the update, the
                      adapter handed to the engine each step

16 problems x 8 samples, 256 + 512 tokens, microbatches of 8,192, rank 32, 73 % of groups with spread. Each arm is a process of its
own, arms alternating in rounds; the first step of a process does not count; medians of the others. What is done stands in
step_SHAPE.json ($OUT, or benchmarks/results) after every arm. --append adds to benchmarks/results/step_SHAPE.json, so that
arms may come from several commands. Without a GPU: `--shape tiny --dry-run`, transformers in place of vLLM and fp32 in place
of bitsandbytes, which tries the script and measures nothing of interest.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import RESULTS, print_row, write_report

from qerl.bench_step import ARMS, StepWork, measure
from qerl.benchmarking.device import default_device, describe
from qerl.benchmarking.processes import measure_in_process
from qerl.benchmarking.summary import summarize_step
from qerl.benchmarking.synthetic import SHAPES, model_config


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=["ours-equal-work", "qlora", "ours", "own-nf4"]
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="of a process; the first is not counted"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--memory-gib", type=float, help="that a run may plan with")
    parser.add_argument("--append", action="store_true", help="add to the committed figures")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: try the script")
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.dry_run):
        print("gpu_step: no CUDA GPU here, nothing was measured")
        return 0
    work = StepWork(
        model=options.shape,
        num_layers=options.layers,
        problems=options.problems,
        samples=options.samples,
        prompt=options.prompt,
        completion=options.completion,
        steps=options.steps,
        max_tokens_per_microbatch=options.tokens,
        memory_gib=options.memory_gib,
    )
    name = f"step_{options.shape}" + "_dry_run" * options.dry_run
    layers = model_config(options.shape, options.layers).num_hidden_layers
    report: dict = {"shape": options.shape, "layers": layers, "runs": [], "rows": []}
    report |= {"failures": {}, "ratios": {}}
    if options.append and (path := RESULTS / f"{name}.json").is_file():
        report = json.loads(path.read_text())
    report["runs"].append(describe(default_device()))
    run = len(report["runs"]) - 1
    for number in range(options.rounds):
        for arm in options.arms:
            outcome = measure_in_process(measure, arm, work, tell=print_row)
            report["rows"] += [{"run": run, "round": number, **row} for row in outcome.rows]
            if outcome.failure:
                report["failures"][f"{arm}, run {run}, round {number}"] = outcome.failure
            summary = summarize_step(report["rows"])
            report["ratios"] = summary.ratios
            write_report(name, report)
            print("\n".join(summary.lines), report["failures"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
