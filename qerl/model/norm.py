"""RMSNorm with one rounding: fp32 weight, fp32 arithmetic, cast once to the activation dtype.

The engine computes it the same way, and a weight in fp32 can carry noise far below bf16's spacing of 2^-7 at 1.
transformers' own norm rounds before the multiply with the weight.
"""

from torch import Tensor, nn

from qerl.model.fused import rms_norm


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight [H] fp32, frozen."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
