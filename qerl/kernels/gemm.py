"""y = (x W'^T) * dequant_scale straight from packed weights: Humming's GEMM (humming-kernels 0.1.10), outside vLLM.

Humming multiplies bf16 activations with E2M1 x E4M3 weights, accumulates in fp32 and applies dequant_scale to the product,
as the frozen linear does. On an H200 it beats a dense bf16 GEMM up to 64 tokens (4.5 bits a weight are read) and, up to some 2048,
expanding first and multiplying densely (docs/kernels.md).

* K is split among thread blocks, whose bf16 partial sums are added in no fixed order: results differ in the last bits from
  call to call, and the more parts, the larger the error (0.0061 relative for 24, 0.0017 unsplit).
* `batch_invariant=True`, Humming's name, switches the split off: a call then equals the next, at 1.1 (large matrices) to 5 times
  (down, 8 tokens) the time. Rows still differ between token counts (8 and 64, say).
* The thread blocks of a split meet through the buffer `locks`. Two calls that run at the same time must not share it, so each user
  (the trainer, the engine) makes its own `HummingGemm`.
* Kernels are compiled when they are first needed, one for a few token counts each, and kept on disk in
  ~/.humming. `prepare` compiles for many matrices at once.

`check_layout` compares `humming_layout.pack` with Humming's own packing, so that a version with another layout is found
before it multiplies nonsense.
"""

# humming-kernels runs on GPUs only and is not there where types are checked.
# pyright: reportMissingImports=false
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qerl.errors import UserError
from qerl.kernels.humming_layout import HummingWeight, Mma, pack, padded_shape
from qerl.quant.nvfp4 import BLOCK_SIZE, Nvfp4Weight

SUPPORTED_VERSION = "0.1.10"
"""The version whose layout and calls are known."""
_NUM_LOCKS = 1024
"""As in Humming's own layer: more than thread blocks of a launch can be split over."""
_PROBE_SHAPE = (256, 256)
Configs = tuple[str, str, str]
"""Humming's configurations of a call as JSON: of the matrix, of the arithmetic, and its tiles"""


class HummingGemm:
    """The packed GEMM of one user. Called with x bf16 [M, K] and a whole HummingWeight [N, K]: bf16 [M, N]."""

    def __init__(self, device: torch.device, *, batch_invariant: bool = False):
        """Raises UserError when humming-kernels is not installed."""
        require_humming()
        self.batch_invariant = batch_invariant
        self.locks = torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, weight: HummingWeight, out: Tensor | None = None) -> Tensor:
        """(x W'^T) * dequant_scale.

        Args:
            x: bfloat16 [M, K], contiguous.
            weight: a whole matrix in Humming's layout, N a multiple of 8.
            out: bfloat16 [M, N], contiguous; allocated when None.

        Raises:
            ValueError: `weight` is a range of rows: multiply the fused matrix once and split the result.
        """
        if not weight.is_whole:
            raise ValueError(
                "the packed GEMM takes whole matrices, not a range of rows: multiply the fused one and split"
            )
        if not x.shape[0]:
            return x.new_empty(0, weight.shape[0])
        layer, compute, tuning = self.configs(weight, x.shape[0])
        return torch.ops.humming.humming_gemm(
            layer,
            compute,
            tuning,
            x,
            weight.codes,
            outputs=out,
            weight_scale=weight.block_scales,
            global_scale=weight.dequant_scale,
            locks=self.locks,
        )

    def prepare(self, weights: Iterable[HummingWeight], token_counts: Iterable[int]) -> None:
        """Compile the kernels for these matrices and token counts, many at a time; those already compiled are skipped.

        Raises UserError as a call would.
        """
        shapes = {(weight.shape, weight.mma): weight for weight in weights}
        counts = sorted({_rounded(tokens) for tokens in token_counts})
        configs = {self.configs(weight, tokens) for weight in shapes.values() for tokens in counts}
        for error in compile_kernels(configs, self.locks.device).values():
            raise error

    def configs(self, weight: HummingWeight, num_tokens: int) -> Configs:
        """What Humming is called with for so many tokens."""
        return _configs(
            weight.shape,
            weight.stored_shape,
            weight.mma,
            self.batch_invariant,
            _rounded(num_tokens),
        )


def compile_kernels(configs: Iterable[Configs], device: torch.device) -> dict[Configs, Exception]:
    """Compile many kernels at a time and load them. Returns those that Humming cannot make, and what it raised."""
    from humming.kernel.humming import HummingKernel

    def compiled(parts: Configs) -> HummingKernel | Exception:
        merged = {key: value for part in parts for key, value in json.loads(part).items()}
        merged.pop("num_sms", None)  # a launch argument that some heuristics add
        merged.pop("sublayer_name")
        try:
            return HummingKernel(**merged)
        except Exception as error:  # whatever its checks or its compiler raise
            return error

    ordered = sorted(configs)
    with ThreadPoolExecutor(
        os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)
    ) as pool:
        results = dict(zip(ordered, pool.map(compiled, ordered), strict=True))
    failures: dict[Configs, Exception] = {}
    for parts, found in results.items():
        if isinstance(found, Exception):
            failures[parts] = found
        else:
            found.load_cubin()  # only the main thread may
    return failures


def require_humming() -> str:
    """Import humming's operators and return its version. Raises UserError when it is not installed."""
    try:
        import humming.ops  # noqa: F401

        return version("humming-kernels")
    except (ImportError, PackageNotFoundError) as error:
        raise UserError(
            f"the packed GEMM needs humming-kernels ({error}); pip install humming-kernels=={SUPPORTED_VERSION}"
        ) from error


def check_layout(device: torch.device, mma: Mma) -> None:
    """Pack a matrix that spells its coordinates with Humming and with `pack`. Raises UserError when the bytes differ."""
    installed = require_humming()
    probe = probe_matrix(*_PROBE_SHAPE, device)
    ours, theirs = pack(probe, mma), pack_with_humming(probe, mma)
    for name, part in ours.tensors().items():
        other = theirs.tensors()[name]
        same = part.shape == other.shape and torch.equal(
            part.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
        )
        if not same:
            raise UserError(
                f"humming-kernels {installed} lays out {name} differently from {SUPPORTED_VERSION}; "
                f"pip install humming-kernels=={SUPPORTED_VERSION}"
            )


def probe_matrix(num_rows: int, num_columns: int, device: torch.device) -> Nvfp4Weight:
    """NVFP4 matrix whose codes and block scales are a hash of their coordinates: any other order of them has other bytes."""

    def hashed(num_columns: int) -> Tensor:
        address = torch.arange(num_rows * num_columns, device=device).view(num_rows, num_columns)
        return (address * 2654435761 % 2**32) >> 15

    codes = (hashed(num_columns) % 16).to(torch.uint8)
    scales = (hashed(num_columns // BLOCK_SIZE) % 126 + 1).to(torch.uint8)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scale = torch.tensor(0.25, device=device)
    return Nvfp4Weight(pairs, scales.view(torch.float8_e4m3fn), scale)


def pack_with_humming(weight: Nvfp4Weight, mma: Mma) -> HummingWeight:
    """`humming_layout.pack` by Humming's own kernels (CUDA): the call that vLLM makes when it loads a layer."""
    from humming.layer import HummingMethod

    stored_rows, stored_columns = padded_shape(weight.shape)
    rows, columns = stored_rows - weight.shape[0], stored_columns - weight.shape[1]
    codes = functional.pad(weight.codes, (0, columns // 2, 0, rows))
    scale_bytes = weight.block_scales.view(torch.uint8)
    scale_bytes = functional.pad(scale_bytes, (0, columns // BLOCK_SIZE, 0, rows))
    layer = _HummingLayer(
        {"": _layer_meta(weight.shape, padded_shape(weight.shape), mma)},
        codes.view(torch.int32),
        scale_bytes.view(torch.float8_e4m3fn),
        weight.dequant_scale.view(1),
    )
    HummingMethod.transform_humming_layer(layer, already_padded=True)
    scale = layer.global_scale.view(())
    return HummingWeight(layer.weight, layer.weight_scale, scale, weight.shape, mma)


class _HummingLayer(nn.Module):
    """What Humming's preparation looks for in a layer; it replaces the parameters."""

    def __init__(self, metas: dict[str, Any], weight: Tensor, weight_scale: Tensor, scale: Tensor):
        super().__init__()
        self.humming_metas = metas
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(weight_scale, requires_grad=False)
        self.global_scale = nn.Parameter(scale, requires_grad=False)


def _layer_meta(shape: tuple[int, int], stored_shape: tuple[int, int], mma: Mma) -> Any:
    """Humming's description of the matrix [N, K] kept as [N', K']."""
    from humming.layer import HummingLayerMeta

    (num_rows, num_columns), (stored_rows, stored_columns) = shape, stored_shape
    return HummingLayerMeta(
        shape_n=stored_rows,
        shape_k=stored_columns,
        pad_shape_n=stored_rows - num_rows,
        pad_shape_k=stored_columns - num_columns,
        a_dtype="bfloat16",
        b_dtype="float4e2m1",
        c_dtype="bfloat16",
        bs_dtype="float8e4m3",
        weight_scale_group_size=BLOCK_SIZE,
        weight_scale_type="group_tensor",
        mma_type=mma,
    )


def _rounded(num_tokens: int) -> int:
    """Token count that tiles are chosen for, at most a quarter larger: each choice is a kernel to compile."""
    step = max(8, 2 ** (num_tokens - 1).bit_length() // 8)
    return -(-num_tokens // step) * step


@cache
def _configs(
    shape: tuple[int, int],
    stored_shape: tuple[int, int],
    mma: Mma,
    batch_invariant: bool,
    num_tokens: int,
) -> Configs:
    """The configurations with its heuristic's tiles.

    Two of the heuristic's choices are not taken. Sharing tiles of activations inside a cluster (`multi_cast_size_a`, from four
    tiles of tokens up) gave wrong sums that differed from call to call. And MMA has no instruction for 8 rows.
    """
    from humming.tune import get_heuristics_config

    meta = _layer_meta(shape, stored_shape, mma)
    tuning = get_heuristics_config(meta, shape_m=num_tokens, use_batch_invariant=batch_invariant)
    tuning.pop("multi_cast_size_a", None)
    if mma == "mma":
        for part in ("block_shape", "warp_shape"):
            tokens, *others = tuning[part]
            tuning[part] = (-(-tokens // 16) * 16, *others)
    compute = {"use_batch_invariant": batch_invariant, "gemm_type": "dense"}
    return meta.to_str(), json.dumps(compute), json.dumps(tuning)
