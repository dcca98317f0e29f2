import pytest
import torch

from qerl.model import logprobs as module
from qerl.model.logprobs import chunked_logprobs


def reference(hidden, weight, targets, temperature):
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_values_and_gradients_equal_the_dense_computation(monkeypatch, temperature, chunk_rows):
    vocab = 37
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_rows * vocab * 8)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (10,), generator=generator)
    upstream = torch.randn(10, generator=generator, dtype=torch.float64)
    expected, expected_entropy = reference(hidden, weight, targets, temperature)
    (expected_grad,) = torch.autograd.grad(expected @ upstream, hidden)
    got, entropy = chunked_logprobs(hidden, weight, targets, temperature)
    (grad,) = torch.autograd.grad(got @ upstream, hidden)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_bf16_hidden_states_give_fp32_logprobs_and_bf16_gradients():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(50, 16, generator=generator).bfloat16()
    targets = torch.arange(6)
    got, _ = chunked_logprobs(hidden, weight, targets, 1.0)
    expected, _ = reference(hidden.detach().double(), weight.double(), targets, 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    got.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_memory_never_holds_tokens_by_vocabulary(monkeypatch):
    """The largest tensor made is a chunk: seen through a dispatch mode that watches every result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return result

    tokens, vocab, width = 64, 1000, 8
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * vocab * 4)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = torch.randn(vocab, width)
    with Largest() as largest:
        got, _ = chunked_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), 1.0)
        got.sum().backward()
    assert largest.elements == vocab * width
    assert largest.elements < tokens * vocab / 4
