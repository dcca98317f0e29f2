"""The memory plan against what is measured: two steps' worth of sampling and updating at the planned sizes.

    python benchmarks/gpu_memory.py --shape 7b --memory-gib 24 [--prompt 256] [--completion 512] [--release]

A model of random weights in a Qwen2.5 shape; vLLM's engine and the trainer on one base, capped at --memory-gib. In order: the
parity gate; twice: sampling 16 problems x 8 at full length; the cache given back (if the plan says so, or --release);
microbatches as large as planned, forward, backward and an optimizer step. Written to $OUT or benchmarks/results as
memory_SHAPE_GIB_LENGTH.json: every predicted part, the use after each stage, the peak of each phase, and their ratio.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import write_report
from transformers import Qwen2Config

from qerl.benchmarking.device import describe
from qerl.benchmarking.synthetic import SHAPES, model_config, random_base
from qerl.config import Config
from qerl.cuda_memory import cuda_memory
from qerl.engine.vllm_arguments import VllmOptions
from qerl.engine.vllm_engine import VllmEngine
from qerl.model.policy import Policy
from qerl.optim import make_optimizer
from qerl.parity import check_parity
from qerl.planning.footprint import recomputed_layers
from qerl.planning.memory_plan import MemoryPlan, budget_of, make_memory_plan
from qerl.planning.sizes import GIB, Place
from qerl.probe import probe_update
from qerl.quant.layout import build_layout
from qerl.start_checks import cap_memory
from qerl.types import GenerationRequest, Sampling

PROBLEMS, SAMPLES = 16, 8


def gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)


def plan_run(
    options: argparse.Namespace, device: torch.device
) -> tuple[Config, Qwen2Config, MemoryPlan]:
    """As a training command would make it."""
    config = Config.model_validate(
        {
            "model": options.shape,
            "memory_gib": options.memory_gib,
            "rollout": {
                "prompts_per_step": PROBLEMS,
                "num_generations": SAMPLES,
                "max_prompt_length": options.prompt,
                "max_completion_length": options.completion,
            },
            "train": {"max_tokens_per_microbatch": options.tokens},
            "log": {"eval_size": 0},
        }
    )
    shape = model_config(options.shape)
    place = Place("cuda", torch.bfloat16, "vllm", options.prompt)
    budget = budget_of(config, device)
    plan = make_memory_plan(config, build_layout(shape), place, budget, context_limit=131072)
    if options.release and not plan.sizes.releases_cache:
        sizes = replace(plan.sizes, releases_cache=True)
        parts = tuple(
            replace(part, phase="rollout") if part.name == "KV cache" else part
            for part in plan.parts
        )
        plan = replace(plan, sizes=sizes, parts=parts)
    return config, shape, plan


def sample(engine: VllmEngine, options: argparse.Namespace) -> None:
    requests = [
        GenerationRequest(
            str(p),
            tuple((7919 * p + 31 * i) % 1000 for i in range(options.prompt)),
            tuple(1 + p * SAMPLES + i for i in range(SAMPLES)),
        )
        for p in range(PROBLEMS)
    ]
    engine.generate(requests, Sampling(1.0, options.completion, ()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--memory-gib", type=float, default=16.0)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens in a microbatch")
    parser.add_argument("--release", action="store_true", help="give the cache back in any case")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_memory: no CUDA GPU here; nothing to do")
        return
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    report: dict[str, object] = {
        **describe(device),
        "context_and_others_gib": gib(total - free),
    }
    account = cuda_memory(device)
    config, shape, plan = plan_run(options, device)
    report["sizes"] = asdict(plan.sizes)
    report["predicted_gib"] = {f"{p.phase}: {p.name}": gib(p.num_bytes) for p in plan.parts}
    report["predicted_peak_gib"] = gib(plan.peak_bytes)
    report["fits"] = plan.fits
    print(json.dumps(report, indent=1), flush=True)
    cap_memory(plan, device)
    stages: dict[str, object] = {}
    report["stages"] = stages

    def stage(name: str, seconds: float = 0.0) -> None:
        """Use now, what torch has of it, and the peak since the stage before."""
        torch.cuda.synchronize()
        reserved, peak_reserved = (
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_reserved(),
        )
        stages[name] = {
            "used_gib": gib(account.used()),
            "allocated_gib": gib(torch.cuda.memory_allocated()),
            "reserved_gib": gib(reserved),
            "peak_reserved_gib": gib(peak_reserved),
            "peak_allocated_gib": gib(torch.cuda.max_memory_allocated()),
            "unmapped_gib": gib(account.unmapped),
            "outside_torch_gib": gib(account.used() - (reserved - account.unmapped)),
            "process_peak_gib": gib(account.peak()),
            "seconds": round(seconds, 2),
        }
        print(name, json.dumps(stages[name]), flush=True)
        account.set_unmapped(account.unmapped)  # starts torch's peak anew

    stage("context")
    base = random_base(shape, "nvfp4", device)
    torch.cuda.empty_cache()
    stage("base")
    policy = Policy(base, config.lora, model_name="random", seed=0)
    layers = shape.num_hidden_layers
    recomputed = recomputed_layers(config, layers, device.type, plan.sizes)
    if recomputed:
        policy.enable_recomputation(recomputed, plan.sizes.offloaded_layers)
    stage("policy")
    settings = VllmOptions(
        max_model_len=options.prompt + options.completion,
        max_num_seqs=plan.sizes.max_num_seqs,
        kv_cache_bytes=plan.sizes.kv_cache_bytes,
        max_num_batched_tokens=plan.sizes.max_num_batched_tokens,
        releases_cache=plan.sizes.releases_cache,
    )
    start = time.perf_counter()
    engine = VllmEngine(policy, settings)
    report["start"] = engine.start_times.line()
    print(report["start"], flush=True)
    stage("engine", time.perf_counter() - start)
    prompts = [tuple(range(n, n + 20)) for n in range(4)]
    parity, warning = check_parity(policy, engine, prompts, 24)
    report["parity"] = parity.as_json() | {"warning": warning}
    print(parity.line(), warning, flush=True)
    stage("parity")
    parameters = policy.trainable_parameters()
    optimizer = make_optimizer(parameters, config.train)
    for step in range(2):
        start = time.perf_counter()
        engine.sync(step, None)
        synced = time.perf_counter()
        sample(engine, options)
        stage(f"rollout {step}", time.perf_counter() - synced)
        report[f"sync_{step}_s"] = round(synced - start, 3)
        start = time.perf_counter()
        engine.release()
        report[f"release_{step}_s"] = round(time.perf_counter() - start, 3)
        stage(f"released {step}")
        start = time.perf_counter()
        for _ in range(2):
            probe_update(config, policy, plan)
        for _, parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        stage(f"update {step}", time.perf_counter() - start)
    report["measured_peak_gib"] = gib(account.peak())
    report["peak_over_plan"] = round(account.peak() / plan.peak_bytes, 4)
    engine.close()
    stage("closed")
    context = options.prompt + options.completion
    write_report(f"memory_{options.shape}_{options.memory_gib:g}_{context}", report)
    print(json.dumps({k: v for k, v in report.items() if k != "stages"}, indent=1))


if __name__ == "__main__":
    main()
