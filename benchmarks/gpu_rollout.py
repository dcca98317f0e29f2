"""Rollout speed on a CUDA GPU: this package's engine against what others use, in one run.

    python benchmarks/gpu_rollout.py --shape 7b [--arms ours,bare,nf4,bf16,marlin] [--batch-sizes 8 64 256]
    python benchmarks/gpu_rollout.py --shape 32b --arms ours,bare,nf4 ours,marlin ours,bf16
    python benchmarks/gpu_rollout.py --shape 32b --layers 8 --arms nf4-bare,vllm-bnb --name rollout_bnb

Each arm is a process of its own with the same prompts, lengths, seeds, concurrency, graph sizes and key/value cache. Arms with commas
between start together and measure in turn, a number of sequences at a time; ratios are of such arms only. Where memory does not hold
all bases at once (an H200 holds three of 32B), several groups follow one another:

    ours           NVFP4 in Humming's layout, the adapter in the linear, by qerl's engine
    bare           the same without the adapter: what the adapter costs is (ours - bare) / ours
    deterministic  ours with `--deterministic`, whose cost this is
    nf4            QLoRA's base in qerl's engine: bitsandbytes' own kernels, the same adapter
    nf4-bare       the same without the adapter
    bf16           a bf16 base in qerl's engine, where it fits
    marlin         the QeRL stack: compressed-tensors NVFP4 with Marlin and vLLM's own LoRA
    vllm-bnb       vLLM's own bitsandbytes path (0.26 and 0.27 have it), which nf4-bare is compared with. It reads a bf16 checkpoint
                   and quantizes it, so a checkpoint is written first: at 32B 3 GB and 1 GB a layer; fewer --layers make it short

Weights are random (qerl/benchmarking/synthetic.py; vLLM's dummy ones for `marlin`): speed does not depend on them. Groups of 8 samples share a
prompt of 256 tokens; 128 tokens are generated. A step is a decode step, prefill taken off. Rank 32, every linear adapted.
Written to rollout.json in $OUT, or benchmarks/results. Needs vLLM and humming-kernels.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import print_row, write_report

from qerl.benchmarking.device import default_device, describe
from qerl.benchmarking.processes import measure_in_turn
from qerl.benchmarking.rollout_arms import (
    GROUP,
    RANK,
    RolloutArm,
    RolloutWork,
    measure,
    prompts_of,
    start_ours,
)
from qerl.benchmarking.synthetic import SHAPES, write_checkpoint, write_config
from qerl.quant.layout import build_layout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument(
        "--arms", nargs="+", type=arms_of, default=[USUAL_ARMS], metavar="ARM,ARM,..."
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--name", default="rollout", help="of the JSON file")
    parser.add_argument("--profile", action="store_true", help="also list the longest kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_rollout: no CUDA GPU here, nothing was measured")
        return 0
    work = RolloutWork(
        options.shape,
        options.layers,
        tuple(options.batch_sizes),
        num_kernels=PROFILED_KERNELS if options.profile else 0,
    )
    report = {
        **describe(default_device()),
        "shape": options.shape,
        "layers": work.config.num_hidden_layers,
        "rows": [],
        "ratios": {},
        "failures": {},
    }

    def tell(row: dict) -> None:
        report["rows"].append({"group": group, **row})
        report["ratios"] = ratios(report["rows"])
        print_row(row)
        write_report(options.name, report)

    for group, arms in enumerate(options.arms):
        jobs = [(measure, (arm, ARMS[arm], work)) for arm in arms]
        for arm, outcome in zip(arms, measure_in_turn(jobs, tell=tell), strict=True):
            if outcome.failure:
                report["failures"][f"{arm}, group {group}"] = outcome.failure
    print(json.dumps(report["ratios"], indent=1), report["failures"])
    write_report(options.name, report)
    return 1 if report["failures"] else 0


def arms_of(text: str) -> list[str]:
    """The arms of a group. Raises ArgumentTypeError for one that there is not."""
    arms = text.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise argparse.ArgumentTypeError(
            f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}"
        )
    return arms


PROFILED_KERNELS = 25
SPEED_RATIOS = {
    "rollout_vs_qlora": ("ours", "nf4"),
    "rollout_vs_bf16": ("ours", "bf16"),
    "rollout_vs_qerl_stack": ("ours", "marlin"),
    "nf4_vs_vllm_bnb": ("nf4-bare", "vllm-bnb"),
    "deterministic_vs_ours": ("deterministic", "ours"),
}
"""Tokens a second of the first arm over the second's"""
ADAPTER_SHARES = {"adapter_share": ("ours", "bare"), "nf4_adapter_share": ("nf4", "nf4-bare")}
"""(with - without) / with, of a decode step"""


def ratios(rows: list[dict]) -> dict[str, float]:
    """The ratios of all pairs of arms that were measured in turn, by number of sequences; the first group's that has both."""
    found = {(row["group"], row["arm"], row["sequences"]): row for row in rows}
    result = {}
    for group, size in sorted({(row["group"], row["sequences"]) for row in rows}):
        for name, arms in (SPEED_RATIOS | ADAPTER_SHARES).items():
            first, second = (found.get((group, arm, size)) for arm in arms)
            if first is None or second is None or f"{name}_b{size}" in result:
                continue
            if name in SPEED_RATIOS:
                value = first["tokens_per_s"] / second["tokens_per_s"]
            else:
                value = (first["step_ms"] - second["step_ms"]) / first["step_ms"]
            result[f"{name}_b{size}"] = round(value, 3)
    copies = [row["base_copies"] for row in rows if row["arm"] == "ours"]
    return result | ({"base_copies": max(copies)} if copies else {})


def start_bare(arm: str, work: RolloutWork) -> RolloutArm:
    from qerl.engine import vllm_engine

    with patch.object(vllm_engine, "adapter_parts", lambda *_: {}):
        return start_ours(arm, work)


def start_deterministic(arm: str, work: RolloutWork) -> RolloutArm:
    return start_ours(arm, replace(work, deterministic=True))


def start_marlin(arm: str, work: RolloutWork) -> RolloutArm:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    weights |= {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": weights}
    group |= {"input_activations": None, "output_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    root = Path(tempfile.mkdtemp())
    folder = write_config(root / "model", work.config, quantization_config=quantization)
    adapter = write_adapter(root / "adapter", work)
    name = "vLLM with Marlin and its own LoRA"
    return start_stock(name, folder, work, adapter, load_format="dummy", linear_backend="marlin")


def start_vllm_bnb(arm: str, work: RolloutWork) -> RolloutArm:
    folder = Path(tempfile.mkdtemp()) / "model"
    device = default_device()
    write_checkpoint(folder, work.config, device, "bf16")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return start_stock("vLLM with bitsandbytes", folder, work, quantization="bitsandbytes")
    finally:
        shutil.rmtree(folder)


def start_stock(
    name: str, folder: Path, work: RolloutWork, adapter: Path | None = None, **arguments: str
) -> RolloutArm:
    """vLLM as it comes, with its own LoRA if there is an adapter, and all else as qerl's engine has it."""
    from qerl.engine.vllm_setup import require_vllm

    require_vllm(default_device())
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from qerl.engine.vllm_arguments import capture_sizes

    lora: dict[str, object] = {}
    if adapter is not None:
        lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        hf_overrides={"head_dtype": "float32"},
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        max_model_len=work.max_model_len,
        max_num_seqs=work.max_num_seqs,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=work.kv_cache_bytes,
        gpu_memory_utilization=0.01,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": capture_sizes(work.max_num_seqs)},
        **lora,
        **arguments,
    )
    request = None if adapter is None else LoRARequest("adapter", 1, str(adapter))

    def generate(size: int, tokens: int) -> int:
        llm.reset_prefix_cache()
        prompts, parameters = [], []
        for p, (prompt, samples) in enumerate(prompts_of(size, work.prompt)):
            for i in range(samples):
                prompts.append({"prompt_token_ids": list(prompt)})
                parameters.append(
                    SamplingParams(
                        temperature=1.0,
                        seed=1 + p * GROUP + i,
                        max_tokens=tokens,
                        ignore_eos=True,
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                    )
                )
        outputs = llm.generate(prompts, parameters, lora_request=request, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return RolloutArm(name, generate)


def write_adapter(folder: Path, work: RolloutWork) -> Path:
    """A PEFT adapter of rank 32 on every linear, random."""
    from safetensors.torch import save_file

    tensors, names = {}, set()
    for fused in build_layout(work.config).linears:
        for member, rows in zip(fused.members, fused.member_rows, strict=True):
            key = f"base_model.model.{member}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, fused.num_columns).bfloat16() * 1e-3
            tensors[f"{key}.lora_B.weight"] = torch.randn(rows, RANK).bfloat16() * 1e-3
            names.add(member.rpartition(".")[2])
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names),
        "base_model_name_or_path": "random",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


ARMS: dict[str, Callable[[str, RolloutWork], RolloutArm]] = {
    "ours": start_ours,
    "bare": start_bare,
    "deterministic": start_deterministic,
    "nf4": start_ours,
    "nf4-bare": start_bare,
    "bf16": start_ours,
    "marlin": start_marlin,
    "vllm-bnb": start_vllm_bnb,
}
USUAL_ARMS = ["ours", "bare", "nf4", "bf16", "marlin"]

if __name__ == "__main__":
    sys.exit(main())
