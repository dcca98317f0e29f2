"""Rollout speed on a CUDA GPU: this package's engine against what others use, in one run.

    python benchmarks/gpu_rollout.py --shape 32b [--arms ours bare nf4 marlin bf16] [--batch-sizes 8 64 256]

Each arm is a process of its own, one after the other, with the same prompts, lengths, seeds, concurrency, graph sizes and
key/value cache:

    ours     NVFP4 in Humming's layout, the adapter in the linear, by qerl's engine
    bare     the same without the adapter: what the adapter costs is (ours - bare) / ours
    nf4      QLoRA's base in qerl's engine: bitsandbytes' own kernels, the same adapter
    bf16     a bf16 base in qerl's engine, where it fits
    marlin   the QeRL stack: compressed-tensors NVFP4 with Marlin and vLLM's own LoRA

Weights are random (synthetic.py; vLLM's dummy ones for `marlin`): speed does not depend on them. Groups of 8 samples share a
prompt of 256 tokens; 128 tokens are generated. A step is a decode step, prefill taken off. Rank 32, every linear adapted.
Written to rollout.json in $OUT, or benchmarks/results. Needs vLLM and humming-kernels.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from synthetic import SHAPES, model_config, random_base, write_config

PROMPT, GENERATED, GROUP, RANK = 256, 128, 8, 32
ARMS = ("ours", "bare", "nf4", "bf16", "marlin")
REPEATS = 3
DEVICE = torch.device("cuda", 0)
Generate = Callable[[int, int], int]
"""(sequences, tokens each) -> tokens generated; the prefix cache is empty before"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="rollout", help="of the JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_rollout: no CUDA GPU here, nothing was measured")
        return
    if options.arm:
        run_arm(options)
        return
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {
            name: version(name)
            for name in ("torch", "vllm", "bitsandbytes", "humming-kernels", "transformers")
        },
        "shape": options.shape,
        "layers": options.layers or SHAPES[options.shape][2],
        "rows": [],
        "failures": {},
    }
    for arm in options.arms:
        rows, failure = run_process(arm)
        report["rows"] += rows
        if failure:
            report["failures"][arm] = failure
    report["ratios"] = ratios(report["rows"])
    print(json.dumps(report["ratios"], indent=1))
    target = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    (target / f"{options.name}.json").write_text(json.dumps(report, indent=1) + "\n")


def run_process(arm: str) -> tuple[list[dict], str | None]:
    """The arm's rows, and its last words if it failed."""
    process = subprocess.Popen(
        [sys.executable, *sys.argv, "--arm", arm], stdout=subprocess.PIPE, text=True
    )
    rows, last = [], ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
        last = line
    return rows, None if process.wait() == 0 else f"exit code {process.returncode}: {last[-300:]}"


def ratios(rows: list[dict]) -> dict[str, float]:
    """Tokens a second of `ours` over each other arm's; the adapter's share of a decode step."""
    found = {(row["arm"], row["sequences"]): row for row in rows}
    result = {}
    for (arm, size), row in found.items():
        ours = found.get(("ours", size))
        if ours is None or arm == "ours":
            continue
        if arm == "bare":
            share = (ours["step_ms"] - row["step_ms"]) / ours["step_ms"]
            result[f"adapter_share_b{size}"] = round(share, 3)
        else:
            name = {"nf4": "qlora", "marlin": "qerl_stack", "bf16": "bf16"}[arm]
            quotient = ours["tokens_per_s"] / row["tokens_per_s"]
            result[f"rollout_vs_{name}_b{size}"] = round(quotient, 3)
    return result


def run_arm(options: argparse.Namespace) -> None:
    """Start the arm's engine and print a row for each batch size."""
    started = time.perf_counter()
    config = model_config(options.shape, options.layers)
    most = max(options.batch_sizes)
    heads = config.num_attention_heads
    token_bytes = (
        4 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // heads)
    )
    kv_bytes = (most + 1) * 2 * PROMPT * token_bytes
    start = start_marlin if options.arm == "marlin" else start_ours
    generate = start(options.arm, config, most, kv_bytes)
    start_s = round(time.perf_counter() - started, 1)
    for size in options.batch_sizes:
        generate(size, 4)
        prefill = statistics.median(timed(generate, size, 1) for _ in range(REPEATS))
        total = statistics.median(timed(generate, size, GENERATED) for _ in range(REPEATS))
        row = {
            "arm": options.arm,
            "sequences": size,
            "tokens_per_s": round(size * GENERATED / total, 1),
            "step_ms": round(1e3 * (total - prefill) / (GENERATED - 1), 3),
            "prefill_s": round(prefill, 3),
            "start_s": start_s,
            "device_gb": round(
                (lambda free, total: total - free)(*torch.cuda.mem_get_info()) / 1e9, 2
            ),
        }
        print("ROW", json.dumps(row), flush=True)


def timed(generate: Generate, size: int, tokens: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    generated = generate(size, tokens)
    seconds = time.perf_counter() - start
    assert generated == size * tokens, (generated, size, tokens)
    return seconds


def prompts_of(size: int) -> list[tuple[tuple[int, ...], int]]:
    """(prompt, samples) of groups: arbitrary tokens below 1000."""
    group = min(GROUP, size)
    return [
        (tuple((7919 * p + 31 * i) % 1000 for i in range(PROMPT)), group)
        for p in range(size // group)
    ]


def start_ours(arm: str, config: object, most: int, kv_bytes: int) -> Generate:
    from qerl.config import LoraConfig
    from qerl.engine import vllm_engine
    from qerl.engine.vllm_arguments import VllmOptions
    from qerl.model.policy import Policy
    from qerl.types import GenerationRequest, Sampling

    format = {"ours": "nvfp4", "bare": "nvfp4"}.get(arm, arm)
    base = random_base(config, format, DEVICE)
    policy = Policy(base, LoraConfig(lora_r=RANK, lora_alpha=RANK), model_name="random", seed=0)
    options = VllmOptions(
        max_model_len=2 * PROMPT,
        max_num_seqs=most,
        kv_cache_bytes=kv_bytes,
        max_num_batched_tokens=8192,
    )
    if arm == "bare":
        with patch.object(vllm_engine, "adapter_parts", lambda *_: {}):
            engine = vllm_engine.VllmEngine(policy, options)
    else:
        engine = vllm_engine.VllmEngine(policy, options)

    def generate(size: int, tokens: int) -> int:
        engine.sync(engine.version + 1, None)
        requests = [
            GenerationRequest(str(p), prompt, tuple(1 + p * GROUP + i for i in range(samples)))
            for p, (prompt, samples) in enumerate(prompts_of(size))
        ]
        groups = engine.generate(requests, Sampling(1.0, tokens, ()))
        return sum(len(rollout.completion_ids) for group in groups for rollout in group)

    return generate


def start_marlin(arm: str, config: object, most: int, kv_bytes: int) -> Generate:
    from qerl.engine.vllm_setup import require_vllm

    require_vllm(DEVICE)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from qerl.engine.vllm_arguments import capture_sizes

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
    folder = write_config(root / "model", config, quantization_config=quantization)
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        linear_backend="marlin",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        hf_overrides={"head_dtype": "float32"},
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        max_model_len=2 * PROMPT,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=kv_bytes,
        gpu_memory_utilization=0.01,
        enable_lora=True,
        max_lora_rank=RANK,
        max_loras=1,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": capture_sizes(most)},
    )
    adapter = LoRARequest("adapter", 1, str(write_adapter(root / "adapter", config)))

    def generate(size: int, tokens: int) -> int:
        llm.reset_prefix_cache()
        prompts, parameters = [], []
        for p, (prompt, samples) in enumerate(prompts_of(size)):
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
        outputs = llm.generate(prompts, parameters, lora_request=adapter, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def write_adapter(folder: Path, config: object) -> Path:
    """A PEFT adapter of rank 32 on every linear, random."""
    from safetensors.torch import save_file

    hidden, intermediate = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (inputs, outputs) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs).bfloat16() * 1e-3
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK).bfloat16() * 1e-3
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.rpartition(".")[2] for name in shapes],
        "base_model_name_or_path": "random",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


if __name__ == "__main__":
    main()
