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
write. Sequences are 256 + 512 tokens, none shared. Weights are random. Every arm is a process of its own; two rounds, the better
counts. Tokens a second count all tokens of the microbatch. Writes update_SHAPE.json into $OUT or benchmarks/results.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from gpu_kernels import description
from synthetic import SHAPES, model_config, random_base
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PROMPT, COMPLETION, RANK, CHUNK, REPEATS = 256, 512, 32, 2048, 4
ARMS = ("ours", "ours-nf4", "floor", "hf-nf4", "hf-nf4-fp32", "hf-bf16")
DEVICE = torch.device("cuda", 0)
Step = Callable[[list[int]], None]
"""Lengths of sequences -> one forward and backward"""


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
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_update: no CUDA GPU here, nothing was measured")
        return 0
    if options.arm:
        run_arm(options)
        return 0
    layers = options.layers or SHAPES[options.shape][2]
    report: dict = {**description(), "shape": options.shape, "layers": layers, "rows": []}
    report["failures"] = {}
    for number in range(options.rounds):
        for arm in options.arms:
            done = subprocess.run(
                [sys.executable, *sys.argv, "--arm", arm],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            print(done.stdout, end="", flush=True)
            lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
            report["rows"] += [{"round": number, **json.loads(line)} for line in lines]
            if done.returncode:
                report["failures"][arm] = done.returncode
    report["ratios"] = ratios(report["rows"])
    print(json.dumps(report["ratios"], indent=1), report["failures"])
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    (folder / f"update_{options.shape}.json").write_text(json.dumps(report, indent=1) + "\n")
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


def run_arm(options: argparse.Namespace) -> None:
    config = model_config(options.shape, options.layers)
    arm = options.arm
    started = time.perf_counter()
    if arm.startswith("ours"):
        step = start_ours(config, "nf4" if arm == "ours-nf4" else "nvfp4")
    elif arm == "floor":
        step = start_floor(config)
    else:
        step = start_transformers(config, arm)
    torch.cuda.synchronize()
    start_s = time.perf_counter() - started
    for budget in options.tokens:
        lengths = [PROMPT + COMPLETION] * max(1, round(budget / (PROMPT + COMPLETION)))
        step(lengths)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            step(lengths)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        row = {
            "arm": arm,
            "budget": budget,
            "tokens": sum(lengths),
            "tokens_per_s": round(sum(lengths) / min(seconds), 1),
            "ms": round(1e3 * min(seconds), 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "start_s": round(start_s, 1),
        }
        if options.profile:
            row["kernels"] = longest_kernels(step, lengths)
        print("ROW", json.dumps(row), flush=True)


def longest_kernels(step: Step, lengths: list[int], count: int = 25) -> list[dict]:
    """Milliseconds, calls and names of the kernels that take longest in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(lengths)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
    return [
        {"ms": round(e.self_device_time_total / 1e3, 2), "calls": e.count, "name": e.key[:120]}
        for e in events[:count]
    ]


def start_ours(config, format: str) -> Step:
    from qerl.config import LoraConfig
    from qerl.model.packing import Item, pack
    from qerl.model.policy import Policy
    from qerl.types import Rollout

    policy = Policy(
        random_base(config, format, DEVICE),
        LoraConfig(lora_r=RANK, lora_alpha=RANK),
        model_name="random",
        seed=0,
    )
    policy.enable_recomputation()
    parameters = [parameter for _, parameter in policy.trainable_parameters()]

    def step(lengths: list[int]) -> None:
        items = []
        for index, _ in enumerate(lengths):
            ids = tuple((7 * j + index) % 1000 for j in range(PROMPT + COMPLETION))
            rollout = Rollout(
                problem_id=str(index),
                sample_index=0,
                prompt_ids=ids[:PROMPT],
                completion_ids=ids[PROMPT:],
                logprobs=(0.0,) * COMPLETION,
                loss_mask=(True,) * COMPLETION,
                finish_reason="length",
                version=0,
            )
            items.append(Item(rollout, 1.0, 1e-4))
        for parameter in parameters:
            parameter.grad = None
        (batch,) = pack(
            items,
            max_tokens=10**9,
            share_prompts=False,
            hidden_size=config.hidden_size,
            device=DEVICE,
        )
        logprobs, _ = policy.logprobs(batch, 1.0)
        (logprobs * batch.token_weights).sum().backward()

    return step


def start_floor(config) -> Step:
    """Dense products alone, each into a buffer that is there; matrices of two layers are rotated over."""
    hidden, inner = config.hidden_size, config.intermediate_size
    keys = hidden // config.num_attention_heads * config.num_key_value_heads
    shapes = [(hidden + 2 * keys, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    layers = [[torch.randn(s, device=DEVICE).bfloat16() for s in shapes] for _ in range(2)]
    head = torch.randn(config.vocab_size, hidden, device=DEVICE).bfloat16()

    def step(lengths: list[int]) -> None:
        tokens = sum(lengths)
        inputs = {n: torch.randn(tokens, n, device=DEVICE).bfloat16() for n in (hidden, inner)}
        outputs = {
            n: torch.randn(tokens, n, device=DEVICE).bfloat16()
            for n in {rows for rows, _ in shapes} | {hidden, inner}
        }
        for layer in range(config.num_hidden_layers):
            for weight in layers[layer % 2]:
                rows, columns = weight.shape
                for _ in range(2):
                    torch.mm(inputs[columns], weight.t(), out=outputs[rows])
                torch.mm(outputs[rows], weight, out=inputs[columns])
        scored = len(lengths) * COMPLETION
        for start in range(0, scored, CHUNK):
            part = inputs[hidden][start : min(start + CHUNK, scored)]
            for _ in range(2):
                logits = torch.mm(part, head.t(), out_dtype=torch.float32)
            torch.mm(logits.bfloat16(), head)

    return step


def start_transformers(config, arm: str) -> Step:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from qerl.model.attention import register
    from qerl.model.varlen import VarlenLayout
    from qerl.types import Row

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=register()
        )
    fill(model, quantized=arm.startswith("hf-nf4"))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(DEVICE)
    settings = PeftLoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    fp32_adapter = arm == "hf-nf4-fp32"
    peft_model = get_peft_model(model, settings, autocast_adapter_dtype=fp32_adapter)
    peft_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft_model.train()
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    decoder, head = model.model, model.lm_head.weight

    def chunk_logprobs(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = torch.mm(hidden, head.t()).float()
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def step(lengths: list[int]) -> None:
        for parameter in parameters:
            parameter.grad = None
        length = PROMPT + COMPLETION
        ids = torch.arange(sum(lengths), device=DEVICE) % 1000
        positions = torch.arange(length, device=DEVICE).repeat(len(lengths))
        layout = VarlenLayout.of([Row(length) for _ in lengths], DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            hidden = decoder(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout
            ).last_hidden_state[0]
            scored = positions >= PROMPT
            before, targets = hidden[scored.roll(-1)], ids[scored]
            total = hidden.new_zeros((), dtype=torch.float32)
            for start in range(0, len(targets), CHUNK):
                part = slice(start, start + CHUNK)
                values = checkpoint(
                    chunk_logprobs, before[part], targets[part], use_reentrant=False
                )
                total = total + 1e-4 * values.sum()
        total.backward()

    return step


def fill(model: nn.Module, *, quantized: bool) -> None:
    """Random weights on the GPU, linears of the decoder quantized by bitsandbytes if asked."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head" and quantized:
            linear = Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            values = torch.randn(module.weight.shape, device=DEVICE).bfloat16()
            values *= module.in_features**-0.5
            linear.weight = Params4bit(
                values, requires_grad=False, compress_statistics=True, quant_type="nf4"
            ).to(DEVICE)
            if module.bias is not None:
                zeros = torch.zeros(module.out_features, dtype=torch.bfloat16, device=DEVICE)
                linear.bias = nn.Parameter(zeros, requires_grad=False)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, linear)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if parameter.dim() == 2:
                    values = torch.randn(parameter.shape, device=DEVICE, dtype=torch.bfloat16)
                    values *= parameter.shape[1] ** -0.5
                else:
                    values = torch.ones(parameter.shape, device=DEVICE, dtype=torch.bfloat16)
                module.register_parameter(name, nn.Parameter(values, requires_grad=False))


if __name__ == "__main__":
    sys.exit(main())
