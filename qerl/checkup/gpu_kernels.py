"""The kernels that only a GPU has: Triton's adapter launches, Humming's GEMM, flash attention, what torch.compile makes.

Sizes are those at which kernels were once found wrong (docs/kernels.md), as far as the memory that is free allows.
"""

from dataclasses import replace

import torch

from qerl import kernels
from qerl.checkup import reference
from qerl.checkup.finding import Check
from qerl.checkup.place import (
    ADVICE,
    FUSED,
    GATE_UP,
    PADDED,
    QKV,
    Place,
    adapter_case,
    judged,
    product_errors,
)
from qerl.checkup.reference import ROUNDED_ONCE, ROUNDED_PARTS, relative_error
from qerl.kernels import humming_layout
from qerl.kernels.adapter import AdaptedGemm
from qerl.kernels.gemm import HummingGemm, check_layout
from qerl.quant.packed import dequantize
from qerl.types import Row

_DOWN = (5120, 27648)
"""A 32B model's down_proj, where Humming's multicast was wrong; 1.5 GB with its reference"""
_DOWN_BYTES = 6 * 2**30
_TOKENS = (1, 16, 100, 512)
"""Of the adapter's launches: each way to cut them"""
_GEMM_TOKENS = (1, 8, 64, 512, 600)
"""On both sides of what the adapter's launches take"""


def check_grow(place: Place) -> Check:
    """Triton's two launches: shrink, grow."""
    from qerl.kernels import triton_adapter

    errors = {}
    for tokens in _TOKENS:
        x, a, b, y, launch, parts = _shrunk(place, QKV, tokens)
        exact = reference.with_adapter(y, x, a, b, QKV)
        found = triton_adapter.grow(y, parts, b, QKV, launch)
        errors[f"{tokens} tokens"] = relative_error(found, exact)
    return judged("adapter shrink, grow", errors, ROUNDED_ONCE)


def check_grow_gated(place: Place) -> Check:
    """The launch that finishes gate and up."""
    from qerl.kernels import triton_adapter

    errors = {}
    for tokens in _TOKENS:
        x, a, b, y, launch, parts = _shrunk(place, GATE_UP, tokens)
        exact = reference.gated(reference.with_adapter(y, x, a, b, GATE_UP))
        found = triton_adapter.grow_gated(y, parts, b, GATE_UP, launch)
        errors[f"{tokens} tokens"] = relative_error(found, exact)
    return judged("adapter grow_gated", errors, 2 * ROUNDED_ONCE)


def _shrunk(place: Place, members: tuple[int, ...], tokens: int):
    """The case, how its launches are cut, and the result of the first."""
    from qerl.kernels import triton_adapter

    x, a, b, y = adapter_case(place, members, tokens)
    launch = triton_adapter.launch_for(tokens, FUSED)
    hopper = place.on_gpu and torch.cuda.get_device_capability(place.device) >= (9, 0)
    launch = replace(launch, dependent=hopper)
    return x, a, b, y, launch, triton_adapter.shrink(x, a, launch)


def check_humming_layout(place: Place) -> Check:
    """Humming's own packing against ours, byte for byte."""
    mma = humming_layout.mma_of(place.device)
    check_layout(place.device, mma)
    return Check("Humming layout", "ok", f"its bytes ({mma})")


def check_gemm(place: Place) -> Check:
    """Humming's GEMM, from one token to more than it gets, which are expanded."""
    mma = humming_layout.mma_of(place.device)
    cases: dict[tuple[int, int], tuple[int, ...]] = {FUSED: _GEMM_TOKENS, PADDED: (1, 100)}
    if torch.cuda.mem_get_info(place.device)[0] > _DOWN_BYTES:
        cases[_DOWN] = (64, 600, 2048, kernels.MAX_PACKED_TOKENS + 1)
    errors = {}
    for shape, counts in cases.items():
        plain = reference.random_nvfp4(*shape, place.device)
        weight = humming_layout.pack(plain, mma)
        packed_counts = [tokens for tokens in counts if tokens <= kernels.MAX_PACKED_TOKENS]
        HummingGemm(place.device).prepare([weight], packed_counts)  # compiled side by side
        errors |= product_errors(place, plain, weight, counts)
    return judged("packed GEMM", errors, ROUNDED_PARTS)


def check_repeats(place: Place) -> Check:
    """The batch-invariant GEMM: right, without the error of a split, and the same at every call."""
    plain = reference.random_nvfp4(*FUSED, place.device)
    weight = humming_layout.pack(plain, humming_layout.mma_of(place.device))
    multiply = kernels.gemm_for(weight, place.dtype, batch_invariant=True)
    HummingGemm(place.device, batch_invariant=True).prepare([weight], (8, 256))
    for tokens in (8, 256):
        x = place.randn(tokens, weight.shape[1])
        first = multiply(x, weight, 1.0)
        if not all(torch.equal(first, multiply(x, weight, 1.0)) for _ in range(5)):
            found = f"{tokens} tokens: calls differ from each other"
            return Check("packed GEMM repeats", "FAILED", found, ADVICE)
    errors = product_errors(place, plain, weight, (8, 256), batch_invariant=True)
    return judged("packed GEMM repeats", errors, ROUNDED_ONCE)


def check_adapted(place: Place) -> Check:
    """What a linear of the engine calls: Humming's GEMM with the adapter beside it, on its second stream too."""
    plain = reference.random_nvfp4(*FUSED, place.device)
    weight = humming_layout.pack(plain, humming_layout.mma_of(place.device))
    exact_weight, scale = dequantize(plain, torch.float64), plain.dequant_scale.item()
    product = AdaptedGemm(kernels.gemm_for(weight, place.dtype), place.device, place.dtype)
    errors = {}
    for tokens in _GEMM_TOKENS:
        for members in (QKV, GATE_UP):
            x, a, b, _ = adapter_case(place, members, tokens)
            exact = reference.with_adapter(x.double() @ exact_weight.t(), x, a, b, members)
            y = product(x, weight, scale, a, b, members, gated=False)
            errors[f"{tokens} tokens, {len(members)} members"] = relative_error(y, exact)
        y = product(x, weight, scale, a, b, GATE_UP, gated=True)
        # Rounded more often than a sum alone: gate, up and their product.
        errors[f"{tokens} tokens, gated"] = relative_error(y, reference.gated(exact)) / 2
    return judged("packed GEMM + adapter", errors, ROUNDED_PARTS)


def check_attention(place: Place) -> Check:
    """torch's flash attention over packed rows, one of them with branches, forward and backward."""
    from qerl.model.varlen import VarlenLayout

    rows = [Row(37), Row(64, (20, 45)), Row(130)]
    total = sum(row.num_tokens for row in rows)
    query = place.randn(total, 8, 64, seed=1).requires_grad_()
    key, value = (place.randn(total, 2, 64, seed=seed).requires_grad_() for seed in (2, 3))
    inputs = (query, key, value)
    output = VarlenLayout.of(rows, place.device).attend(query, key, value, 64**-0.5)
    exact = reference.attention(query, key, value, rows)
    weight = place.randn(*output.shape, seed=4)
    grads = torch.autograd.grad(output, inputs, weight)
    exact_grads = torch.autograd.grad(exact, inputs, weight.double())
    names = ("output", "gradient of queries", "of keys", "of values")
    compared = zip(names, (output, *grads), (exact, *exact_grads), strict=True)
    errors = {name: relative_error(found, right) for name, found, right in compared}
    return judged("flash attention", errors, 2e-2)


def check_compiled(place: Place) -> Check:
    """The update's element-wise kernels, which torch.compile makes: norm and SwiGLU, forward and backward."""
    from qerl.model.fused import rms_norm, swiglu

    x = place.randn(64, 1024, seed=1).requires_grad_()
    gate_up = place.randn(64, 2048, seed=2).requires_grad_()
    scale = torch.ones(1024, device=place.device)
    outputs = rms_norm(x, scale, 1e-6), swiglu(gate_up)
    high = x.double()
    exact = (
        high * (high.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
        reference.gated(gate_up),
    )
    names = ("norm", "SwiGLU")
    errors = {
        name: relative_error(found, right)
        for name, found, right in zip(names, outputs, exact, strict=True)
    }
    weight = place.randn(64, 1024, seed=4)
    inputs = (x, gate_up)
    grads = torch.autograd.grad(outputs, inputs, (weight, weight))
    exact_grads = torch.autograd.grad(exact, inputs, (weight.double(), weight.double()))
    for name, found, right in zip(("x", "gate and up"), grads, exact_grads, strict=True):
        errors[f"gradient of {name}"] = relative_error(found, right)
    return judged("torch.compile", errors, place.limit(5e-3))
