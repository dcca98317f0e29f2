"""The update on a CUDA GPU: forward and backward of packed sequences, against the GEMMs alone and against other trainers.

    python benchmarks/gpu_update.py --shape 32b [--layers 8] [--arms ours floor hf-nf4 hf-nf4-fp32 hf-bf16] [--tokens 2048 8192]

    ours          this package: NVFP4 base, adapter of rank 32 on every linear, all layers recomputed in backward
    ours-nf4      the same with an NF4 base
    floor         cuBLAS alone: every dense product that a step with recomputation cannot avoid (forward, again, dX; the head's three)
    hf-nf4        transformers + PEFT + bitsandbytes NF4 (double quantization), adapter in bf16, under bf16 autocast
    hf-nf4-fp32   the same with PEFT's default, an fp32 adapter
    hf-bf16       transformers + PEFT, bf16 base

The others get this package's flash attention through transformers' attention interface, transformers' own checkpointing, and
log-probabilities of the completions from fp32 logits in chunks of 2,048 tokens, recomputed in backward: what a careful user would
write. Sequences are 256 + 512 tokens, none shared. Weights are random (qerl/benchmarking/). Every arm is a process of its own; two rounds, the better
counts. Tokens a second count all tokens of the microbatch. Writes update_SHAPE.json into $OUT or benchmarks/results.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import print_row, write_report

from qerl.benchmarking.device import default_device, describe
from qerl.benchmarking.processes import measure_in_process
from qerl.benchmarking.synthetic import SHAPES, model_config
from qerl.benchmarking.update_arms import UpdateWork, measure

ARMS = ("ours", "ours-nf4", "floor", "hf-nf4", "hf-nf4-fp32", "hf-bf16")
PROFILED_KERNELS = 25


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also list the longest kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_update: no CUDA GPU here, nothing was measured")
        return 0
    work = UpdateWork(
        options.shape,
        num_layers=(options.layers,),
        num_tokens=tuple(options.tokens),
        num_kernels=PROFILED_KERNELS if options.profile else 0,
    )
    layers = model_config(options.shape, options.layers).num_hidden_layers
    report: dict = {**describe(default_device()), "shape": options.shape, "layers": layers}
    report |= {"rows": [], "failures": {}}
    for number in range(options.rounds):
        for arm in options.arms:
            outcome = measure_in_process(measure, arm, work, tell=print_row)
            report["rows"] += [{"round": number, **row} for row in outcome.rows]
            if outcome.failure:
                report["failures"][arm] = outcome.failure
    report["ratios"] = ratios(report["rows"])
    print(json.dumps(report["ratios"], indent=1), report["failures"])
    write_report(f"update_{options.shape}", report)
    return 0


def ratios(rows: list[dict]) -> dict[str, float]:
    """Speed of `ours` over each arm's, best of the rounds."""
    best: dict[tuple[str, int], float] = {}
    for row in rows:
        key = (row["arm"], row["budget"])
        best[key] = max(best.get(key, 0.0), row["tokens_per_s"])
    names = {
        "floor": "floor",
        "hf-nf4": "hf_bnb",
        "hf-nf4-fp32": "hf_bnb_fp32",
        "hf-bf16": "hf_bf16",
    }
    return {
        f"update_vs_{names.get(arm, arm)}_{budget}": round(best["ours", budget] / speed, 3)
        for (arm, budget), speed in best.items()
        if arm != "ours" and ("ours", budget) in best
    }


if __name__ == "__main__":
    sys.exit(main())
