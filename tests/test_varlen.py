"""Attention over sequences of unequal length: which keys a branch sees, and gradients, against the padded layout."""

import pytest
import torch
import torch.nn.functional as F

from qerl.model import varlen
from qerl.model.attention import PackedLayout, layout_for
from qerl.model.varlen import VarlenLayout
from qerl.types import Row

CPU = torch.device("cpu")
ROWS = [
    [Row(5)],
    [Row(3, (4,)), Row(1), Row(2, (0,))],
    [Row(4, (3, 1, 5)), Row(2, (2,)), Row(6, (1, 1))],
    [Row(3, (2, 0, 4)), Row(3, (0, 0))],
]


def one_by_one(query, key, value, query_ends, key_ends, longest_query, longest_key, *, scale, **_):
    """What flash attention computes: causal, aligned at the last token of each sequence."""
    assert longest_query == query_ends.diff().max() and longest_key == key_ends.diff().max()
    outputs = []
    for s in range(len(query_ends) - 1):
        q = query[query_ends[s] : query_ends[s + 1]].transpose(0, 1)
        k, v = (t[key_ends[s] : key_ends[s + 1]].transpose(0, 1) for t in (key, value))
        num_queries, num_keys = q.shape[1], k.shape[1]
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        mask = mask.tril(num_keys - num_queries)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        )
    return torch.cat(outputs, dim=1).transpose(0, 1)


def random_tensors(rows, dtype, device):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(row.num_tokens for row in rows)
    tensors = [
        torch.randn(num_tokens, heads, 64, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    ]
    return [t.to(device, dtype).requires_grad_(i < 3) for i, t in enumerate(tensors)]


@pytest.mark.parametrize("rows", ROWS)
def test_sequences_and_padded_rows_attend_alike(monkeypatch, rows):
    monkeypatch.setattr(varlen, "flash_attention", one_by_one)
    results = []
    for layout in (VarlenLayout.of(rows, CPU), PackedLayout.of(rows, CPU)):
        query, key, value, grad = random_tensors(rows, torch.float64, CPU)
        output = layout.attend(query, key, value, 0.25)
        output.backward(grad)
        results.append((output.detach(), query.grad, key.grad, value.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_keys_are_gathered_only_where_prompts_are_shared():
    assert VarlenLayout.of([Row(3, (4,)), Row(2)], CPU).key_index is None
    layout = VarlenLayout.of([Row(2, (1, 2)), Row(1)], CPU)
    assert layout.key_index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert layout.query_ends.tolist() == [0, 2, 3, 5, 6]
    assert layout.key_ends.tolist() == [0, 2, 5, 9, 10]
    assert (layout.longest_query, layout.longest_key) == (2, 4)


def test_a_cpu_and_high_precision_take_padded_rows():
    assert isinstance(layout_for([Row(3)], CPU, torch.bfloat16), PackedLayout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [*ROWS, [Row(700, (300, 512, 1)), Row(40, (900,))]])
def test_flash_attention_equals_float64(rows):
    device = torch.device("cuda", 0)
    query, key, value, grad = random_tensors(rows, torch.bfloat16, device)
    layout = layout_for(rows, device, torch.bfloat16)
    assert isinstance(layout, VarlenLayout)
    output = layout.attend(query, key, value, 0.125)
    output.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    expected = PackedLayout.of(rows, device).attend(*exact, 0.125)
    expected.backward(grad.double())
    pairs = [
        (output, expected),
        *((t.grad, e.grad) for t, e in zip((query, key, value), exact, strict=True)),
    ]
    for found, reference in pairs:
        error = (found.double() - reference).norm() / reference.norm()
        assert error < 1e-2
