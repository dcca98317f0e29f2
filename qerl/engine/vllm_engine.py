"""Rollouts with vLLM in this process, on the trainer's own copy of the base.

vLLM adopts the tensors of `BaseWeights` (vllm_weights.py), carries the adapter inside its linears (vllm_adapter.py) and
has its own copy of the norms that noise is drawn on. Between rollouts `sync` copies the adapter in, sets those norms to
clean weights plus noise, and empties the prefix cache: whatever was cached belongs to older weights. Everything is
written in place, so compiled code and CUDA graphs see it.

One vLLM request a sample, with its own seed: what is drawn then depends on the seed and the logits alone, and a resumed
run draws what the uninterrupted one would have. The prompt's keys and values are shared through the prefix cache.
Log-probs are of the distribution that was really sampled from, computed from fp32 logits.

vLLM is imported when an engine is started, after `require_vllm` has set its environment.
"""
# pyright: reportMissingImports=false

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from qerl import kernels
from qerl.algo.noise import noisy_weight
from qerl.cuda_memory import cuda_memory
from qerl.engine import vllm_ops
from qerl.engine.vllm_adapter import adapter_parts, update
from qerl.engine.vllm_arguments import (
    VllmOptions,
    graph_settings,
    llm_arguments,
    sampling_params,
)
from qerl.engine.vllm_progress import SilentProgress
from qerl.engine.vllm_report import StartTimes, holdings_of
from qerl.engine.vllm_setup import process_left_alone, require_vllm, shut_down
from qerl.errors import RunError, UserError
from qerl.kernels.gemm import check_layout
from qerl.kernels.humming_layout import HummingWeight
from qerl.memory import is_out_of_memory
from qerl.model.policy import Policy
from qerl.types import GenerationRequest, NoiseDraw, Rollout, Sampling

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

_CAUSE_LENGTH = 500
"""Characters of an error of vLLM's that are shown; the whole of it is in the traceback"""


class VllmEngine:
    """Engine over a Policy's base and adapter. State: the vLLM instance, the version and noise of the last `sync`."""

    def __init__(self, policy: Policy, options: VllmOptions):
        """Start vLLM in this process; its weights are those of `policy` at version 0, without noise.

        Raises:
            UserError: vLLM is missing or too old, or cannot take this device, model, adapter or size.
            RunError: vLLM does not start, or another engine is open.
        """
        self.vllm_version = require_vllm(policy.device)
        if vllm_ops.num_offered():
            raise RunError("setup", "another vLLM engine is open in this process; close it first")
        self.policy, self.options = policy, options
        self.version, self.noise = 0, None
        self.released = False
        self.llm: Any = None
        try:
            self._start()
        except (UserError, RunError):
            self.close()
            raise
        except Exception as error:
            self.close()
            if is_out_of_memory(error):
                raise  # the run says what to lower
            raise RunError(
                "setup", f"vLLM {self.vllm_version} does not start: {_cause(error)}"
            ) from error
        self.sync(0, None)

    def _start(self) -> None:
        policy, options = self.policy, self.options
        parts = adapter_parts(policy.causal_model, policy.base.layout)
        self.graph_settings = graph_settings(parts, policy, options)
        arguments = llm_arguments(policy, options, self.graph_settings)
        _check_layout(policy)
        vllm_ops.offer(
            [fused for fused in policy.base.layout.linears if fused.name in policy.base.linears],
            policy.base.linears,
            policy.dtype,
            batch_invariant=options.deterministic,
        )
        started = time.perf_counter()
        kernels.prepare(policy.base.linears.values(), batch_invariant=options.deterministic)
        began = time.perf_counter()
        with process_left_alone(policy.device, options.deterministic):
            from vllm import LLM

            from qerl.engine.vllm_weights import Adoption, adopting

            imported = time.perf_counter()
            self.adoption = Adoption(policy.base, parts, tuple(policy.noise_modules))
            with adopting(self.adoption):
                self.llm = LLM(**arguments)
        compile_s = self.llm.llm_engine.vllm_config.compilation_config.compilation_time
        self.start_times = StartTimes(
            kernels_s=began - started,
            import_s=imported - began,
            model_s=self.adoption.filled_at - imported,
            compile_s=compile_s,
            rest_s=time.perf_counter() - self.adoption.filled_at - compile_s,
        )
        (model,) = self.llm.apply_model(lambda model: model)
        self.adoption.verify(model)
        self.holdings = holdings_of(self.adoption, model)
        self.sync(0, None)

    @torch.no_grad()
    def sync(self, version: int, noise: NoiseDraw | None) -> None:
        """Take over the adapter, set the noise norms to clean + noise (None: clean, bit for bit), forget the cache.

        Must not run inside `Policy.noise`, whose weights would be taken for the clean ones.
        """
        if self.released:
            self._resume()
        update(self.adoption.adapters.values())
        for name, weight in self.adoption.norms.items():
            clean = self.policy.base.tensors[f"{name}.weight"]
            if noise is None:
                weight.copy_(clean)
            else:
                weight.copy_(noisy_weight(clean, noise, name))
        if not self.llm.reset_prefix_cache():
            raise RunError(
                "sync", "vLLM does not empty its prefix cache: requests are still running"
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
            with process_left_alone(self.policy.device, self.options.deterministic):
                outputs = self.llm.generate(prompts, parameters, use_tqdm=SilentProgress)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise RunError(
                "rollout", f"vLLM {self.vllm_version} failed: {_cause(error)}"
            ) from error
        remaining = iter(outputs)
        return [
            [self._rollout(request, index, next(remaining)) for index in range(len(request.seeds))]
            for request in requests
        ]

    def release(self) -> None:
        """Unmap the key/value cache until the next `sync`, if the engine was started for that."""
        if self.released or not self._can_release():
            return
        from qerl.engine.vllm_memory import cache_bytes, release_cache

        cuda_memory(self.policy.device).set_unmapped(cache_bytes())
        self.released = True
        release_cache(self.llm)

    def _can_release(self) -> bool:
        return self.options.releases_cache and self.policy.device.type == "cuda"

    def _resume(self) -> None:
        from qerl.engine.vllm_memory import resume_cache

        cuda_memory(self.policy.device).set_unmapped(0)
        resume_cache(self.llm)
        self.released = False

    def close(self) -> None:
        """Give memory back; another engine can then be started. May be called again."""
        if self.released:
            # Pages that are not mapped cannot be freed. After an error there may be no room for them: then the process ends.
            with suppress(RuntimeError):
                self._resume()
        llm, self.llm = self.llm, None
        if llm is not None:
            del self.adoption
            shut_down(llm)
            if self._can_release():
                from qerl.engine.vllm_memory import drop_pools

                del llm
                drop_pools()
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


def _check_layout(policy: Policy) -> None:
    """Compare Humming's layout with the installed Humming's. Raises UserError when they differ."""
    first = next(iter(policy.base.linears.values()))
    if isinstance(first, HummingWeight) and first.device.type == "cuda":
        check_layout(first.device, first.mma)


def _cause(error: Exception) -> str:
    """The error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_CAUSE_LENGTH]}"
