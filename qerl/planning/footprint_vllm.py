"""How many bytes the vLLM engine takes beside the base, counted from shapes.

Letters as in `qerl.planning.footprint`; b is the most tokens of one forward pass of vLLM, s the most sequences at once.

always    adapter      c r (n K + N) for each fused matrix [N, K] of n members, in the activations' dtype
          twice        norms that carry noise in fp32, biases of fused matrices
          reserve      CUDA graphs, attention's and GEMMs' workspaces, vLLM's buffers and code: measured constants
          KV cache     as the plan has it, unless it is given back during the update: then it is the rollout's
rollout   prefill      b x c (3 I + 4 H + 2 (Q + 2 KV)), and the largest fused matrix dense, for large products expand it
          sampling     s x V x 4 bytes x 4

The cache of one sequence is 2 KV L c bytes a token, in whole blocks.
"""

import math

import torch

from qerl.config import Config
from qerl.engine.vllm_arguments import capture_sizes, sequence_bytes
from qerl.kernels.humming_layout import padded_shape
from qerl.planning.sizes import Part, Place, Sizes, dims_of
from qerl.quant.layout import FusedLinear, Layout

CODE_BYTES = int(0.5 * 2**30)
"""vLLM's and its attention's compiled code, cuBLAS' workspaces: an estimate until it is measured."""
GRAPH_LAYER_BYTES = 2**19
"""A layer's share of one captured CUDA graph: an estimate until it is measured."""
NUM_LOGIT_COPIES = 4


def engine_parts(config: Config, layout: Layout, place: Place, sizes: Sizes) -> list[Part]:
    """What the engine holds, and what it needs while it samples."""
    dims, c = dims_of(layout), place.dtype.itemsize
    num_graphs = len(capture_sizes(sizes.max_num_seqs)) if place.device_type == "cuda" else 0
    reserve = CODE_BYTES + num_graphs * dims.num_layers * GRAPH_LAYER_BYTES
    passed = min(sizes.max_num_batched_tokens, sizes.max_num_seqs * _longest(config))
    widths = 3 * dims.intermediate + 4 * dims.hidden + 2 * (dims.query + 2 * dims.key)
    largest = max(fused.num_weights for fused in layout.linears)
    if config.quant == "nf4":
        reserve += largest * c  # expanded inside the CUDA graphs too
    cache_phase = "rollout" if sizes.releases_cache else "always"
    return [
        Part("engine's adapter", _adapter_bytes(config, layout, c), "always"),
        Part("norms and biases held twice", _twice_bytes(layout, c), "always"),
        Part("CUDA graphs, workspaces", reserve, "always"),
        Part("KV cache", sizes.kv_cache_bytes, cache_phase),
        Part("prefill", (passed * widths + largest) * c, "rollout"),
        Part("sampling", sizes.max_num_seqs * dims.vocab * 4 * NUM_LOGIT_COPIES, "rollout"),
    ]


def cache_bytes(layout: Layout, dtype: torch.dtype, num_tokens: int) -> int:
    """Key/value cache of one sequence of this length."""
    dims = dims_of(layout)
    return sequence_bytes(dims.num_layers, dims.key, num_tokens, dtype)


def padded_matrix_bytes(fused: FusedLinear) -> int:
    """Bytes of one NVFP4 matrix in Humming's layout."""
    num_weights = math.prod(padded_shape((sum(fused.member_rows), fused.num_columns)))
    return num_weights // 2 + num_weights // 16 + 4


def _longest(config: Config) -> int:
    return config.rollout.max_prompt_length + config.rollout.max_completion_length


def _adapter_bytes(config: Config, layout: Layout, c: int) -> int:
    """A has rows for every member of a matrix that has an adapted one."""
    targets, total = config.lora.lora_target_modules, 0
    for fused in layout.linears:
        if targets == ("all-linear",) or any(
            member.rpartition(".")[2] in targets for member in fused.members
        ):
            width = len(fused.members) * fused.num_columns + sum(fused.member_rows)
            total += c * config.lora.lora_r * width
    return total


def _twice_bytes(layout: Layout, c: int) -> int:
    """Two norms a block, and biases of matrices that have several members."""
    fused_members = {m for f in layout.linears if len(f.members) > 1 for m in f.members}
    norms = sum(4 * math.prod(s) for n, s in layout.dense.items() if n.endswith("layernorm.weight"))
    biases = sum(
        c * math.prod(shape)
        for name, shape in layout.dense.items()
        if name.endswith(".bias") and name.removesuffix(".bias") in fused_members
    )
    return norms + biases
