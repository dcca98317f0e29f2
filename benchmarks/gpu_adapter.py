"""What a LoRA adapter adds to the products of a 32B layer on a CUDA GPU, for a decode step's tokens.

    python benchmarks/gpu_adapter.py [--sweep]

Whole layers one after the other, as in a step but without attention: with the packed GEMM alone, then with a rank-32 adapter as two
plain products a matrix, and as the two Triton launches that the engine uses. What one matrix' adapter adds is measured by giving it
to this matrix alone. `--sweep` tries other ways to cut each matrix' launches. Calls rotate over enough layers to be cache-cold, inside
one CUDA graph. The outputs are compared with float64. Writes adapter.json into $OUT or benchmarks/results. Needs humming-kernels; no vLLM.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from gpu_kernels import DEVICE, MATRICES, description, error, random_weight, time_ms
from reports import write_report
from torch import Tensor
from torch.nn import functional

from qerl.kernels import triton_adapter
from qerl.kernels.adapter import AdaptedGemm, add_adapter
from qerl.kernels.gemm import HummingGemm
from qerl.kernels.humming_layout import HummingWeight, mma_of, pack
from qerl.kernels.triton_adapter import Launch
from qerl.model.fused import rms_norm, swiglu

MEMBERS = {"qkv": (5120, 1024, 1024), "o": (5120,), "gate_up": (27648, 27648), "down": (5120,)}
TOKENS = (8, 64, 256)
RANK = 32
PIECES = 4
"""Processes that compile a sweep's kernels for a matrix and a number of tokens"""
ROUNDS = 5
LAYERS = 4
"""0.9 GB: far more than the L2 cache"""
SPLITS = (1, 2, 4, 8, 16, 32, 64)
SHRINK_TOKENS = (16, 32, 64)
GROWS = ((32, 128, 4), (64, 128, 8), (16, 64, 4), (32, 256, 8))
"""(tokens, rows, warps) of growing"""


@dataclass(frozen=True)
class Adapted:
    """A packed matrix [N, K] with its adapter."""

    name: str
    packed: HummingWeight
    a: Tensor
    b: Tensor

    @property
    def is_gated(self) -> bool:
        return self.name == "gate_up"


Layer = dict[str, Adapted]
Product = Callable[[Adapted, Tensor], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_adapter: no CUDA GPU here, nothing was measured")
        return 0
    report: dict = {**description(), "layer_us": {}, "added_us": {}, "sweep": [], "failures": []}
    layers = [random_layer() for _ in range(LAYERS)]
    humming = HummingGemm(DEVICE)
    humming.prepare([matrix.packed for matrix in layers[0].values()], options.tokens)
    adapted = AdaptedGemm(lambda x, packed, _: humming(x, packed), DEVICE, torch.bfloat16)

    def base(matrix: Adapted, x: Tensor) -> Tensor:
        return finish(matrix, humming(x, matrix.packed))

    def plain(matrix: Adapted, x: Tensor) -> Tensor:
        down = functional.linear(x, matrix.a)
        return finish(
            matrix, humming(x, matrix.packed) + functional.linear(down, dense[matrix.name])
        )

    def kernels(matrix: Adapted, x: Tensor) -> Tensor:
        members = MEMBERS[matrix.name]
        return adapted(x, matrix.packed, 1.0, matrix.a, matrix.b, members, gated=matrix.is_gated)

    dense = {m.name: block_diagonal(m.b, MEMBERS[m.name]) for m in layers[0].values()}
    for tokens in options.tokens:
        x = torch.randn(tokens, MATRICES["qkv"][1], device=DEVICE).bfloat16()
        check(report, humming, kernels, layers[0], tokens)
        products = {"base": base, "plain": plain, "kernels": kernels}
        products |= {name: only(name, kernels, base) for name in MATRICES}
        timed = {name: [] for name in products}
        for _ in range(ROUNDS):  # the clock changes with the heat: all of them in turn
            for name, product in products.items():
                timed[name].append(us(layers, x, product))
        medians = {name: round(statistics.median(values), 2) for name, values in timed.items()}
        report["layer_us"][f"m{tokens}"] = {n: medians[n] for n in ("base", "plain", "kernels")}
        report["added_us"][f"m{tokens}"] = {
            n: round(medians[n] - medians["base"], 2) for n in MATRICES
        }
        print(tokens, json.dumps(medians), flush=True)
    if options.sweep:
        compile_all(options.tokens)
        for tokens in options.tokens:
            x = torch.randn(tokens, MATRICES["qkv"][1], device=DEVICE).bfloat16()
            for name in MATRICES:
                report["sweep"] += sweep(layers, x, name, only(name, kernels, base))
                write_report("adapter", report)
    print("failures:", report["failures"])
    write_report("adapter", report)
    return 1 if report["failures"] else 0


def random_layer() -> Layer:
    """Small weights, so that an error of the adapter's shows in the sum."""
    found = {}
    for name, (num_rows, num_columns) in MATRICES.items():
        weight = pack(random_weight(num_rows, num_columns), mma_of(DEVICE))
        weight = replace(weight, dequant_scale=weight.dequant_scale * 1e-3)
        width = len(MEMBERS[name]) * RANK
        a = torch.randn(width, num_columns, device=DEVICE).bfloat16() / 64
        b = torch.randn(num_rows, RANK, device=DEVICE).bfloat16() / 8
        found[name] = Adapted(name, weight, a, b)
    return found


def run(layer: Layer, x: Tensor, product: Product) -> Tensor:
    """A layer's four products with what stands between them, a copy in place of attention; x [M, H]."""
    ones = torch.ones(x.shape[1], device=DEVICE)
    qkv = product(layer["qkv"], rms_norm(x, ones, 1e-6))
    x = x + product(layer["o"], qkv[:, : x.shape[1]].contiguous())
    return x + product(layer["down"], product(layer["gate_up"], rms_norm(x, ones, 1e-6)))


def finish(matrix: Adapted, y: Tensor) -> Tensor:
    return swiglu(y) if matrix.is_gated else y


def only(name: str, product: Product, others: Product) -> Product:
    """`product` for the matrix of this name, `others` for the rest."""
    return lambda matrix, x: (product if matrix.name == name else others)(matrix, x)


def us(layers: list[Layer], x: Tensor, product: Product, replays: int = 15) -> float:
    """Microseconds a layer."""
    calls = [lambda layer=layer: run(layer, x, product) for layer in layers]
    return round(1e3 * time_ms(calls, replays), 2)


def check(report: dict, humming: HummingGemm, kernels: Product, layer: Layer, tokens: int) -> None:
    for name, matrix in layer.items():
        x = torch.randn(tokens, matrix.packed.shape[1], device=DEVICE).bfloat16()
        y = humming(x, matrix.packed).double()
        exact = add_adapter(y, x.double(), matrix.a.double(), matrix.b.double(), MEMBERS[name])
        if matrix.is_gated:
            gate, up = exact.chunk(2, dim=1)
            exact = functional.silu(gate) * up
        found = error(kernels(matrix, x), exact)
        print(name, tokens, "error", round(found, 5), flush=True)
        if not found < 8e-3:
            report["failures"].append(f"{name} {tokens}: error {found}")


def block_diagonal(b: Tensor, members: tuple[int, ...]) -> Tensor:
    """[N, n r]: what a plain product needs."""
    return torch.block_diag(*b.split(members)).contiguous()


def launches(tokens: int, name: str) -> list[Launch]:
    """Those that are tried: what is chosen now, other ways to shrink, and other ways to grow."""
    chosen = triton_adapter.launch_for(tokens, MATRICES[name])
    most = max(16, tokens)
    return [
        chosen,
        *(
            replace(chosen, splits=splits, shrink_tokens=shrink_tokens, beside=beside)
            for splits, shrink_tokens in itertools.product(SPLITS, SHRINK_TOKENS)
            for beside in (True, False)
            if shrink_tokens <= most
        ),
        *(
            replace(chosen, grow_tokens=grow_tokens, grow_rows=rows, grow_warps=warps)
            for grow_tokens, rows, warps in GROWS
            if grow_tokens <= most
        ),
    ]


def compile_all(counts: list[int]) -> None:
    """Every launch once, in several processes: what Triton compiles is kept on disk."""
    jobs = list(itertools.product(counts, MATRICES, range(PIECES)))
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        pool.starmap(compile_some, jobs)


def compile_some(tokens: int, name: str, piece: int) -> None:
    num_rows, num_columns = MATRICES[name]
    members = MEMBERS[name]
    x = torch.zeros(tokens, num_columns, dtype=torch.bfloat16, device=DEVICE)
    a = torch.zeros(len(members) * RANK, num_columns, dtype=torch.bfloat16, device=DEVICE)
    b = torch.zeros(num_rows, RANK, dtype=torch.bfloat16, device=DEVICE)
    y = torch.zeros(tokens, num_rows, dtype=torch.bfloat16, device=DEVICE)
    grow = triton_adapter.grow_gated if name == "gate_up" else triton_adapter.grow
    for launch in launches(tokens, name)[piece::PIECES]:
        try:
            grow(y, triton_adapter.shrink(x, a, launch), b, members, launch)
        except Exception as failure:  # one that needs more shared memory than there is
            print(name, tokens, launch, str(failure)[-80:], file=sys.stderr)


def sweep(layers: list[Layer], x: Tensor, name: str, product: Product) -> list[dict]:
    """Microseconds a layer with each launch for this matrix."""
    chosen, rows = triton_adapter.launch_for, []
    try:
        for launch in launches(x.shape[0], name):
            triton_adapter.launch_for = lambda *_, launch=launch: launch
            try:
                row = {"us": us(layers, x, product, replays=7)}
            except Exception as failure:
                row = {"failure": str(failure)[-80:]}
            rows.append({"matrix": name, "tokens": x.shape[0], **row, "launch": asdict(launch)})
    finally:
        triton_adapter.launch_for = chosen
    best = sorted((row for row in rows if "us" in row), key=lambda row: row["us"])
    print(name, x.shape[0], "now", rows[0], "best", best[:3], flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
