"""The vLLM engine on a CUDA GPU: adopted, in agreement with the trainer, written in place under CUDA graphs, timed.

    python benchmarks/gpu_vllm.py [--shape 0.5b] [--formats nvfp4 humming nf4 bf16] [--rank 32] [--eager]

A model of random weights in a Qwen2.5 shape is packed in each format in turn; `humming` is NVFP4 in the layout of
Humming's GEMM. For each: the engine starts (it checks every parameter's address itself), then completions are sampled
and scored by the trainer with the adapter zero and not, at two temperatures, without and with noise. Agreement is the mean of
exp |log p_trainer - log p_rollout|; scored without the noise it was sampled with it must be worse. Then decoding is
timed at several batch sizes, one more engine is started in the same process, and all is written into $OUT, or
benchmarks/results, as vllm_SHAPE.json.

For the compile cache: run with --rank 32, then with --rank 64, on one VLLM_CACHE_ROOT. A graph of the wrong rank would
show in the agreement. Needs vLLM, and humming-kernels for `humming`.
"""

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from qerl.config import LoraConfig
from qerl.engine.vllm_arguments import VllmOptions
from qerl.engine.vllm_engine import VllmEngine
from qerl.kernels.humming_layout import mma_of, pack
from qerl.model.packing import Item
from qerl.model.packing import pack as pack_rollouts
from qerl.model.policy import Policy
from qerl.quant.base_weights import BaseWeights
from qerl.types import GenerationRequest, NoiseDraw, Rollout, Sampling

SHAPES = {  # hidden, intermediate, layers, query heads, key heads, vocabulary
    "tiny": (256, 512, 2, 4, 2, 1024),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "32b": (5120, 27648, 64, 40, 8, 152064),
}
DRAW = NoiseDraw(sigma=1e-2, seed=0, step=1)
LIMIT = 1.02


def write_model(folder: Path, shape: str, device: torch.device) -> None:
    """A checkpoint of random bf16 weights whose next-token distributions are neither flat nor certain."""
    hidden, intermediate, layers, heads, key_heads, vocab = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)


def make_policy(folder: Path, format: str, rank: int, device: torch.device) -> Policy:
    """The policy over the packed checkpoint; `humming` is nvfp4 repacked for Humming."""
    base = BaseWeights.load(
        folder,
        format="nvfp4" if format == "humming" else format,
        dtype=torch.bfloat16,
        device=device,
    )
    if format == "humming":
        linears = base.linears
        for name in list(linears):  # one at a time, so that no second copy of the base exists
            linears[name] = pack(linears.pop(name), mma_of(device))
        base = dataclasses.replace(
            base, linears={f.name: linears[f.name] for f in base.layout.linears}
        )
    return Policy(base, LoraConfig(lora_r=rank, lora_alpha=2 * rank), model_name="random", seed=0)


def fill_adapter(policy: Policy, scale: float) -> None:
    """Random B, so that the adapter does something."""
    generator = torch.Generator(policy.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters():
            if "lora_B" in name:
                parameter.normal_(0, scale, generator=generator)


def requests_for(num_prompts: int, num_samples: int, length: int) -> list[GenerationRequest]:
    """Prompts of arbitrary tokens below 1000, seeds that differ everywhere."""
    return [
        GenerationRequest(
            str(p),
            tuple((7919 * p + 31 * i) % 1000 for i in range(length)),
            tuple(1 + p * num_samples + i for i in range(num_samples)),
        )
        for p in range(num_prompts)
    ]


@torch.no_grad()
def agreement(policy: Policy, rollouts: list[Rollout], temperature: float) -> float:
    """Mean exp |log p_trainer - log p_rollout| over all sampled tokens."""
    items = [Item(rollout, 1.0, 1.0) for rollout in rollouts]
    batches = pack_rollouts(
        items, max_tokens=8192, share_prompts=False, hidden_size=64, device=policy.device
    )
    ratios = [
        (policy.logprobs(b, temperature)[0] - b.rollout_logprobs).abs().exp() for b in batches
    ]
    return torch.cat(ratios).mean().item()


def sample(engine: VllmEngine, temperature: float) -> list[Rollout]:
    groups = engine.generate(requests_for(8, 4, 200), Sampling(temperature, 64, ()))
    return [rollout for group in groups for rollout in group]


def check_agreement(policy: Policy, engine: VllmEngine) -> dict[str, float]:
    """Agreement of every combination; `unaccounted_noise` is scored by the clean trainer and must stand out."""
    found = {}
    for adapter, scale in (("zero", 0.0), ("filled", 0.02)):
        fill_adapter(policy, scale)
        for temperature in (1.0, 0.7):
            for noise in (None, DRAW):
                engine.sync(1, noise)
                rollouts = sample(engine, temperature)
                name = f"adapter_{adapter}_t{temperature}{'_noise' if noise else ''}"
                with policy.noise(noise):
                    found[name] = agreement(policy, rollouts, temperature)
                if noise:
                    found[f"unaccounted_{name}"] = agreement(policy, rollouts, temperature)
    return found


def time_decoding(engine: VllmEngine, batch_sizes: list[int]) -> dict[str, float]:
    """Generated tokens a second, prefill of 256-token prompts included; the better of two."""
    found = {}
    for size in batch_sizes:
        requests = requests_for(max(1, size // 8), min(8, size), 256)
        seconds = []
        for _ in range(2):
            engine.sync(2, None)
            start = time.perf_counter()
            engine.generate(requests, Sampling(1.0, 128, ()))
            seconds.append(time.perf_counter() - start)
        found[f"b{size}_tokens_per_s"] = round(size * 128 / min(seconds), 1)
    return found


def time_sync(engine: VllmEngine) -> float:
    """Milliseconds of one `sync` with noise, the device's work included; the median of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.sync(2, DRAW)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return round(sorted(times)[2], 2)


def run_format(folder: Path, format: str, options: argparse.Namespace) -> dict[str, object]:
    """Everything for one format."""
    device = torch.device("cuda", 0)
    policy = make_policy(folder, format, options.rank, device)
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    settings = VllmOptions(
        max_model_len=512,
        max_num_seqs=max(options.batch_sizes),
        max_num_batched_tokens=8192,
        enforce_eager=options.eager,
    )
    engine = VllmEngine(policy, settings)
    result: dict[str, object] = {"start_s": round(time.perf_counter() - start, 1)}
    result["base_bytes"] = engine.holdings.shared
    result["twice_bytes"] = sum(engine.holdings.doubled.values())
    result["own_bytes"] = sum(engine.holdings.own.values())
    result["allocated_by_the_engine_bytes"] = torch.cuda.memory_allocated() - before
    print("\n".join(engine.holdings.lines()), flush=True)
    result["agreement"] = found = check_agreement(policy, engine)
    clean = [value for name, value in found.items() if not name.startswith("unaccounted")]
    result["agrees"] = max(clean) <= LIMIT
    result["sync_ms"] = time_sync(engine)
    result |= time_decoding(engine, options.batch_sizes)
    first = [r.completion_ids for r in sample(engine, 1.0)]
    result["same_again"] = first == [r.completion_ids for r in sample(engine, 1.0)]
    engine.close()
    if format == options.formats[0]:
        start = time.perf_counter()
        again = VllmEngine(policy, settings)
        again.sync(2, DRAW)
        result["restart_s"] = round(time.perf_counter() - start, 1)
        result["same_after_restart"] = first == [r.completion_ids for r in sample(again, 1.0)]
        again.close()
    del policy, engine
    torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "humming", "nf4", "bf16"])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_vllm: no CUDA GPU here; nothing to do")
        return
    report: dict[str, object] = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "vllm", "transformers", "peft")},
        "shape": options.shape,
        "rank": options.rank,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape, torch.device("cuda", 0))
        torch.cuda.empty_cache()
        for format in options.formats:
            report[format] = run_format(Path(folder), format, options)
            print(format, json.dumps(report[format], indent=1), flush=True)
    target = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    (target / f"vllm_{options.shape}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
