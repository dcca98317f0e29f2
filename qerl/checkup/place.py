"""What kernel checks share: where they run, their operands, and how an error becomes a finding."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl import kernels
from qerl.checkup import reference
from qerl.checkup.finding import Check
from qerl.checkup.reference import relative_error
from qerl.quant.nvfp4 import Nvfp4Weight
from qerl.quant.packed import PackedWeight, dequantize

ADVICE = "do not train with it: open an issue with the block below"
FUSED = (1536, 2048)
"""A fused matrix [N, K]: of q, k and v, or of gate and up"""
QKV, GATE_UP = (1024, 256, 256), (768, 768)
"""Rows of its members"""
PADDED = (576, 576)
"""SmolLM2's: neither 256 rows nor 128 columns divide it"""
RANK = 32
_CHECKED_ROWS = 64
"""Tokens compared of many, from all over: an error may be in one tile"""


@dataclass(frozen=True)
class Place:
    """Where kernels run and in which activations."""

    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(device: torch.device) -> "Place":
        """bf16 on a GPU, fp32 on a CPU: as a run does."""
        return Place(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def limit(self, in_bf16: float) -> float:
        """Relative error that is allowed."""
        return in_bf16 if self.dtype == torch.bfloat16 else 1e-5

    def randn(self, *shape: int, seed: int = 1) -> Tensor:
        """Normal numbers, the same at every call."""
        rng = reference.generator(self.device, seed)
        return torch.randn(*shape, generator=rng, device=self.device).to(self.dtype)


def judged(name: str, errors: dict[str, float], limit: float) -> Check:
    """A finding from relative errors by case: FAILED with the worst unless all are below the limit."""
    wrong = {case: error for case, error in errors.items() if not error <= limit}  # NaN is wrong
    if wrong:
        found = ", ".join(f"{case}: error {error:.2g}" for case, error in wrong.items())
        return Check(name, "FAILED", f"{found} (allowed {limit:g})", ADVICE)
    return Check(name, "ok", f"largest error {max(errors.values()):.1e} of {limit:g} allowed")


def exactly(name: str, wrong: Iterable[str], found: str) -> Check:
    """A finding about what has to be equal to the last bit."""
    wrong = list(wrong)
    if wrong:
        return Check(name, "FAILED", f"not equal to the reference: {', '.join(wrong)}", ADVICE)
    return Check(name, "ok", found)


def product_errors(
    place: Place,
    plain: Nvfp4Weight,
    weight: PackedWeight,
    counts: Iterable[int],
    *,
    batch_invariant: bool = False,
) -> dict[str, float]:
    """Relative error of the product with `weight`, a layout of `plain`, by number of tokens."""
    multiply = kernels.gemm_for(weight, place.dtype, batch_invariant=batch_invariant)
    exact_weight, scale = dequantize(plain, torch.float64), plain.dequant_scale.item()
    num_rows, num_columns = plain.shape
    errors = {}
    for tokens in counts:
        x = place.randn(tokens, num_columns)
        checked = torch.linspace(0, tokens - 1, min(tokens, _CHECKED_ROWS)).long().to(place.device)
        # What is not written shows: memory that is freed now is what the product gets.
        torch.full((tokens, num_rows), torch.nan, dtype=place.dtype, device=place.device)
        found = multiply(x, weight, scale)[checked]
        exact = x[checked].double() @ exact_weight.t()
        errors[f"{num_rows}x{num_columns}, {tokens} tokens"] = relative_error(found, exact)
    return errors


def adapter_case(
    place: Place, members: tuple[int, ...], tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, A, B and y to add to, each term of the sum about 1."""
    num_rows, num_columns = sum(members), FUSED[1]
    x = place.randn(tokens, num_columns)
    a = place.randn(len(members) * RANK, num_columns, seed=2) * num_columns**-0.5
    b = place.randn(num_rows, RANK, seed=3) * RANK**-0.5
    return x, a, b, place.randn(tokens, num_rows, seed=4)
