"""What a LoRA adapter adds to a packed product on a CUDA GPU, at the four matrices of a 32B layer and a decode step's tokens.

    python benchmarks/gpu_adapter.py [--sweep]

For each matrix: the packed GEMM alone (with the activation after gate and up), then with a rank-32 adapter as two plain
products per call, and as the two Triton launches that the engine uses. `--sweep` tries other ways to cut the launches, one field
after the other. Calls rotate over enough weights to be cache-cold, inside one CUDA graph. The outputs are compared with float64.
Writes adapter.json into $OUT or benchmarks/results. Needs humming-kernels; no vLLM.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace

import torch
from gpu_kernels import (
    DEVICE,
    MATRICES,
    copy_of,
    description,
    error,
    num_sets,
    random_weight,
    time_ms,
)
from reports import write_report
from torch import Tensor
from torch.nn import functional

from qerl.kernels import triton_adapter
from qerl.kernels.adapter import AdaptedGemm, add_adapter, gate
from qerl.kernels.gemm import HummingGemm
from qerl.kernels.humming_layout import HummingWeight, mma_of, pack

MEMBERS = {"qkv": (5120, 1024, 1024), "o": (5120,), "gate_up": (27648, 27648), "down": (5120,)}
TOKENS = (8, 64, 256)
RANK = 32
FIELDS = {
    "splits": (4, 8, 16, 32, 64),
    "columns": (128, 256),
    "shrink_tokens": (16, 32, 64),
    "grow_tokens": (16, 32, 64),
    "grow_rows": (32, 64, 128, 256),
    "shrink_warps": (2, 4, 8),
    "grow_warps": (2, 4, 8),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_adapter: no CUDA GPU here, nothing was measured")
        return 0
    report: dict = {**description(), "rows": [], "layer_us": {}, "failures": []}
    for name in MATRICES:
        bench_matrix(report, name, options.sweep)
    for tokens in TOKENS:
        rows = [row for row in report["rows"] if row["tokens"] == tokens]
        report["layer_us"][f"m{tokens}"] = {
            key: round(sum(row[key] for row in rows), 1)
            for key in ("base_us", "plain_us", "kernels_us")
        }
    print(json.dumps(report["layer_us"], indent=1), "failures:", report["failures"])
    write_report("adapter", report)
    return 1 if report["failures"] else 0


def bench_matrix(report: dict, name: str, sweep: bool) -> None:
    weight = pack(random_weight(*MATRICES[name]), mma_of(DEVICE))
    # Small, so that an error of the adapter's shows in the sum.
    weight = replace(weight, dequant_scale=weight.dequant_scale * 1e-3)
    num_rows, num_columns = weight.shape
    members, gated = MEMBERS[name], name == "gate_up"
    scale = weight.dequant_scale.item()
    humming = HummingGemm(DEVICE)
    humming.prepare([weight], TOKENS)
    adapted = AdaptedGemm(lambda x, weight, _: humming(x, weight), DEVICE, torch.bfloat16)
    sets: list[tuple[HummingWeight, Tensor, Tensor]] = []
    for _ in range(max(4, num_sets(weight.nbytes))):
        a = torch.randn(len(members) * RANK, num_columns, device=DEVICE).bfloat16() / 64
        b = torch.randn(num_rows, RANK, device=DEVICE).bfloat16() / 8
        sets.append((copy_of(weight), a, b))  # pyright: ignore[reportArgumentType]
    dense = [block_diagonal(b, members) for _, _, b in sets]
    for tokens in TOKENS:
        x = torch.randn(tokens, num_columns, device=DEVICE).bfloat16()

        def finish(y: Tensor) -> Tensor:
            return gate(y) if gated else y

        def base(packed: HummingWeight, x: Tensor = x) -> Tensor:
            return finish(humming(x, packed))

        def plain(packed: HummingWeight, a: Tensor, b: Tensor, x: Tensor = x) -> Tensor:
            return finish(humming(x, packed) + functional.linear(functional.linear(x, a), b))

        def kernels(packed: HummingWeight, a: Tensor, b: Tensor, x: Tensor = x) -> Tensor:
            return adapted(x, packed, scale, a, b, members, gated=gated)

        packed, a, b = sets[0]
        exact = add_adapter(
            humming(x, packed).double(), x.double(), a.double(), b.double(), members
        )
        row = {"matrix": name, "tokens": tokens, "error": error(kernels(*sets[0]), finish(exact))}
        if row["error"] > 8e-3:
            report["failures"].append(f"{name} {tokens}: error {row['error']}")
        ms = time_ms([lambda s=s: base(s[0]) for s in sets])
        with_plain = time_ms(
            [lambda s=s, d=d: plain(s[0], s[1], d) for s, d in zip(sets, dense, strict=True)]
        )
        with_kernels = time_ms([lambda s=s: kernels(*s) for s in sets])
        row |= {
            "base_us": round(1e3 * ms, 2),
            "plain_us": round(1e3 * (with_plain - ms), 2),
            "kernels_us": round(1e3 * (with_kernels - ms), 2),
        }
        if sweep:
            row["sweep"] = sweep_launches(sets, tokens, kernels, ms)
        print(json.dumps(row), flush=True)
        report["rows"].append(row)


def block_diagonal(b: Tensor, members: tuple[int, ...]) -> Tensor:
    """[N, n r]: what a plain product needs."""
    out = b.new_zeros(b.shape[0], len(members) * RANK)
    for index, part in enumerate(b.split(members)):
        start = sum(members[:index])
        out[start : start + len(part), index * RANK : (index + 1) * RANK] = part
    return out


def sweep_launches(sets: list, tokens: int, call, base_ms: float) -> dict:
    """The best launch found by changing one field at a time, and what it adds in microseconds."""
    chosen = triton_adapter.launch_for
    best = chosen(tokens, sets[0][0].shape)

    def added(launch: triton_adapter.Launch) -> float:
        triton_adapter.launch_for = lambda *_: launch
        return 1e3 * (time_ms([lambda s=s: call(*s) for s in sets], replays=9) - base_ms)

    try:
        least = added(best)
        for field, values in FIELDS.items():
            for value in values:
                launch = replace(best, **{field: value})
                if launch == best or (field.endswith("tokens") and value > max(16, tokens)):
                    continue
                try:
                    found = added(launch)
                except Exception as failure:  # a launch that needs more shared memory than there is
                    print(launch, str(failure)[-80:], file=sys.stderr)
                    continue
                if found < least:
                    best, least = launch, found
    finally:
        triton_adapter.launch_for = chosen
    return {"launch": asdict(best), "us": round(least, 2)}


if __name__ == "__main__":
    sys.exit(main())
