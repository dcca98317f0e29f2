"""Rollouts: how fast an engine decodes, and the bound that moving weights and cache once a token sets.

Groups of 8 samples share a prompt. A decode step is the time of a generation less that of its first token, over the tokens
after it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from qerl.benchmarking.device import default_device, finish
from qerl.benchmarking.processes import Row
from qerl.benchmarking.profile import kernel_times, less, shares
from qerl.benchmarking.synthetic import compute_dtype, model_config, random_base
from qerl.config import LoraConfig
from qerl.engine.base import Engine
from qerl.engine.choice import choose_engine
from qerl.engine.transformers_engine import TransformersEngine
from qerl.model.policy import Policy
from qerl.planning.sizes import dims_of
from qerl.planning.step_time import measure_speed
from qerl.quant.layout import EMBEDDING, HEAD, build_layout
from qerl.types import GenerationRequest, Sampling

PROMPT, GENERATED, GROUP, RANK, REPEATS = 256, 128, 8, 32, 3
PROFILED = 8
"""Decode steps whose kernels are counted"""
BLOCK = 16
"""Tokens of a page of the key/value cache"""
FORMATS = {
    "ours": "nvfp4",
    "bare": "nvfp4",
    "deterministic": "nvfp4",
    "nf4": "nf4",
    "nf4-bare": "nf4",
    "bf16": "bf16",
}
"""Format of the base of this package's arms"""
Generate = Callable[[int, int], int]
"""(sequences, tokens each) -> tokens generated; the prefix cache is empty before"""


@dataclass(frozen=True)
class RolloutWork:
    """What every arm of a comparison does."""

    model: str
    """A shape or a preset (synthetic.model_config)"""
    num_layers: int
    """0: all of the model's"""
    num_sequences: tuple[int, ...]
    prompt: int = PROMPT
    generated: int = GENERATED
    deterministic: bool = False
    """Of this package's vLLM engine (qerl.determinism)"""
    num_kernels: int = 0
    """Longest kernels of a decode step to list"""

    @property
    def config(self) -> PreTrainedConfig:
        """Of the model, with these layers."""
        return model_config(self.model, self.num_layers)

    @property
    def max_model_len(self) -> int:
        """Longest sequence that an engine has room for."""
        return 2 * self.prompt

    @property
    def max_num_seqs(self) -> int:
        """Most sequences at once."""
        return max(self.num_sequences)

    @property
    def kv_cache_bytes(self) -> int:
        """bf16 keys and values of all completions and of each group's prompt, a tenth more, and one longest sequence."""
        groups = -(-self.max_num_seqs // GROUP)
        tokens = self.max_num_seqs * (self.generated + BLOCK) + groups * (self.prompt + BLOCK)
        tokens = tokens * 11 // 10 + self.max_model_len
        return tokens * cache_bytes_per_token(self.config)


@dataclass(frozen=True)
class RolloutArm:
    """An engine that is started."""

    name: str
    """The engine's, for people"""
    generate: Generate
    step_bytes: Callable[[int, float], int] | None = None
    """(sequences, mean context) -> bytes that a decode step has to read; None: not known"""
    base_copies: float | None = None
    """Bytes of the base that trainer and engine hold together, over the base's; None: not known"""


StartArm = Callable[[str, RolloutWork], RolloutArm]


def measure(arm: str, start: StartArm, work: RolloutWork) -> Iterator[Row | None]:
    """None when it has started; then a row for each number of sequences.

    tokens_per_s with prefill; step_ms of a decode step, kernel_ms of it in which the device was busy, with shares by kind; floor_ms.
    """
    device = default_device()
    started = time.perf_counter()
    started_arm = start(arm, work)
    start_s = round(time.perf_counter() - started, 1)
    generate = started_arm.generate
    yield None
    bytes_per_s = measure_speed(device, compute_dtype(device)).bytes_per_s
    for size in work.num_sequences:
        generate(size, 4)
        prefill, total = (
            statistics.median(_timed(generate, size, tokens, device) for _ in range(REPEATS))
            for tokens in (1, work.generated)
        )
        row = {
            "arm": arm,
            "engine": started_arm.name,
            "sequences": size,
            "tokens_per_s": round(size * work.generated / total, 1),
            "step_ms": round(1e3 * (total - prefill) / (work.generated - 1), 3),
            "prefill_s": round(prefill, 3),
            "start_s": start_s,
        }
        long, short = (
            kernel_times(lambda size=size, tokens=tokens: generate(size, tokens), device)
            for tokens in (PROFILED + 1, 1)
        )
        kernels = less(long, short)
        row["kernel_ms"] = round(sum(kernel["ms"] for kernel in kernels) / PROFILED, 3)
        row["shares"] = shares(kernels)
        if work.num_kernels:
            row["kernels"] = [
                {**kernel, "ms": round(kernel["ms"] / PROFILED, 3)}
                for kernel in kernels[: work.num_kernels]
            ]
        if started_arm.step_bytes is not None:
            moved = started_arm.step_bytes(size, work.prompt + work.generated / 2)
            row["step_bytes"] = moved
            # A copy reads and writes; its bytes/s count both.
            row["floor_ms"] = round(1e3 * moved / bytes_per_s, 3)
        if started_arm.base_copies is not None:
            row["base_copies"] = round(started_arm.base_copies, 6)
        if device.type == "cuda":
            row["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        yield row


def _timed(generate: Generate, size: int, tokens: int, device: torch.device) -> float:
    finish(device)
    start = time.perf_counter()
    generated = generate(size, tokens)
    seconds = time.perf_counter() - start
    assert generated == size * tokens, (generated, size, tokens)
    return seconds


def prompts_of(size: int, length: int) -> list[tuple[tuple[int, ...], int]]:
    """(prompt, samples) of groups: arbitrary tokens below 1000."""
    group = min(GROUP, size)
    return [
        (tuple((7919 * p + 31 * i) % 1000 for i in range(length)), group)
        for p in range(size // group)
    ]


def cache_bytes_per_token(config: PreTrainedConfig) -> int:
    """Key and value of one token in bf16, over all layers."""
    dims = dims_of(build_layout(config))
    return 2 * 2 * dims.num_layers * dims.key


def start_ours(arm: str, work: RolloutWork) -> RolloutArm:
    """This package's engine on a random base in the arm's format: vLLM where it can run, else transformers."""
    device = default_device()
    base = random_base(work.config, FORMATS[arm], device)
    policy = Policy(base, LoraConfig(lora_r=RANK, lora_alpha=RANK), model_name="random", seed=0)
    engine, name, copies = start_engine(policy, work)

    def generate(size: int, tokens: int) -> int:
        engine.sync(0, None)
        requests = [
            GenerationRequest(str(p), prompt, tuple(1 + p * GROUP + i for i in range(samples)))
            for p, (prompt, samples) in enumerate(prompts_of(size, work.prompt))
        ]
        groups = engine.generate(requests, Sampling(1.0, tokens, ()))
        return sum(len(rollout.completion_ids) for group in groups for rollout in group)

    weights = sum(weight.nbytes for weight in base.linears.values())
    head = base.tensors.get(HEAD, base.tensors[EMBEDDING]).nbytes
    adapter = sum(p.numel() * policy.dtype.itemsize for _, p in policy.trainable_parameters())
    a_token = dims_of(base.layout).num_layers * 2 * dims_of(base.layout).key * policy.dtype.itemsize

    def step_bytes(sequences: int, context: float) -> int:
        return weights + head + adapter + round(sequences * context * a_token)

    return RolloutArm(name, generate, step_bytes, copies)


def start_engine(policy: Policy, work: RolloutWork) -> tuple[Engine, str, float]:
    """The engine that a training run would take here, sized for the work, its name with the reason, and copies of the base."""
    choice = choose_engine("auto", policy.device, policy.base.format)
    name = f"{choice.name} ({choice.reason})"
    if choice.name == "transformers":
        return TransformersEngine(policy, work.max_num_seqs), name, 1.0
    from qerl.engine import vllm_engine
    from qerl.engine.vllm_arguments import VllmOptions

    options = VllmOptions(
        max_model_len=work.max_model_len,
        max_num_seqs=work.max_num_seqs,
        kv_cache_bytes=work.kv_cache_bytes,
        max_num_batched_tokens=8192,
        deterministic=work.deterministic,
    )
    engine = vllm_engine.VllmEngine(policy, options)
    copies = 1 + sum(engine.holdings.doubled.values()) / engine.holdings.shared
    return engine, name, copies
