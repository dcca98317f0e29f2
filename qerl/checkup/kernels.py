"""Every kernel against its reference, on the device that a run would take: small functions, a finding each.

Expansion is compared bit for bit, everything else with float64 by its relative error. On a CPU the same functions check
what runs there in the kernels' place. They run in a process of their own (child.py).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from qerl import kernels
from qerl.checkup import gpu_kernels, reference
from qerl.checkup.finding import Check
from qerl.checkup.place import (
    FUSED,
    GATE_UP,
    PADDED,
    Place,
    adapter_case,
    exactly,
    judged,
    product_errors,
)
from qerl.checkup.reference import relative_error
from qerl.kernels import humming_layout
from qerl.kernels.adapter import add_adapter, gate
from qerl.model.logprobs import chunked_logprobs
from qerl.model.offload import HostStore
from qerl.quant.nvfp4 import Nvfp4Weight, pack_nvfp4
from qerl.quant.packed import PackedWeight

if TYPE_CHECKING:
    from qerl.quant.nf4 import Nf4Weight


def kernel_checks(device: torch.device, *, humming: bool) -> list[tuple[str, Callable[[], Check]]]:
    """(name, check) of all that runs on this device, cheap ones first; `humming`: whether it is installed."""
    place = Place.of(device)
    chosen: list[tuple[str, Callable[[Place], Check]]] = [
        ("NVFP4 packing", check_packing),
        ("NVFP4 expansion", check_expansion),
        ("expansion, Humming layout", check_humming_expansion),
        ("NVFP4 product", check_dense_product),
        ("NF4 values", check_nf4_values),
        ("NF4 product", check_nf4_product),
        ("adapter, plain", check_plain_adapter),
        ("head", check_head),
        ("inputs in host memory", check_host_store),
    ]
    if place.on_gpu:
        chosen += [
            ("adapter shrink, grow", gpu_kernels.check_grow),
            ("adapter grow_gated", gpu_kernels.check_grow_gated),
            ("flash attention", gpu_kernels.check_attention),
        ]
    if place.on_gpu and humming:
        chosen += [
            ("Humming layout", gpu_kernels.check_humming_layout),
            ("packed GEMM", gpu_kernels.check_gemm),
            ("packed GEMM repeats", gpu_kernels.check_repeats),
            ("packed GEMM + adapter", gpu_kernels.check_adapted),
        ]
    if place.on_gpu:
        chosen.append(("torch.compile", gpu_kernels.check_compiled))
    return [(name, partial(run, place)) for name, run in chosen]


def check_packing(place: Place) -> Check:
    """Packing on this device gives the CPU's bytes, and Humming's layout gives them back."""
    dense = place.randn(192, 512).float()
    here = pack_nvfp4([dense], "four_over_six")
    there = pack_nvfp4([dense.cpu()], "four_over_six")
    wrong = [] if _same(here.to("cpu"), there) else ["bytes of the CPU"]
    for mma in ("wgmma", "mma"):
        if not _same(humming_layout.unpack(humming_layout.pack(here, mma)), here):
            wrong.append(f"unpacked from the {mma} layout")
    return exactly("NVFP4 packing", wrong, "the CPU's bytes; both layouts give them back")


def check_expansion(place: Place) -> Check:
    """Row-major NVFP4 to dense."""
    wrong = _wrong_expansions(place, lambda weight: weight)
    return exactly("NVFP4 expansion", wrong, "exact")


def check_humming_expansion(place: Place) -> Check:
    """Both of Humming's layouts to dense."""
    wrong = [
        f"{mma} {case}"
        for mma in ("wgmma", "mma")
        for case in _wrong_expansions(place, partial(humming_layout.pack, mma=mma))
    ]
    return exactly("expansion, Humming layout", wrong, "exact")


def _wrong_expansions(place: Place, laid_out: Callable[[Nvfp4Weight], PackedWeight]) -> list[str]:
    """Every code under every scale, and ranges of rows written into wider buffers."""
    wrong = []
    for plain in (
        reference.every_nvfp4(place.device),
        reference.random_nvfp4(*PADDED, place.device),
    ):
        num_rows, num_columns = plain.shape
        packed = laid_out(plain)
        for start, stop in ((0, num_rows), (64, num_rows - 1), (77, 77 + 31)):
            wide = torch.full((stop - start, num_columns + 32), torch.nan, device=place.device)
            wide = wide.to(torch.bfloat16)
            out = kernels.expand(
                packed.rows(start, stop), torch.bfloat16, wide[:, : plain.shape[1]]
            )
            beside = wide[:, num_columns:]
            if not reference.is_expansion(plain.rows(start, stop), out) or not beside.isnan().all():
                wrong.append(f"rows {start}..{stop} of {num_rows}x{num_columns}")
    return wrong


def check_dense_product(place: Place) -> Check:
    """Expand, then torch's GEMM: the trainer's way, and the engine's with many tokens."""
    plain = reference.random_nvfp4(*FUSED, place.device)
    return judged(
        "NVFP4 product", product_errors(place, plain, plain, (1, 65, 600)), place.limit(3.5e-3)
    )


def check_nf4_values(place: Place) -> Check:
    """bitsandbytes' expansion against its formula."""
    weight = _nf4(place)
    exact = reference.exact_nf4(weight)
    errors = {"fp32": relative_error(weight.expand(torch.float32), exact)}
    return judged("NF4 values", errors, 1e-5)


def check_nf4_product(place: Place) -> Check:
    """bitsandbytes' product of few tokens, some of it summed in bf16, and expanding for more."""
    weight = _nf4(place)
    multiply, exact_weight = kernels.gemm_for(weight, place.dtype), reference.exact_nf4(weight)
    errors = {}
    for tokens in (1, 8, 100, 600):
        x = place.randn(tokens, weight.shape[1])
        exact = x.double() @ exact_weight.t()
        errors[f"{tokens} tokens"] = relative_error(multiply(x, weight, 1.0), exact)
    return judged("NF4 product", errors, place.limit(1e-2))


def _nf4(place: Place) -> "Nf4Weight":
    from qerl.quant.nf4 import pack_nf4  # imports bitsandbytes, which may be what is broken

    return pack_nf4([place.randn(256, 512), place.randn(128, 512, seed=2)])


def check_plain_adapter(place: Place) -> Check:
    """The adapter as plain products, as for many tokens and on a CPU."""
    x, a, b, y = adapter_case(place, GATE_UP, 33)
    exact = reference.with_adapter(y, x, a, b, GATE_UP)
    added = add_adapter(y.clone(), x, a, b, GATE_UP)
    errors = {
        "added": relative_error(added, exact),
        "gated": relative_error(gate(added), reference.gated(exact)) / 2,
    }
    return judged("adapter, plain", errors, place.limit(5e-3))


def _same(one: Nvfp4Weight, other: Nvfp4Weight) -> bool:
    pairs = zip(one.tensors().values(), other.tensors().values(), strict=True)
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in pairs
    )


def check_head(place: Place) -> Check:
    """The trainer's log-probabilities and entropies from hidden states, and their gradient."""
    tokens, width, vocabulary, temperature = 300, 256, 1000, 0.7
    hidden = place.randn(tokens, width).requires_grad_()
    head = place.randn(vocabulary, width, seed=2) * width**-0.5
    targets = torch.arange(tokens, device=place.device) % vocabulary
    logprobs, entropy = chunked_logprobs(hidden, head, targets, temperature)
    weight = place.randn(tokens, seed=3).to(logprobs.dtype)
    (grad,) = torch.autograd.grad(logprobs, hidden, weight)
    high = hidden.detach().double().requires_grad_()
    exact = (high @ head.double().t() / temperature).log_softmax(1)
    chosen = exact.gather(1, targets[:, None])[:, 0]
    (exact_grad,) = torch.autograd.grad(chosen, high, weight.double())
    stricter = 100 if place.on_gpu else 1  # logits are in fp32 there too
    errors = {
        "log-probabilities": stricter * relative_error(logprobs, chosen),
        "entropies": stricter * relative_error(entropy, -(exact.exp() * exact).sum(1)),
        "gradient": relative_error(grad, exact_grad),
    }
    return judged("head", errors, place.limit(5e-3))


def check_host_store(place: Place) -> Check:
    """Inputs of layers that wait in the host's memory come back as they were."""
    store = HostStore(place.device)
    store.start()
    inputs = [place.randn(700 + 100 * i, 1024, seed=i) for i in range(6)]
    places = [store.put(x.clone()) for x in inputs]
    back = {i: store.take(i) for i in reversed(places)}
    wrong = [f"input {i}" for i in places if not torch.equal(back[i], inputs[i])]
    return exactly("inputs in host memory", wrong, "as they were")
