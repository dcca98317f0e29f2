"""Rollouts on the trainer's own tensors, anywhere torch runs: nothing to synchronise, nothing held twice.

A batch of prompts is prefilled once each, packed, through exactly the forward that the trainer uses; the cache is then
spread over the samples and decoded a token at a time. Rows that have ended are dropped as they accumulate. Sample i of
a prompt has its own generator, so what it draws depends on its seed and on its logits alone.

On the CPU the base is held expanded while a batch decodes: each matrix would otherwise be expanded once a token.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qerl.engine.kv_cache import KVCache
from qerl.heartbeat import beat
from qerl.model.attention import PackedLayout
from qerl.model.logprobs import head_logits
from qerl.model.policy import Policy
from qerl.types import GenerationRequest, NoiseDraw, Rollout, Row, Sampling

COMPACT_BELOW = 0.75
"""Ended rows are dropped when fewer than this share of the rows is still running: a copy of the cache, worth it then."""


@dataclass
class _Sample:
    """A completion while it grows."""

    request: GenerationRequest
    request_index: int
    index: int
    uniforms: Tensor
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def _filtered(scores: Tensor, sampling: Sampling) -> Tensor:
    """Scores [B, V] with -inf where top-k, top-p or min-p exclude a token."""
    warpers: list[Callable[..., Tensor]] = []
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        scores = warper(None, scores)  # the tokens so far matter to none of these
    return scores


def sample_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at a uniform number in [0, 1).

    Returns [B] tokens and [B] fp32 log-probabilities under the distribution drawn from: after temperature, top-k,
    top-p and min-p. Temperature 0 takes the largest logit and reports its log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        logprobs = logits_BV.log_softmax(-1)
        tokens = logprobs.argmax(-1)
    else:
        scores = _filtered(logits_BV / sampling.temperature, sampling)
        logprobs = scores.log_softmax(-1)
        cumulative = logprobs.exp().cumsum(-1)
        total = cumulative[:, -1:]
        # The first place above the threshold has positive probability; rounding must not lift it to the total.
        below_total = torch.nextafter(total, torch.zeros_like(total))
        threshold = torch.minimum(uniforms_B[:, None] * total, below_total)
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


class TransformersEngine:
    """Engine over a Policy's own tensors. State: the version and the noise of the last `sync`."""

    def __init__(self, policy: Policy, max_batch_size: int):
        self.policy = policy
        self.max_batch_size = max_batch_size
        self.version = 0
        self.noise: NoiseDraw | None = None

    def sync(self, version: int, noise: NoiseDraw | None) -> None:
        """Remember version and noise; the adapter is shared and nothing is cached between calls."""
        self.version = version
        self.noise = noise

    def release(self) -> None:
        """Nothing is held between calls."""

    def close(self) -> None:
        """Nothing of its own to give back."""

    @torch.no_grad()
    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling
    ) -> list[list[Rollout]]:
        """Sample every request's seeds; see `Engine.generate`."""
        results: list[list[Rollout]] = [[] for _ in requests]
        policy = self.policy
        hold = policy.expanded() if policy.device.type == "cpu" else nullcontext()
        with policy.noise(self.noise), hold:
            for batch in self._batches(requests, sampling):
                self._decode(batch, sampling)
                for sample in batch:
                    results[sample.request_index].append(self._rollout(sample, sampling))
        return results

    def _batches(
        self, requests: Sequence[GenerationRequest], sampling: Sampling
    ) -> list[list[_Sample]]:
        """Samples of one prompt stand together, prompts of like length too."""
        samples = []
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        for request_index in by_length:
            request = requests[request_index]
            for index, seed in enumerate(request.seeds):
                generator = torch.Generator().manual_seed(seed)
                uniforms = torch.rand(sampling.max_completion_length, generator=generator)
                samples.append(_Sample(request, request_index, index, uniforms))
        return [
            samples[start : start + self.max_batch_size]
            for start in range(0, len(samples), self.max_batch_size)
        ]

    def _decode(self, samples: list[_Sample], sampling: Sampling) -> None:
        """Prefill the batch's prompts once each, then extend all samples until each has ended."""
        device = self.policy.device
        prompts = list(dict.fromkeys(sample.request.prompt_ids for sample in samples))
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        row_of_sample = torch.tensor([row_of[s.request.prompt_ids] for s in samples], device=device)
        cache, hidden = self._prefill(prompts, sampling.max_completion_length)
        cache.spread(row_of_sample)
        hidden = hidden[row_of_sample]
        uniforms = torch.stack([sample.uniforms for sample in samples]).to(device)
        running = list(range(len(samples)))
        eos = set(sampling.eos_token_ids)
        for step in range(sampling.max_completion_length):
            beat()
            logits = head_logits(hidden, self.policy.head)
            tokens, logprobs = sample_tokens(logits, uniforms[:, step], sampling)
            ended = []
            for row, (token, logprob) in enumerate(
                zip(tokens.tolist(), logprobs.tolist(), strict=True)
            ):
                sample = samples[running[row]]
                if sample.token_ids and sample.token_ids[-1] in eos:
                    ended.append(row)
                    continue
                sample.token_ids.append(token)
                sample.logprobs.append(logprob)
                if token in eos:
                    ended.append(row)
            if len(ended) == len(running) or step + 1 == sampling.max_completion_length:
                return
            if len(running) - len(ended) < COMPACT_BELOW * len(running):
                gone = set(ended)
                kept = [row for row in range(len(running)) if row not in gone]
                rows = torch.tensor(kept, device=device)
                cache.keep(rows)
                tokens, uniforms = tokens[rows], uniforms[rows]
                running = [running[row] for row in kept]
            cache.begin_step()
            hidden = self._step(tokens, cache)
            cache.end_step()

    def _prefill(
        self, prompts: list[tuple[int, ...]], num_new_tokens: int
    ) -> tuple[KVCache, Tensor]:
        """Packed forward over the prompts; returns the cache and each prompt's last hidden state [P, H]."""
        device = self.policy.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        layout = PackedLayout.of([Row(len(prompt)) for prompt in prompts], device)
        num_layers = self.policy.base.config.num_hidden_layers
        cache = KVCache(num_layers, layout, lengths, num_new_tokens)
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(len(prompt), device=device) for prompt in prompts])
        hidden = self.policy.decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            layout=layout,
        ).last_hidden_state[0]
        return cache, hidden[lengths.cumsum(0) - 1]

    def _step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """One token a row; returns [B, H]."""
        return self.policy.decoder(
            input_ids=tokens[:, None],
            position_ids=cache.lengths[:, None],
            attention_mask=cache.mask(),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, 0]

    def _rollout(self, sample: _Sample, sampling: Sampling) -> Rollout:
        return Rollout(
            problem_id=sample.request.problem_id,
            sample_index=sample.index,
            prompt_ids=sample.request.prompt_ids,
            completion_ids=tuple(sample.token_ids),
            logprobs=tuple(sample.logprobs),
            loss_mask=(True,) * len(sample.token_ids),
            finish_reason="stop" if sample.token_ids[-1] in sampling.eos_token_ids else "length",
            version=self.version,
        )
