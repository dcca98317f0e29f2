"""A packed product with its LoRA adapter: y = x W^T + (x A^T) B^T for each member of a fused matrix, and MLP gating on top.

`AdaptedGemm` is what an engine's linear calls. On a GPU two launches beside the packed GEMM do the adapter (triton_adapter.py): one for
x A^T, a plain product above `MAX_SHRINK_TOKENS`, and one for all the rest, gating included. On a CPU they are plain matrix products.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from qerl.kernels import Gemm
from qerl.quant.packed import PackedWeight

MAX_SHRINK_TOKENS = 512
"""Most tokens for which Triton's shrinking runs: more are a prefill, which a plain product serves as well."""


class AdaptedGemm:
    """One user's packed GEMM with adapters. State: the GEMM's, and where the kernels run, a second stream."""

    def __init__(self, gemm: Gemm, device: torch.device, dtype: torch.dtype):
        self.gemm = gemm
        self.side: torch.cuda.Stream | None = None
        self.dependent = False
        if device.type == "cuda" and dtype == torch.bfloat16:
            self.side = torch.cuda.Stream(device)
            self.dependent = torch.cuda.get_device_capability(device) >= (9, 0)

    def __call__(
        self,
        x: Tensor,
        packed: PackedWeight,
        scale: float,
        a: Tensor,
        b: Tensor,
        member_rows: tuple[int, ...],
        *,
        gated: bool,
    ) -> Tensor:
        """x W^T + (x A^T) B^T [M, N]; `gated`: silu(gate) * up [M, N/2] of the two members.

        Args:
            x: [M, K], contiguous.
            packed, scale: W' [N, K] and its dequant_scale.
            a: [n r, K]: A of the n members, one below the other.
            b: [N, r]: their B, likewise, the adapter's scaling in it.
            member_rows: N_i.
        """
        num_tokens = x.shape[0]
        if self.side is None or not num_tokens:
            y = add_adapter(self.gemm(x, packed, scale), x, a, b, member_rows)
            return gate(y) if gated else y
        from qerl.kernels import triton_adapter

        launch = triton_adapter.launch_for(num_tokens, packed.shape)
        launch = replace(launch, dependent=self.dependent)
        if num_tokens > MAX_SHRINK_TOKENS:
            y = self.gemm(x, packed, scale)
            parts = (x @ a.t()).float().unsqueeze(0)
        elif launch.beside:
            main = torch.cuda.current_stream(x.device)
            self.side.wait_stream(main)
            y = self.gemm(x, packed, scale)  # first: its thread blocks are to be placed first
            with torch.cuda.stream(self.side):
                parts = triton_adapter.shrink(x, a, launch)
            main.wait_stream(self.side)
        else:
            y = self.gemm(x, packed, scale)
            parts = triton_adapter.shrink(x, a, launch)
        finish = triton_adapter.grow_gated if gated else triton_adapter.grow
        return finish(y, parts, b, member_rows, launch)


def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor, member_rows: tuple[int, ...]) -> Tensor:
    """y [M, N] += (x A^T) B^T in place, member by member; returns y. Plain torch; shapes as in `AdaptedGemm`."""
    down = x @ a.t()
    rank = b.shape[1]
    start = 0
    for member, num_rows in enumerate(member_rows):
        rows = slice(start, start + num_rows)
        y[:, rows].addmm_(down[:, member * rank : (member + 1) * rank], b[rows].t())
        start += num_rows
    return y


def gate(y: Tensor) -> Tensor:
    """silu(gate) * up [M, N/2] of y = [gate, up] [M, N]; in fp32, rounded once."""
    high = torch.promote_types(y.dtype, torch.float32)
    first, second = y.chunk(2, dim=1)
    return (functional.silu(first.to(high)) * second.to(high)).to(y.dtype)
