"""What vLLM is started with: sizes, how it samples, and what its compile cache has to know.

vLLM sees a folder with nothing but config.json: no weights, no tokenizer, and no generation config that would change
how is sampled. The folder is named after its content, because vLLM's compile cache is keyed by the path. That cache
cannot see our settings either and drops its guards, so a graph made for another rank would be loaded without an error:
everything of ours that shapes the graph is in `GraphSettings`, which goes into `additional_config` and so into the key.
"""
# pyright: reportMissingImports=false

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import qerl
from qerl.cache import build_once, cache_root
from qerl.engine.vllm_adapter import Part
from qerl.errors import UserError
from qerl.model.policy import Policy
from qerl.quant.base_weights import BaseWeights
from qerl.types import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

NAME = "qerl"
"""Of our quantization method, load format and key in `additional_config`"""
_BLOCK = 128
"""Most tokens of a cache block: 16 on GPUs, 128 on CPUs"""


@dataclass(frozen=True)
class VllmOptions:
    """What the engine is sized for."""

    max_model_len: int
    """Longest prompt and completion together"""
    max_num_seqs: int
    """Most completions decoded at once"""
    kv_cache_bytes: int | None = None
    """Default: room for `max_num_seqs` sequences of full length"""
    max_num_batched_tokens: int | None = None
    """Most tokens in one forward pass of vLLM; default: vLLM's own choice"""
    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs. Default: on a CPU, where compiling costs more than it saves"""
    deterministic: bool = False
    """Kernels whose sums have one order, chosen without timing: the same calls give the same numbers. Nothing on a CPU"""
    releases_cache: bool = False
    """Whether the key/value cache can be given back between rollouts; nothing on a CPU"""


@dataclass(frozen=True)
class GraphSettings:
    """Everything of ours that shapes the compiled graph."""

    qerl_version: str
    format: str
    layout: str
    """Class of the packed weights"""
    kernel: str
    """What kernels are chosen by: device, activation dtype, determinism"""
    rank: int
    targets: tuple[str, ...]
    """Adapted linears of a layer, as rows of fused matrices"""
    norm_dtype: str


def graph_settings(
    parts: dict[str, tuple[Part, ...]], policy: Policy, options: VllmOptions
) -> GraphSettings:
    """The settings of an engine with these adapted members."""
    base = policy.base
    targets = {
        f"{fused.split('.', 3)[3]}[{part.rows.start}:{part.rows.stop}]"
        for fused, members in parts.items()
        for part in members
    }
    return GraphSettings(
        qerl_version=qerl.__version__,
        format=base.format,
        layout=type(next(iter(base.linears.values()))).__name__,
        kernel=f"{policy.device.type} {policy.dtype}{' deterministic' * options.deterministic}",
        rank=max((part.rank for members in parts.values() for part in members), default=0),
        targets=tuple(sorted(targets)),
        norm_dtype=str(base.tensors["model.norm.weight"].dtype),
    )


def llm_arguments(policy: Policy, options: VllmOptions, settings: GraphSettings) -> dict[str, Any]:
    """Arguments of `vllm.LLM` (and of `vllm.EngineArgs`)."""
    on_cpu = policy.device.type == "cpu"
    arguments: dict[str, Any] = {
        "model": str(config_folder(policy.base)),
        "config_format": "hf",
        "model_impl": "vllm",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": str(policy.dtype).removeprefix("torch."),
        "hf_overrides": {"head_dtype": "float32"},
        "quantization": NAME,
        "load_format": NAME,
        "additional_config": {NAME: asdict(settings)},
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": kv_cache_bytes(policy.base, options, policy.dtype),
        # Sizes nothing when the cache's size is given, but vLLM refuses to start unless so much is free.
        "gpu_memory_utilization": 0.01,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "disable_log_stats": True,
    }
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if options.releases_cache and not on_cpu:
        arguments["enable_sleep_mode"] = True
    if not on_cpu:
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": capture_sizes(options.max_num_seqs)
        }
    return arguments


def sampling_params(sampling: Sampling, seed: int) -> "SamplingParams":
    """vLLM's parameters of one sample.

    `ignore_eos` switches off the ends that vLLM would add from the model's config; ours are the `stop_token_ids`.
    """
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_completion_length,
        stop_token_ids=list(sampling.eos_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a CUDA graph: few, because each takes time to capture, and at most a half apart above 16."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < max_num_seqs:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def kv_cache_bytes(base: BaseWeights, options: VllmOptions, dtype: torch.dtype) -> int:
    """Bytes of the key/value cache: as given, or for all sequences at full length.

    Raises UserError when what is given does not hold one sequence.
    """
    key_width = base.packed("model.layers.0.self_attn.k_proj").shape[0]
    num_layers = base.config.num_hidden_layers
    least = sequence_bytes(num_layers, key_width, options.max_model_len, dtype)
    if options.kv_cache_bytes is None:
        return options.max_num_seqs * least
    if options.kv_cache_bytes < least:
        raise UserError(
            f"engine=vllm: a key/value cache of {options.kv_cache_bytes:,} bytes does not hold one sequence of "
            f"{options.max_model_len} tokens; the least that would do is {least:,}"
        )
    return options.kv_cache_bytes


def sequence_bytes(num_layers: int, key_width: int, num_tokens: int, dtype: torch.dtype) -> int:
    """Cache of one sequence, in whole blocks, and one block that no other sequence shares."""
    num_blocks = -(-num_tokens // _BLOCK) + 1
    return num_blocks * _BLOCK * num_layers * 2 * key_width * dtype.itemsize


def config_folder(base: BaseWeights) -> Path:
    """A folder that holds the model's config.json and nothing else."""
    content = base.config.to_dict() | {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base.config.model_type]]
    }
    text = json.dumps(content, indent=2, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return build_once(cache_root() / "vllm" / name, write)
