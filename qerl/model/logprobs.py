"""Log-probabilities and entropies of chosen tokens without ever holding [tokens, vocabulary].

The head runs in chunks of tokens. Forward keeps hidden states, targets and one log-sum-exp a token; backward computes
each chunk's logits again. Logits are fp32 (bf16 x bf16 into fp32 on CUDA): a bf16 logit row alone would cost about 2 %
of agreement between rollout and trainer. The gradient of log p is dh = (1[target] - p) W * g / temperature.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 128 * 2**20
"""Largest logits chunk."""


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[C, H] x [V, H] -> [C, V] in fp32 (fp64 for fp64 input)."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    high = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(high) @ weight.to(high).t()


def _chunks(num_tokens: int, vocab_size: int, element_size: int) -> range:
    return range(0, num_tokens, max(1, CHUNK_BYTES // (vocab_size * element_size)))


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        high = torch.promote_types(hidden.dtype, torch.float32)
        num_tokens = hidden.shape[0]
        logprobs = torch.empty(num_tokens, dtype=high, device=hidden.device)
        entropy, log_sum = torch.empty_like(logprobs), torch.empty_like(logprobs)
        steps = _chunks(num_tokens, weight.shape[0], high.itemsize)
        head = _head_for(hidden, weight)
        for start in steps:
            part = slice(start, start + steps.step)
            logits = head_logits(hidden[part], head).div_(temperature)
            log_sum[part] = logits.logsumexp(1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - log_sum[part]
            probs = (logits - log_sum[part, None]).exp_()
            entropy[part] = log_sum[part] - probs.mul_(logits).sum(1)
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, weight, targets, log_sum = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        steps = _chunks(hidden.shape[0], weight.shape[0], log_sum.element_size())
        head = _head_for(hidden, weight)
        for start in steps:
            part = slice(start, start + steps.step)
            logits = head_logits(hidden[part], head).div_(ctx.temperature)
            minus_probs = (logits - log_sum[part, None]).exp_().neg_()
            minus_probs.scatter_add_(1, targets[part, None], torch.ones_like(minus_probs[:, :1]))
            minus_probs.mul_(grad[part, None] / ctx.temperature)
            grad_hidden[part] = minus_probs.to(head.dtype) @ head
        return grad_hidden, None, None, None


def _head_for(hidden: Tensor, weight: Tensor) -> Tensor:
    """The head in the dtype of the chunks' products, so that it is converted once and not once a chunk."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return weight
    return weight.to(torch.promote_types(hidden.dtype, torch.float32))


def chunked_logprobs(
    hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution under softmax(h W^T / temperature).

    Args:
        hidden_CH: [C, H] final hidden states, after the last norm; bf16, fp32 or fp64.
        weight_VH: [V, H] frozen head.
        targets_C: [C] int64.

    Returns:
        [C] log-probabilities (differentiable in hidden_CH) and [C] entropies in nats, fp32 (fp64 for fp64 input).
    """
    return _ChunkedLogprobs.apply(hidden_CH, weight_VH, targets_C, temperature)
