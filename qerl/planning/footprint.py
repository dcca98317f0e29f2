"""How many bytes a run takes, counted from shapes before anything is allocated.

Let N x K be the linears of the decoder, V x H the embedding, L the layers, I the intermediate size, Q and KV the widths
of all query and of all key heads, r the LoRA rank, n the adapter's parameters, c the bytes of the compute dtype.

always    base, packed   nvfp4: N K / 2 + N K / 16 + 4 a fused matrix; nf4: N K / 2 + N K / 64 + 4 a block of 16,384 + 4 a
                         matrix; bf16: 2 N K
          rest of base   embeddings, head (once if tied) and biases in the compute dtype, norms in fp32
          adapter        4 n masters + 4 n gradients
          optimizer      8 n (adamw), or 2 n + 8 a block of 256 (adamw_8bit; fp32 below 4096 elements)
          runtime        Python and its libraries, or the CUDA context: measured constants
rollout   KV cache       rows x (prompt + completion) x L x 2 KV x c
          sampling       rows x V x 4 bytes x 5 (logits, scaled, log-softmax, probabilities, their running sum)
          expanded base  CPU only: every linear in the compute dtype for the length of a phase, N K x c
update    activations    what autograd keeps of a layer, times tokens x L. CUDA: c (4 H + 2 Q + 2 KV + 3 I + 7 r): inputs of
                         linears, norms, attention and SwiGLU. CPU: c (2 H + 3 Q + 2 KV + I + 7 r) + 4 (2 H + 3 I): norms'
                         inputs and SwiGLU's factors in fp32.
                         A layer that is recomputed keeps c H, in the host's memory where it is offloaded, and one layer's whole
                         set is there at a time, of which the MLP's 3 I for at most one tile of tokens.
          logits chunk   5/2 fp32 copies of at most 128 MiB
          one layer      the largest matrix dense (all of a layer's where it is recomputed), and the gradients that flow through it
both      fp32 head      V H x 4, on the CPU in bf16 only: the head's products are in fp32

With the vLLM engine the rollout is counted by `qerl.planning.footprint_vllm` instead; a key/value cache that is not given back during the
update is always there.

The phases never overlap, so the peak is always + the larger of the two. Packed and adapter bytes are exact; the sum is
meant to lie above the real peak on the CPU, with `memory.return_freed_memory`; how far was not measured.
"""

import math

import torch

from qerl.config import Config
from qerl.model.logprobs import CHUNK_BYTES
from qerl.model.offload import MAX_LEAVING, host_bytes
from qerl.model.recompute import TILE_TOKENS
from qerl.planning.footprint_vllm import engine_parts, padded_matrix_bytes
from qerl.planning.sizes import GIB, Dims, Part, Phase, Place, Sizes, dims_of
from qerl.quant.layout import FusedLinear, Layout, is_norm

RUNTIME_BYTES = {"cpu": int(0.35 * GIB), "cuda": int(0.6 * GIB)}
"""Before any tensor: Python with torch, transformers, PEFT and bitsandbytes; a CUDA context and cuBLAS' workspace."""
NF4_BLOCK, NF4_DOUBLE_BLOCK = 64, 64 * 256
BNB_BLOCK, BNB_MIN_8BIT = 256, 4096


def num_parameters(layout: Layout) -> int:
    """Parameters of the model, a tied head counted once."""
    return sum(fused.num_weights for fused in layout.linears) + sum(
        math.prod(shape) for shape in layout.dense.values()
    )


def packed_bytes(layout: Layout, quant: str, *, padded: bool = False) -> int:
    """Bytes of all packed linears: exactly what `BaseWeights` holds. `padded`: NVFP4 in the layout of vLLM's kernel."""
    if padded:
        return sum(padded_matrix_bytes(fused) for fused in layout.linears)
    return sum(_packed_matrix_bytes(fused, quant) for fused in layout.linears)


def dense_bytes(layout: Layout, dtype: torch.dtype) -> int:
    """Bytes of embeddings, head, biases (compute dtype) and norms (fp32)."""
    return sum(
        math.prod(shape) * (4 if is_norm(name) else dtype.itemsize)
        for name, shape in layout.dense.items()
    )


def adapter_shapes(layout: Layout, config: Config) -> list[tuple[int, int]]:
    """Shapes of all LoRA matrices: A [r, K] and B [N, r] of each targeted linear."""
    rank, targets = config.lora.lora_r, config.lora.lora_target_modules
    shapes = []
    for fused in layout.linears:
        for member, num_rows in zip(fused.members, fused.member_rows, strict=True):
            if targets == ("all-linear",) or member.rpartition(".")[2] in targets:
                shapes += [(rank, fused.num_columns), (num_rows, rank)]
    return shapes


def optimizer_bytes(shapes: list[tuple[int, int]], optim: str) -> int:
    """Bytes of both moments."""
    total = 0
    for shape in shapes:
        numel = math.prod(shape)
        if optim == "adamw" or numel < BNB_MIN_8BIT:
            total += 8 * numel
        else:
            total += 2 * numel + 8 * -(-numel // BNB_BLOCK)
    return total


def recomputes(config: Config, device_type: str) -> bool:
    """Whether backward recomputes layers: as asked, else on CUDA."""
    asked = config.train.gradient_checkpointing
    return device_type == "cuda" if asked is None else asked


def offloaded_bytes(layout: Layout, dtype: torch.dtype, tokens: int, num_layers: int) -> int:
    """Host memory for the inputs of so many layers, of a microbatch of so many tokens."""
    return host_bytes(num_layers, tokens * dims_of(layout).hidden * dtype.itemsize)


def recomputed_layers(config: Config, num_layers: int, device_type: str, sizes: Sizes) -> int:
    """How many decoder layers backward recomputes; the plan may keep some when the config leaves it the choice."""
    if not recomputes(config, device_type):
        return 0
    chosen = config.train.gradient_checkpointing is None
    return num_layers - (sizes.kept_layers if chosen else 0)


def num_rows(config: Config) -> int:
    """Most completions decoded at once, in training or evaluation."""
    train = config.rollout.prompts_per_step * config.rollout.num_generations
    held_out = config.log.eval_size * config.log.eval_num_generations
    return min(max(train, held_out), config.rollout.max_batch_size)


def wanted_sizes(config: Config) -> Sizes:
    """What the config asks for, whatever there is room for."""
    return Sizes(num_rows(config), config.train.max_tokens_per_microbatch)


def microbatch_tokens(config: Config, longest_prompt: int, max_tokens: int) -> int:
    """Most packed tokens in one forward: the budget, but no less than one sequence and no more than the batch."""
    longest = longest_prompt + config.rollout.max_completion_length
    batch = longest * config.rollout.prompts_per_step * config.rollout.num_generations
    return min(max(max_tokens, longest), batch)


def footprint(
    config: Config,
    layout: Layout,
    place: Place,
    sizes: Sizes | None = None,
    *,
    trains: bool = True,
) -> tuple[Part, ...]:
    """Everything that takes memory in a run.

    `sizes` are the config's unless given; without `trains` there is no gradient, optimizer or update.
    """
    sizes = wanted_sizes(config) if sizes is None else sizes
    shapes = adapter_shapes(layout, config)
    num_adapter = sum(math.prod(shape) for shape in shapes)
    on_vllm = place.engine == "vllm"
    padded = on_vllm and place.device_type == "cuda" and config.quant == "nvfp4"
    always = {
        f"base, packed ({config.quant})": packed_bytes(layout, config.quant, padded=padded),
        "embeddings, head, norms": dense_bytes(layout, place.dtype),
        "runtime": RUNTIME_BYTES[place.device_type],
    }
    if trains:
        always["adapter and gradients"] = 8 * num_adapter
        always[f"optimizer ({config.train.optim})"] = optimizer_bytes(shapes, config.train.optim)
    else:
        always["adapter"] = 4 * num_adapter
    parts = [Part(name, num_bytes, "always") for name, num_bytes in always.items()]
    rollout_parts = engine_parts if on_vllm else _rollout_parts
    parts += rollout_parts(config, layout, place, sizes)
    if trains:
        parts += _update_parts(config, layout, place, sizes)
    return tuple(parts)


def peak_bytes(parts: tuple[Part, ...]) -> int:
    """What is always there and the larger of the two phases."""
    return phase_bytes(parts, "always") + max(
        phase_bytes(parts, "rollout"), phase_bytes(parts, "update")
    )


def phase_bytes(parts: tuple[Part, ...], phase: Phase) -> int:
    """Sum of a phase's own parts."""
    return sum(part.num_bytes for part in parts if part.phase == phase)


def _rollout_parts(config: Config, layout: Layout, place: Place, sizes: Sizes) -> list[Part]:
    dims, rows, dtype = dims_of(layout), sizes.max_num_seqs, place.dtype
    tokens = rows * (place.longest_prompt + config.rollout.max_completion_length)
    parts = [
        Part("KV cache", tokens * dims.num_layers * 2 * dims.key * dtype.itemsize, "rollout"),
        Part("sampling", rows * dims.vocab * 4 * 5, "rollout"),
        *_head_copy(dims, place, "rollout"),
    ]
    if place.device_type == "cpu":
        parts.append(Part("base held expanded", _expanded_bytes(config, layout, dtype), "rollout"))
    else:
        parts.append(
            Part("largest matrix, dense", _largest_matrix(layout) * dtype.itemsize, "rollout")
        )
    return parts


def _update_parts(config: Config, layout: Layout, place: Place, sizes: Sizes) -> list[Part]:
    dims, c = dims_of(layout), place.dtype.itemsize
    tokens = microbatch_tokens(config, place.longest_prompt, sizes.max_tokens_per_microbatch)
    recomputed = recomputed_layers(config, dims.num_layers, place.device_type, sizes)
    in_mlp, beside_mlp = _kept_of_layer(dims, place.device_type, c)
    beside_mlp += 7 * c * config.lora.lora_r
    # While the last layer that is recomputed is, those after it have given theirs back; only without such is it extra.
    whole = max(dims.num_layers - recomputed, 1)
    tile = min(tokens, TILE_TOKENS) if recomputed == dims.num_layers else tokens
    kept = whole * (tokens * beside_mlp + tile * in_mlp)
    on_device = max(recomputed - sizes.offloaded_layers, 0)
    if sizes.offloaded_layers:
        on_device += min(MAX_LEAVING + 1, sizes.offloaded_layers)
    kept += on_device * tokens * c * dims.hidden
    dense = _layer_weights(layout) if recomputed else _largest_matrix(layout)
    flowing = c * (tokens * 4 * dims.hidden + tile * 3 * dims.intermediate)
    scored = tokens * config.rollout.max_completion_length
    scored //= place.longest_prompt + config.rollout.max_completion_length
    chunk = min(CHUNK_BYTES, scored * dims.vocab * 4)
    return [
        Part("activations", kept, "update"),
        Part("logits chunk", 5 * chunk // 2, "update"),
        *_head_copy(dims, place, "update"),
        Part("one layer, dense", dense * c + flowing, "update"),
    ]


def _kept_of_layer(dims: Dims, device_type: str, itemsize: int) -> tuple[int, int]:
    """Bytes a token that one layer's forward keeps for backward, the adapter's aside: inside the MLP, and beside it."""
    if device_type == "cuda":
        # qerl.model.fused: a chain of element-wise operations keeps its inputs only
        beside = 4 * dims.hidden + 2 * dims.query + 2 * dims.key
        return itemsize * 3 * dims.intermediate, itemsize * beside
    beside = itemsize * (2 * dims.hidden + 3 * dims.query + 2 * dims.key) + 4 * 2 * dims.hidden
    return (itemsize + 4 * 3) * dims.intermediate, beside


def _head_copy(dims: Dims, place: Place, phase: Phase) -> list[Part]:
    if place.device_type != "cpu" or place.dtype == torch.float32:
        return []
    return [Part("head in fp32", dims.vocab * dims.hidden * 4, phase)]


def _expanded_bytes(config: Config, layout: Layout, dtype: torch.dtype) -> int:
    """bf16 in bf16 is its own expansion."""
    if config.quant == "bf16" and dtype == torch.bfloat16:
        return 0
    return sum(fused.num_weights for fused in layout.linears) * dtype.itemsize


def _layer_weights(layout: Layout) -> int:
    """Weights of one decoder layer's matrices: recomputation holds them dense until backward has used them."""
    return sum(f.num_weights for f in layout.linears if f.name.startswith("model.layers.0."))


def _largest_matrix(layout: Layout) -> int:
    return max(fused.num_weights for fused in layout.linears)


def _packed_matrix_bytes(fused: FusedLinear, quant: str) -> int:
    match quant:
        case "nvfp4":
            return fused.num_weights // 2 + fused.num_weights // 16 + 4
        case "nf4":
            weights = [rows * fused.num_columns for rows in fused.member_rows]
            return sum(
                -(-w // 2) + -(-w // NF4_BLOCK) + 4 * -(-w // NF4_DOUBLE_BLOCK) + 4 for w in weights
            )
        case "bf16":
            return 2 * fused.num_weights
    raise ValueError(f"unknown format {quant!r}")
