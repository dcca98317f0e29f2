"""Log-probabilities and entropies of chosen tokens without ever holding [tokens, vocabulary].

The head runs in chunks of tokens. Forward keeps hidden states, targets and one log-sum-exp a token; backward computes
each chunk's logits again. Logits are fp32 (bf16 x bf16 into fp32 on CUDA): a bf16 logit row alone would cost about 2 %
of agreement between rollout and trainer. The gradient of log p is dh = (1[target] - p) W * g / temperature.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.model.fused import one_kernel

CHUNK_BYTES = 256 * 2**20
"""Largest logits chunk."""
ROW_MULTIPLE = 128
"""Chunks have a multiple of so many rows: tiles of the products are filled"""


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[C, H] x [V, H] -> [C, V] in fp32 (fp64 for fp64 input)."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    high = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(high) @ weight.to(high).t()


def _chunks(num_tokens: int, vocab_size: int, element_size: int) -> range:
    rows = max(1, CHUNK_BYTES // (vocab_size * element_size))
    return range(0, num_tokens, rows - rows % ROW_MULTIPLE or rows)


@one_kernel
def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[C, V] -> [C] log-probabilities of the targets, entropies, and log-sum-exps, under softmax(logits / temperature)."""
    scaled = logits if temperature == 1 else logits / temperature
    log_sum = scaled.logsumexp(1)
    logprobs = scaled.gather(1, targets[:, None])[:, 0] - log_sum
    probs = (scaled - log_sum[:, None]).exp_()
    return logprobs, log_sum - probs.mul_(scaled).sum(1), log_sum


@one_kernel
def _scaled_probs(
    logits: Tensor, log_sum: Tensor, factor: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """exp(logits / temperature - log_sum) * factor; [C, V], [C], [C] -> [C, V] in `dtype`."""
    scaled = logits if temperature == 1 else logits / temperature
    return (scaled - log_sum[:, None]).exp_().mul_(factor[:, None]).to(dtype)


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
            logits = head_logits(hidden[part], head)
            scored = _score(logits, targets[part], temperature)
            logprobs[part], entropy[part], log_sum[part] = scored
        ctx.save_for_backward(hidden, weight, targets, logprobs, log_sum)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, weight, targets, logprobs, log_sum = ctx.saved_tensors
        factor = grad / ctx.temperature
        of_target = -torch.expm1(logprobs) * factor  # 1 - p without cancellation
        grad_hidden = torch.empty_like(hidden)
        steps = _chunks(hidden.shape[0], weight.shape[0], log_sum.element_size())
        head = _head_for(hidden, weight)
        for start in steps:
            part = slice(start, start + steps.step)
            logits = head_logits(hidden[part], head)
            grad_logits = _scaled_probs(
                logits, log_sum[part], -factor[part], ctx.temperature, head.dtype
            )
            grad_logits.scatter_(1, targets[part, None], of_target[part, None].to(head.dtype))
            grad_hidden[part] = grad_logits @ head
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
