"""Rollouts with vLLM in this process, on the trainer's own copy of the base.

vLLM adopts the tensors of `BaseWeights` (vllm_weights.py), carries the adapter inside its linears (vllm_adapter.py) and
has its own copy of the norms that noise is drawn on. Between rollouts `sync` copies the adapter in, sets those norms to
clean weights plus noise, and empties the prefix cache: whatever was cached belongs to older weights. Everything is
written in place, so compiled code and CUDA graphs see it.

One vLLM request a sample, with its own seed: what is drawn then depends on the seed and the logits alone, and a resumed
run draws what the uninterrupted one would have. The prompt's keys and values are shared through the prefix cache.
Log-probs are of the distribution that was really sampled from, computed from fp32 logits.

vLLM sees a folder with nothing but config.json: no weights, no tokenizer and no generation config that would change
how is sampled. Its compile cache cannot see our settings, so what shapes the graph is hashed through `GraphSettings`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import qerl
from qerl.algo.noise import draw_noise
from qerl.cache import build_once, cache_root
from qerl.engine.vllm_setup import process_left_alone, require_vllm, shut_down
from qerl.errors import RunError, UserError
from qerl.model.policy import Policy
from qerl.quant.base_weights import BaseWeights
from qerl.types import GenerationRequest, NoiseDraw, Rollout, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from qerl.engine.vllm_adapter import Part

_BLOCK = 128
"""Tokens that a cache block may hold at most: 16 on GPUs, 128 on CPUs."""


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
    batch_invariant: bool = False
    """Packed products without sums whose order changes from run to run"""


@dataclass(frozen=True)
class GraphSettings:
    """Everything of ours that shapes the compiled graph. vLLM hashes it into the key of its compile cache."""

    qerl_version: str
    format: str
    layout: str
    """Class of the packed weights"""
    kernel: str
    """What the packed product is chosen by: device, activation dtype, batch invariance"""
    rank: int
    targets: tuple[str, ...]
    """Adapted linears of all layers, by transformers' names"""
    norm_dtype: str


@dataclass(frozen=True)
class Holdings:
    """Bytes that the engine holds besides its key/value cache, by what they are."""

    adopted: int
    """The base's own tensors: held once, by both"""
    doubled: dict[str, int]
    """Parameters that exist twice"""
    own: dict[str, int]
    """Buffers: the adapter in the activations' dtype, rotary tables"""

    def lines(self) -> list[str]:
        """For people: a summary line, then every parameter kind that exists twice."""
        total = sum(self.doubled.values())
        kinds: dict[str, int] = {}
        for name, num_bytes in self.doubled.items():
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            kinds[kind] = kinds.get(kind, 0) + num_bytes
        return [
            f"vLLM shares {self.adopted:,} bytes with the trainer; {total:,} bytes exist twice, and it has "
            f"{sum(self.own.values()):,} bytes of adapter and tables",
            *(f"  twice: {kind} {num_bytes:,} bytes" for kind, num_bytes in sorted(kinds.items())),
        ]


class VllmEngine:
    """Engine over a Policy's base and adapter. State: the vLLM instance, the version and noise of the last `sync`."""

    def __init__(self, policy: Policy, options: VllmOptions):
        """Start vLLM in this process.

        Raises:
            UserError: vLLM is missing or too old, or cannot take this model, adapter or size.
            RunError: vLLM does not start, or another engine is open.
        """
        self.vllm_version = require_vllm(policy.device.type)
        from qerl.engine import vllm_ops
        from qerl.engine.vllm_adapter import adapter_parts
        from qerl.engine.vllm_weights import Adoption, adopting

        if vllm_ops.num_offered():
            raise RunError("setup", "a vLLM engine is open in this process; close it first")
        base = policy.base
        _check_options(base, options)
        self.policy, self.options = policy, options
        self.version = 0
        self.noise: NoiseDraw | None = None
        self.adoption = Adoption(
            base, adapter_parts(policy.causal_model, base.layout), tuple(policy.noise_modules)
        )
        self.graph_settings = graph_settings(self.adoption.parts, policy, options)
        self.llm: Any = None
        try:
            vllm_ops.offer(
                base.linears.values(), policy.dtype, batch_invariant=options.batch_invariant
            )
            with adopting(self.adoption), process_left_alone(policy.device):
                from vllm import LLM

                self.llm = LLM(**llm_arguments(policy, options, self.graph_settings))
            (model,) = self.llm.apply_model(lambda model: model)
            self.adoption.verify(model)
            self.holdings = _holdings(self.adoption, model)
            self.sync(0, None)
        except (UserError, RunError):
            self.close()
            raise
        except Exception as error:
            self.close()
            raise RunError(
                "setup", f"vLLM {self.vllm_version} did not start: {_cause(error)}"
            ) from error

    @torch.no_grad()
    def sync(self, version: int, noise: NoiseDraw | None) -> None:
        """Take over the adapter, set the noise norms to clean + noise (clean bit for bit when None), forget the cache.

        Must not run inside `Policy.noise`, whose weights are taken for the clean ones.
        """
        for buffers in self.adoption.adapters.values():
            buffers.update()
        for name, weight in self.adoption.norms.items():
            clean = self.policy.base.tensors[f"{name}.weight"]
            if noise is None:
                weight.copy_(clean)
            else:
                weight.copy_(clean + draw_noise(noise, name, clean.shape).to(clean.device))
        if not self.llm.reset_prefix_cache():
            raise RunError(
                "sync", "vLLM would not empty its prefix cache: requests are still running"
            )
        self.version, self.noise = version, noise

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling
    ) -> list[list[Rollout]]:
        """Sample every request's seeds; see `Engine.generate`.

        Raises:
            ValueError: a prompt leaves no room for its completion.
            RunError: vLLM fails.
        """
        self._check_lengths(requests, sampling)
        prompts, parameters = [], []
        for request in requests:
            for seed in request.seeds:
                prompts.append({"prompt_token_ids": list(request.prompt_ids)})
                parameters.append(sampling_params(sampling, seed))
        try:
            with process_left_alone(self.policy.device):
                outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        except Exception as error:
            raise RunError(
                "rollout", f"vLLM {self.vllm_version} failed: {_cause(error)}"
            ) from error
        remaining = iter(outputs)
        return [
            [self._rollout(request, index, next(remaining)) for index in range(len(request.seeds))]
            for request in requests
        ]

    def close(self) -> None:
        """Give memory back; another engine can then be started. Safe to call again."""
        from qerl.engine import vllm_ops

        llm, self.llm = self.llm, None
        if llm is not None:
            shut_down(llm)
        self.adoption.adapters.clear()
        self.adoption.norms.clear()
        self.adoption.doubled.clear()
        vllm_ops.withdraw()

    def _check_lengths(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        if longest + sampling.max_completion_length > self.options.max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and {sampling.max_completion_length} new ones do not fit the "
                f"engine's max_model_len of {self.options.max_model_len}"
            )

    def _rollout(self, request: GenerationRequest, index: int, output: "RequestOutput") -> Rollout:
        (completion,) = output.outputs
        tokens, logprobs = tuple(completion.token_ids), tuple(completion.logprobs.logprobs)
        if completion.finish_reason not in ("stop", "length") or len(tokens) != len(logprobs):
            raise RunError(
                "rollout",
                f"vLLM ended a completion of {len(tokens)} tokens and {len(logprobs)} log-probs with "
                f"{completion.finish_reason!r}",
            )
        return Rollout(
            problem_id=request.problem_id,
            sample_index=index,
            prompt_ids=request.prompt_ids,
            completion_ids=tokens,
            logprobs=logprobs,
            loss_mask=(True,) * len(tokens),
            finish_reason=completion.finish_reason,
            version=self.version,
        )


def sampling_params(sampling: Sampling, seed: int) -> "SamplingParams":
    """vLLM's parameters of one sample.

    `ignore_eos` switches off the ends that vLLM would add from the model's config; ours are `stop_token_ids`.
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


def llm_arguments(policy: Policy, options: VllmOptions, settings: GraphSettings) -> dict[str, Any]:
    """Arguments of `vllm.LLM` (and of `vllm.EngineArgs`)."""
    from qerl.engine.vllm_weights import NAME

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
        "additional_config": {"qerl": asdict(settings)},
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": kv_cache_bytes(policy.base, options, policy.dtype),
        # Sizes nothing when the cache's size is given, and vLLM refuses to start unless so much is free.
        "gpu_memory_utilization": 0.01,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "disable_log_stats": True,
    }
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    if not on_cpu:
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": capture_sizes(options.max_num_seqs)
        }
    return arguments


def graph_settings(
    parts: dict[str, tuple["Part", ...]], policy: Policy, options: VllmOptions
) -> GraphSettings:
    """The settings of an engine with these adapted members."""
    base = policy.base
    ranks = {part.rank for members in parts.values() for part in members}
    targets = {
        f"{name.split('.', 3)[3]}[{part.rows.start}:{part.rows.stop}]"
        for name, members in parts.items()
        for part in members
    }
    return GraphSettings(
        qerl_version=qerl.__version__,
        format=base.format,
        layout=type(next(iter(base.linears.values()))).__name__,
        kernel=f"{policy.device.type} {policy.dtype}{' batch-invariant' * options.batch_invariant}",
        rank=max(ranks, default=0),
        targets=tuple(sorted(targets)),
        norm_dtype=str(base.tensors["model.norm.weight"].dtype),
    )


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a CUDA graph: few, because each takes time to capture; gaps of at most a third above 8."""
    sizes = [1, 2, 4, 8, 16, 24, 32]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] * 3 // 2 if len(sizes) % 2 else sizes[-1] * 4 // 3)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def kv_cache_bytes(base: BaseWeights, options: VllmOptions, dtype: torch.dtype) -> int:
    """Bytes of the key/value cache: as given, or for all sequences at full length."""
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    return options.max_num_seqs * _sequence_bytes(base, options, dtype)


def _sequence_bytes(base: BaseWeights, options: VllmOptions, dtype: torch.dtype) -> int:
    """Cache of one full sequence, in whole blocks, and one block that the others do not share."""
    shapes = {
        member: num_rows
        for fused in base.layout.linears
        for member, num_rows in zip(fused.members, fused.member_rows, strict=True)
    }
    num_blocks = -(-options.max_model_len // _BLOCK) + 1
    width = shapes["model.layers.0.self_attn.k_proj"]
    return num_blocks * _BLOCK * base.config.num_hidden_layers * 2 * width * dtype.itemsize


def _check_options(base: BaseWeights, options: VllmOptions) -> None:
    limit = base.config.max_position_embeddings
    if options.max_model_len > limit:
        raise UserError(
            f"engine=vllm: {options.max_model_len} tokens of prompt and completion are more than the model's "
            f"context of {limit}"
        )
    dtype = base.tensors["model.embed_tokens.weight"].dtype
    least = _sequence_bytes(base, options, dtype)
    if options.kv_cache_bytes is not None and options.kv_cache_bytes < least:
        raise UserError(
            f"engine=vllm: a key/value cache of {options.kv_cache_bytes:,} bytes does not hold one sequence of "
            f"{options.max_model_len} tokens; the least that would do is {least:,}"
        )


def config_folder(base: BaseWeights) -> Path:
    """A folder with the model's config.json alone, named after its content: vLLM's compile cache is keyed by the path."""
    content = base.config.to_dict() | {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base.config.model_type]]
    }
    text = json.dumps(content, indent=2, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return build_once(cache_root() / "vllm" / name, write)


def _holdings(adoption: Any, model: torch.nn.Module) -> Holdings:
    own: dict[str, int] = {}
    for name, buffer in model.named_buffers():
        own[name] = buffer.nbytes
    return Holdings(
        adopted=adoption.base.nbytes,
        doubled={name: tensor.nbytes for name, tensor in adoption.doubled.items()},
        own=own,
    )


def _cause(error: Exception) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
