"""The update, forward and backward of packed sequences: this package, what it cannot be faster than, and what others do.

The others get this package's packing and attention through transformers' attention interface, transformers' own
checkpointing, and log-probabilities from fp32 logits in chunks of 2,048 tokens, recomputed in backward: what a careful user
would write. On a GPU everything computes in bf16 and recomputes all layers in backward; on a CPU in fp32, recomputing none.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedConfig

from qerl.benchmarking.device import default_device, finish
from qerl.benchmarking.processes import Row
from qerl.benchmarking.profile import kernel_times, shares
from qerl.benchmarking.synthetic import compute_dtype, model_config, random_base
from qerl.config import LoraConfig
from qerl.model.attention import layout_for, register
from qerl.model.packing import Item, pack
from qerl.model.policy import Policy
from qerl.quant.layout import build_layout
from qerl.types import Microbatch, Rollout

PROMPT, COMPLETION, RANK, CHUNK, REPEATS = 256, 512, 32, 2048, 4
ARMS = {
    "ours": "qerl, NVFP4 base",
    "ours-nf4": "qerl, NF4 base",
    "floor": "the dense products alone",
    "hf-nf4": "transformers + PEFT + bitsandbytes NF4, bf16 adapter",
    "hf-nf4-fp32": "transformers + PEFT + bitsandbytes NF4, fp32 adapter",
    "hf-bf16": "transformers + PEFT, bf16 base",
    "hf-fp32": "transformers + PEFT, fp32 base",
}


@dataclass(frozen=True)
class UpdateWork:
    """What every arm of a comparison does."""

    model: str
    """A shape or a preset (synthetic.model_config)"""
    num_layers: tuple[int, ...]
    """Depths to measure, the greatest first; 0: all of the model's"""
    num_tokens: tuple[int, ...]
    """Sizes of a microbatch, in sequences of `prompt` + `completion` tokens"""
    prompt: int = PROMPT
    completion: int = COMPLETION
    num_kernels: int = 0
    """Kernels to list, longest first"""


class UpdateArm(Protocol):
    """A model with an adapter, or what stands for it."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The adapter's."""
        ...

    def keep_layers(self, count: int) -> None:
        """Use the first `count` layers from now on."""
        ...

    def step(self, batch: Microbatch) -> None:
        """One forward and backward; gradients are added up."""
        ...


def measure(arm: str, work: UpdateWork) -> Iterator[Row]:
    """A row for each depth and size: tokens_per_s (all tokens of the microbatch), ms, peak_gib, shares of kernel time."""
    device = default_device()
    started = time.perf_counter()
    config = model_config(work.model, work.num_layers[0])
    update = start(arm, config, device)
    finish(device)
    start_s = time.perf_counter() - started
    length = work.prompt + work.completion
    for num_layers in work.num_layers:
        depth = num_layers or config.num_hidden_layers
        update.keep_layers(depth)
        for budget in work.num_tokens:
            items = same_items(max(1, round(budget / length)), work.prompt, work.completion)
            (batch,) = unshared(items, 10**9, device)
            seconds, peak_gib = _time(update, batch, device)
            kernels = kernel_times(lambda batch=batch: update.step(batch), device)
            yield {
                "arm": arm,
                "layers": depth,
                "budget": budget,
                "tokens": len(items) * length,
                "tokens_per_s": round(len(items) * length / seconds, 1),
                "ms": round(1e3 * seconds, 1),
                "peak_gib": peak_gib,
                "start_s": round(start_s, 1),
                "shares": shares(kernels),
                **({"kernels": kernels[: work.num_kernels]} if work.num_kernels else {}),
            }


def _time(update: UpdateArm, batch: Microbatch, device: torch.device) -> tuple[float, float | None]:
    """Seconds of the fastest of `REPEATS` steps after one that warms up, and the GPU's peak in GiB."""

    def timed() -> float:
        begin = time.perf_counter()
        for parameter in update.parameters:
            parameter.grad = None
        update.step(batch)
        finish(device)
        return time.perf_counter() - begin

    timed()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = min(timed() for _ in range(REPEATS))
    if device.type == "cuda":
        return seconds, round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return seconds, None


def same_items(count: int, prompt: int, completion: int) -> list[Item]:
    """`count` sequences of arbitrary tokens below 1000, no prompt like another."""
    items = []
    for index in range(count):
        ids = tuple((7 * j + index) % 1000 for j in range(prompt + completion))
        rollout = Rollout(
            problem_id=str(index),
            sample_index=0,
            prompt_ids=ids[:prompt],
            completion_ids=ids[prompt:],
            logprobs=(0.0,) * completion,
            loss_mask=(True,) * completion,
            finish_reason="length",
            version=0,
        )
        items.append(Item(rollout, advantage=1.0, token_weight=1e-4))
    return items


def start(arm: str, config: PreTrainedConfig, device: torch.device) -> UpdateArm:
    """One of `ARMS`."""
    if arm in ("ours", "ours-nf4"):
        return OurUpdate(config, "nf4" if arm == "ours-nf4" else "nvfp4", device)
    if arm == "floor":
        return ProductsAlone(config, device)
    return start_transformers(arm, config, device)


def start_transformers(
    arm: str, config: PreTrainedConfig, device: torch.device
) -> "TransformersUpdate":
    """One of the arms hf-*."""
    return TransformersUpdate(
        config,
        device,
        quantized=arm in ("hf-nf4", "hf-nf4-fp32"),
        fp32_adapter=arm in ("hf-nf4-fp32", "hf-fp32"),
    )


def unshared(items: Sequence[Item], max_tokens: int, device: torch.device) -> Iterator[Microbatch]:
    """Microbatches of at most so many tokens in which every sequence has its own prompt."""
    return pack(items, max_tokens=max_tokens, share_prompts=False, hidden_size=0, device=device)


class OurUpdate:
    """This package's policy over a packed base."""

    def __init__(self, config: PreTrainedConfig, format: str, device: torch.device):
        self.policy = Policy(
            random_base(config, format, device),
            LoraConfig(lora_r=RANK, lora_alpha=RANK),
            model_name="random",
            seed=0,
        )
        if device.type == "cuda":
            self.policy.enable_recomputation()
        self.parameters = [parameter for _, parameter in self.policy.trainable_parameters()]

    def keep_layers(self, count: int) -> None:
        self.policy.decoder.layers = self.policy.decoder.layers[:count]  # pyright: ignore[reportIndexIssue]

    def step(self, batch: Microbatch) -> None:
        logprobs, _ = self.policy.logprobs(batch, 1.0)
        _loss(logprobs, batch).backward()


def _loss(logprobs: Tensor, batch: Microbatch) -> Tensor:
    """The policy gradient where rollouts and update have the same weights."""
    return -(logprobs * batch.advantages * batch.token_weights).sum()


class ProductsAlone:
    """The dense matrix products that a step cannot avoid, each into a buffer that is there: forward, again where layers are
    recomputed, dX; the head's forward, again, dX. Matrices of two layers are rotated over."""

    parameters: Sequence[nn.Parameter] = ()

    def __init__(self, config: PreTrainedConfig, device: torch.device):
        self.device, self.dtype = device, compute_dtype(device)
        self.num_layers = config.num_hidden_layers
        self.forwards = 2 if device.type == "cuda" else 1
        linears = build_layout(config).linears
        first = linears[: len(linears) // self.num_layers]
        self.shapes = [(sum(fused.member_rows), fused.num_columns) for fused in first]
        self.layers = [[self._random(*shape) for shape in self.shapes] for _ in range(2)]
        self.head = self._random(config.vocab_size, config.hidden_size)
        self.num_tokens = 0

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device).to(self.dtype)

    def _make_buffers(self, tokens: int) -> None:
        self.num_tokens = tokens
        self.inputs = {columns: self._random(tokens, columns) for _, columns in self.shapes}
        widths = {width for shape in self.shapes for width in shape}
        self.outputs = {width: self._random(tokens, width) for width in widths}

    def keep_layers(self, count: int) -> None:
        self.num_layers = count

    def step(self, batch: Microbatch) -> None:
        tokens, scored = len(batch.token_ids), len(batch.target_ids)
        if tokens != self.num_tokens:
            self._make_buffers(tokens)
        inputs, outputs = self.inputs, self.outputs
        for layer in range(self.num_layers):
            for weight in self.layers[layer % 2]:
                rows, columns = weight.shape
                for _ in range(self.forwards):
                    torch.mm(inputs[columns], weight.t(), out=outputs[rows])
                torch.mm(outputs[rows], weight, out=inputs[columns])
        vocab, hidden = self.head.shape
        logits = self.head.new_empty(min(CHUNK, scored), vocab)
        for begin in range(0, scored, CHUNK):
            part = inputs[hidden][begin : min(begin + CHUNK, scored)]
            for _ in range(2):
                torch.mm(part, self.head.t(), out=logits[: len(part)])
            torch.mm(logits[: len(part)], self.head, out=part)


class TransformersUpdate:
    """transformers + PEFT, on bitsandbytes' NF4 (double quantization) or a dense base, under bf16 autocast on a GPU."""

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        *,
        quantized: bool,
        fp32_adapter: bool,
    ):
        from peft import LoraConfig as PeftLoraConfig
        from peft import get_peft_model

        self.device, self.dtype = device, compute_dtype(device)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, attn_implementation=register()
            )
        _fill(model, self.dtype, device, quantized=quantized)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
        settings = PeftLoraConfig(
            r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.peft_model = get_peft_model(model, settings, autocast_adapter_dtype=fp32_adapter)
        if device.type == "cuda":
            self.peft_model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self.peft_model.train()
        trained = [(n, p) for n, p in self.peft_model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [n for n, _ in trained], [p for _, p in trained]
        self.decoder, self.head = model.model, model.lm_head.weight

    def keep_layers(self, count: int) -> None:
        self.decoder.layers = self.decoder.layers[:count]

    def step(self, batch: Microbatch) -> None:
        layout = layout_for(batch.rows, self.device, self.dtype)
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            hidden = self.decoder(
                input_ids=batch.token_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]
            parts = [
                checkpoint(self._chunk_logprobs, before, targets, use_reentrant=False)
                for before, targets in zip(
                    hidden[batch.score_index].split(CHUNK),
                    batch.target_ids.split(CHUNK),
                    strict=True,
                )
            ]
        _loss(torch.cat(parts), batch).backward()  # pyright: ignore[reportArgumentType]

    def _chunk_logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = torch.mm(hidden, self.head.t()).float()
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _fill(model: nn.Module, dtype: torch.dtype, device: torch.device, *, quantized: bool) -> None:
    """Random weights on the device, linears of the decoder quantized by bitsandbytes if asked."""
    if quantized:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and name != "lm_head":
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, _quantized(module, dtype, device))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                values = torch.ones(parameter.shape, device=device, dtype=dtype)
                if parameter.dim() == 2:
                    values.normal_(0, parameter.shape[1] ** -0.5)
                module.register_parameter(name, nn.Parameter(values, requires_grad=False))


def _quantized(module: nn.Linear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """bitsandbytes' linear in the place of one on the meta device, random."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    linear = Linear4bit(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    values = torch.empty(module.weight.shape, device=device, dtype=dtype)
    values.normal_(0, module.in_features**-0.5)
    nf4 = {"compress_statistics": True, "quant_type": "nf4"}
    linear.weight = Params4bit(values, requires_grad=False, **nf4).to(device)  # pyright: ignore
    if module.bias is not None:
        zeros = torch.zeros(module.out_features, dtype=dtype, device=device)
        linear.bias = nn.Parameter(zeros, requires_grad=False)
    return linear
