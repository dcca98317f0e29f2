"""Kernels on a CUDA GPU at the four matrices of a 32B layer: right against float64, then timed.

    python benchmarks/gpu_kernels.py [--sweep] [--only expand gemm]
    python benchmarks/gpu_kernels.py --only tiles

* Layout: Humming's own packing against `humming_layout.pack`, byte for byte, for both instructions; writes golden bytes.
* Expansion: bytes read and written over time, as a share of the best copy of the same run.
* GEMM: Humming on packed weights against cuBLAS on dense bf16, and against expanding first.
* Tiles, if asked: other tiles than Humming's heuristic takes.

Cache-cold: calls rotate over enough buffers to evict the L2 cache, inside one CUDA graph, so launches cost nothing.
Every output is filled with NaN before it is checked. Writes kernels.json and humming_*.txt into $OUT, or into
benchmarks/results. Needs torch with CUDA, triton, humming-kernels 0.1.10 and pyelftools; no vLLM.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from reports import results_folder, write_report
from torch import Tensor

from qerl.benchmarking.device import describe
from qerl.errors import UserError
from qerl.kernels import expand, triton_expand
from qerl.kernels.gemm import (
    Configs,
    HummingGemm,
    check_layout,
    compile_kernels,
    pack_with_humming,
    probe_matrix,
)
from qerl.kernels.humming_layout import HummingWeight, Mma, mma_of, pack
from qerl.quant.nvfp4 import E2M1_VALUES, Nvfp4Weight

MATRICES = {
    "qkv": (7168, 5120),
    "o": (5120, 5120),
    "gate_up": (55296, 5120),
    "down": (5120, 27648),
}
TOKENS = (8, 64, 256, 512, 1024, 2048, 8192)
GOLDEN_SHAPE = (128, 64)
HUMMING_SWEEP = (
    (4, 1, 4),
    (8, 1, 4),
    (8, 1, 8),
    (16, 1, 4),
    (16, 1, 8),
    (4, 2, 4),
    (8, 2, 8),
    (16, 2, 8),
    (32, 1, 8),
)
NVFP4_SWEEP = (
    (8, 16, 4),
    (8, 32, 4),
    (16, 16, 4),
    (16, 32, 4),
    (16, 32, 8),
    (32, 16, 4),
    (32, 8, 4),
)
WIDE = {"block_shape": (128, 256, 64), "warp_shape": (128, 32, 64)}
TILE_CHANGES = {
    64: (
        {"num_stages": 3},
        {"num_stages": 5},
        {"num_stages": 6},
        {"block_shape": (64, 128, 64), "warp_shape": (64, 32, 64)},
        {"block_shape": (64, 128, 128), "warp_shape": (64, 32, 64)},
        {"block_shape": (64, 128, 128), "warp_shape": (64, 32, 128)},
        {"block_shape": (64, 256, 128), "warp_shape": (64, 32, 128)},
        {"block_shape": (64, 256, 128), "warp_shape": (64, 32, 128), "num_stages": 3},
        {"block_shape": (32, 256, 128), "warp_shape": (32, 32, 64)},
        {"use_warp_spec": False},
        {"block_shape": (64, 128, 64), "warp_shape": (64, 32, 64), "num_ctas_per_sm": 2},
    ),
    256: (
        {"num_stages": 3},
        {"num_stages": 5},
        {"num_stages": 6},
        {"block_shape": (128, 256, 128), "warp_shape": (128, 32, 128), "num_stages": 3},
        {"block_shape": (128, 256, 128), "warp_shape": (128, 32, 64), "num_stages": 3},
        {"block_shape": (128, 128, 64), "warp_shape": (128, 32, 64)},
        {"block_shape": (128, 128, 128), "warp_shape": (128, 32, 128)},
        {"block_shape": (128, 128, 128), "warp_shape": (128, 32, 64)},
        {"block_shape": (256, 128, 64), "warp_shape": (128, 32, 64)},
        {"block_shape": (256, 128, 64), "warp_shape": (128, 32, 64), "num_stages": 3},
        {"block_shape": (128, 256, 64), "warp_shape": (64, 64, 64)},
        {"block_shape": (88, 256, 64), "warp_shape": (88, 32, 64)},
        {"block_shape": (64, 256, 64), "warp_shape": (64, 32, 64)},
        {"block_shape": (176, 256, 64), "warp_shape": (176, 32, 64)},
        {"use_warp_spec": False},
        {"use_stream_k": False},
        {"num_write_splits": 2},
    ),
    8192: (
        {"num_stages": 3},
        {"num_stages": 5},
        {**WIDE},
        {"block_shape": (128, 256, 128), "warp_shape": (128, 32, 128), "num_stages": 3},
        {"block_shape": (160, 256, 64), "warp_shape": (160, 32, 64)},
        {"block_shape": (192, 256, 64), "warp_shape": (192, 32, 64)},
        {"block_shape": (256, 128, 64), "warp_shape": (128, 32, 64)},
        {"use_stream_k": False},
    ),
}
"""Changes to the heuristic's choice, by number of tokens"""
COPY_BYTES = (2**28, 2**30, 2**31)
ROUNDED_ONCE = 2.5e-3
"""Relative error allowed to sums in fp32 that are rounded to bf16 once; 0.0017 is usual."""
ROUNDED_PARTS = 8e-3
"""The same for bf16 partial sums added in bf16: 0.0061 for 24 parts, the most that the shapes here are split into
(docs/kernels.md)."""
CHECKED_ROWS = 256
DEVICE = torch.device("cuda", 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true", help="also try other launch shapes")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["layout", "expand", "gemm", "tiles"],
        default=["layout", "expand", "gemm"],
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels: no CUDA GPU here, nothing was measured")
        return 0
    folder = results_folder()
    torch.manual_seed(0)
    result = {"rows": [], "ratios": {}, "failures": [], **description()}
    sections = {
        "layout": bench_layout,
        "expand": bench_expand,
        "gemm": bench_gemm,
        "tiles": bench_tiles,
    }
    for name in options.only:
        started = time.time()
        sections[name](result, folder, options.sweep)
        result["rows"].append(
            {"kind": "section", "name": name, "seconds": round(time.time() - started, 1)}
        )
        write_report("kernels", result)
        torch.cuda.empty_cache()
    print(json.dumps(result["ratios"], indent=1))
    print("failures:", result["failures"])
    return 1 if result["failures"] else 0


def description() -> dict[str, object]:
    return {
        **describe(DEVICE),
        "l2_bytes": torch.cuda.get_device_properties(DEVICE).L2_cache_size,
    }


def expect(result: dict, condition: bool, what: str) -> None:
    """Record and print what is wrong; the run goes on, its exit code says so."""
    if not condition:
        print("WRONG:", what, flush=True)
        result["failures"].append(what)


# ---- layout ----


def bench_layout(result: dict, folder: Path, sweep: bool) -> None:
    for mma in ("wgmma", "mma"):
        try:
            check_layout(DEVICE, mma)
        except UserError as problem:
            expect(result, False, str(problem))
        for shape in (GOLDEN_SHAPE, (576, 576), (1024, 4096)):
            probe = probe_matrix(*shape, DEVICE)
            ours, theirs = pack(probe, mma), pack_with_humming(probe, mma)
            same = all(
                a.shape == b.shape
                and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
                for a, b in zip(ours.tensors().values(), theirs.tensors().values(), strict=True)
            )
            expect(result, same, f"layout {mma} {shape}")
            result["rows"].append({"kind": "layout", "mma": mma, "shape": shape, "equal": same})
        theirs = pack_with_humming(probe_matrix(*GOLDEN_SHAPE, DEVICE), mma)
        (folder / f"humming_{mma}.txt").write_text(golden_text(theirs))


def golden_text(weight: HummingWeight) -> str:
    """Codes and block scales without padding, a stored row a line, as hexadecimal bytes."""
    num_rows, num_columns = weight.shape
    lines = [
        f"# humming-kernels {version('humming-kernels')} on {torch.cuda.get_device_name(DEVICE)}: "
        f"qerl.kernels.gemm.probe_matrix({num_rows}, {num_columns}) for {weight.mma}, by benchmarks/gpu_kernels.py"
    ]
    parts = {
        "codes": weight.codes[:, : 2 * num_rows],
        "block_scales": weight.block_scales[:, :num_rows],
    }
    for name, part in parts.items():
        for row in part[: num_columns // 16].contiguous().view(torch.uint8).cpu():
            lines.append(f"{name} {bytes(row.tolist()).hex()}")
    return "\n".join(lines) + "\n"


# ---- expansion ----


def bench_expand(result: dict, folder: Path, sweep: bool) -> None:
    copy_gb_s = copy_bandwidth(result)
    result["copy_gb_s"] = round(copy_gb_s)
    check_small(result)
    formats: dict[str, Callable[[Nvfp4Weight], object]] = {
        "humming": lambda weight: pack(weight, mma_of(DEVICE)),
        "nvfp4": lambda weight: weight,
    }
    for name, shape in MATRICES.items():
        plain = random_weight(*shape)
        for layout, convert in formats.items():
            weight = convert(plain)
            check_expansion(result, plain, weight, f"{layout} {name}")
            row = {
                "kind": "expand",
                "layout": layout,
                "matrix": name,
                "shape": shape,
                **time_expansion(weight),
            }
            row["share_of_copy"] = round(row["gb_s"] / copy_gb_s, 3)
            add(result, row)
            result["ratios"][f"expand_{layout}_vs_copy_{name}"] = row["share_of_copy"]
            if sweep and name in ("o", "gate_up"):
                sweep_launches(result, weight, layout, name, copy_gb_s)
    for layout in formats:
        shares = [result["ratios"][f"expand_{layout}_vs_copy_{name}"] for name in MATRICES]
        result["ratios"][f"expand_{layout}_vs_copy_min"] = min(shares)


def copy_bandwidth(result: dict) -> float:
    """Best GB/s, read plus written, of a few sizes and two ways.

    Inside a CUDA graph `copy_` is a memcpy node, which the driver carries out as it likes; negation is an elementwise
    kernel of torch that moves the same bytes.
    """
    ways: dict[str, Callable[[Tensor, Tensor], object]] = {
        "copy_": lambda source, target: target.copy_(source),
        "neg": lambda source, target: torch.neg(source, out=target),
    }
    best = 0.0
    for num_bytes in COPY_BYTES:
        source = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
        targets = [torch.empty_like(source) for _ in range(2)]
        for way, run in ways.items():
            ms = time_ms([lambda t=t, run=run, source=source: run(source, t) for t in targets])
            gb_s = 2 * num_bytes / ms / 1e6
            add(result, {"kind": "copy", "way": way, "bytes": num_bytes, "gb_s": round(gb_s)})
            best = max(best, gb_s)
    return best


def random_weight(num_rows: int, num_columns: int) -> Nvfp4Weight:
    """Every code and every block scale from 2^-9 to 448, zero included, at random."""
    codes = torch.randint(0, 256, (num_rows, num_columns // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(0, 127, (num_rows, num_columns // 16), dtype=torch.uint8, device=DEVICE)
    return Nvfp4Weight(codes, scales.view(torch.float8_e4m3fn), torch.tensor(1e-4, device=DEVICE))


def check_expansion(result: dict, plain: Nvfp4Weight, weight: object, what: str) -> None:
    """All of it, and ranges of rows into wider buffers, against float64."""
    num_rows, num_columns = plain.shape
    for start, stop in ((0, num_rows), (64, num_rows - 64), (77, 77 + 131)):
        wide = torch.full(
            (stop - start, num_columns + 32), float("nan"), dtype=torch.bfloat16, device=DEVICE
        )
        out = wide[:, :num_columns]
        expand(weight.rows(start, stop), torch.bfloat16, out)
        same = equals_float64(plain.rows(start, stop), out)
        expect(result, same, f"expand {what} rows {start}..{stop}")
        expect(
            result,
            bool(wide[:, num_columns:].isnan().all()),
            f"expand {what} wrote beside its rows",
        )


def check_small(result: dict) -> None:
    """Sizes that need padding or masks, both instructions' layouts."""
    for shape in ((576, 576), (100, 48), (1, 16)):
        plain = random_weight(*shape)
        for weight in (plain, pack(plain, "wgmma"), pack(plain, "mma")):
            out = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
            same = equals_float64(plain, expand(weight, torch.bfloat16, out))
            expect(result, same, f"expand {type(weight).__name__} {shape}")


def equals_float64(weight: Nvfp4Weight, out: Tensor) -> bool:
    """Whether bf16 `out` is codes times block scales computed in float64, the sign of zero included."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=out.device)
    for start in range(0, len(out), 4096):
        codes = weight.codes[start : start + 4096]
        values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(
            1
        )
        scales = weight.block_scales[start : start + 4096].double()
        exact = (values.unflatten(1, (-1, 16)) * scales.unsqueeze(-1)).flatten(1)
        got = out[start : start + 4096].double()
        if not (torch.equal(got, exact) and torch.equal(got.signbit(), exact.signbit())):
            return False
    return True


def time_expansion(weight: object) -> dict[str, float]:
    num_rows, num_columns = weight.shape
    num_bytes = num_rows * num_columns * 2 + num_rows * num_columns * 9 // 16
    count = num_sets(num_bytes)
    sets = [
        (copy_of(weight), torch.empty(weight.shape, dtype=torch.bfloat16, device=DEVICE))
        for _ in range(count)
    ]
    ms = time_ms([lambda w=w, out=out: expand(w, torch.bfloat16, out) for w, out in sets])
    return {"ms": round(ms, 4), "gb_s": round(num_bytes / ms / 1e6)}


def sweep_launches(result: dict, weight: object, layout: str, name: str, copy_gb_s: float) -> None:
    launch = triton_expand.HUMMING_LAUNCH if layout == "humming" else triton_expand.NVFP4_LAUNCH
    second = "TILES" if layout == "humming" else "ROWS"
    kept = dict(launch)
    for blocks, rows, warps in HUMMING_SWEEP if layout == "humming" else NVFP4_SWEEP:
        launch.update({"BLOCKS": blocks, second: rows, "num_warps": warps})
        row = {
            "kind": "sweep",
            "layout": layout,
            "matrix": name,
            **launch,
            **time_expansion(weight),
        }
        row["share_of_copy"] = round(row["gb_s"] / copy_gb_s, 3)
        add(result, row)
    launch.update(kept)
    # What Triton's interpreter runs in the tests: halves multiplied as fp32 instead of by one fma.bf16x2.
    triton_expand._INTERPRETED = True
    row = {
        "kind": "sweep",
        "layout": layout,
        "matrix": name,
        **launch,
        "ptx": False,
        **time_expansion(weight),
    }
    triton_expand._INTERPRETED = False
    row["share_of_copy"] = round(row["gb_s"] / copy_gb_s, 3)
    add(result, row)


# ---- GEMM ----


def bench_gemm(result: dict, folder: Path, sweep: bool) -> None:
    mma = mma_of(DEVICE)
    weights = {name: pack(random_weight(*shape), mma) for name, shape in MATRICES.items()}
    gemms = {
        "humming": HummingGemm(DEVICE),
        "humming_batch_invariant": HummingGemm(DEVICE, batch_invariant=True),
    }
    for name, gemm in gemms.items():
        started = time.time()
        gemm.prepare(weights.values(), TOKENS)
        add(result, {"kind": "compile", "what": name, "seconds": round(time.time() - started, 1)})
    check_other_sizes(result)
    for name, weight in weights.items():
        bench_matrix(result, name, weight, gemms)
    for tokens in TOKENS:
        rows = [row for row in result["rows"] if row["kind"] == "gemm" and row["tokens"] == tokens]
        keys = ("cublas", *gemms, "expand_cublas")
        total = {key: sum(row[f"{key}_ms"] for row in rows) for key in keys}
        layer = {f"{key}_ms": round(ms, 4) for key, ms in total.items()}
        add(result, {"kind": "layer", "tokens": tokens, **layer})
        for key in list(total)[1:]:
            result["ratios"][f"{key}_vs_cublas_m{tokens}"] = round(total["cublas"] / total[key], 3)


def bench_matrix(
    result: dict, name: str, weight: HummingWeight, gemms: dict[str, HummingGemm]
) -> None:
    num_rows, num_columns = weight.shape
    scale = weight.dequant_scale.item()
    dense = expand(weight, torch.bfloat16)
    exact_weight = dense.double()
    packed_sets = [copy_of(weight) for _ in range(num_sets(weight.nbytes))]
    dense_sets = [dense.clone() for _ in range(num_sets(dense.nbytes))]
    first_rows = {}
    for tokens in TOKENS:
        x = torch.randn(
            TOKENS[-1], num_columns, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE
        )
        x = x[:tokens].bfloat16()
        out = torch.empty(tokens, num_rows, dtype=torch.bfloat16, device=DEVICE)
        # Rows from all over: an error may be in one tile of many.
        checked = torch.linspace(0, tokens - 1, min(tokens, CHECKED_ROWS), device=DEVICE).long()
        exact = x[checked].double() @ exact_weight.t() * scale
        row = {"kind": "gemm", "matrix": name, "shape": weight.shape, "tokens": tokens}

        def cublas(dense: Tensor, x: Tensor = x, out: Tensor = out) -> None:
            torch.addmm(out, x, dense.t(), beta=0, alpha=scale, out=out)

        out.fill_(float("nan"))
        cublas(dense)
        row["cublas_error"] = error(out[checked], exact)
        row["cublas_ms"] = round(time_ms([lambda d=d: cublas(d) for d in dense_sets]), 4)
        for key, gemm in gemms.items():
            out.fill_(float("nan"))
            gemm(x, weight, out)
            row[f"{key}_error"] = error(out[checked], exact)
            allowed = ROUNDED_ONCE if gemm.batch_invariant else ROUNDED_PARTS
            expect(
                result,
                row[f"{key}_error"] < allowed,
                f"gemm {key} {name} {tokens}: {row[f'{key}_error']}",
            )
            again = [gemm(x, weight) for _ in range(5)]
            row[f"{key}_repeats"] = all(torch.equal(out, other) for other in again)
            if key == "humming_batch_invariant":
                first_rows[tokens] = out[:8].clone()
            calls = [lambda w=w, gemm=gemm, x=x, out=out: gemm(x, w, out) for w in packed_sets]
            row[f"{key}_ms"] = round(time_ms(calls), 4)

        buffer = torch.empty_like(dense)
        calls = [
            lambda w=w, cublas=cublas, buffer=buffer: cublas(expand(w, torch.bfloat16, buffer))
            for w in packed_sets
        ]
        row["expand_cublas_ms"] = round(time_ms(calls), 4)
        add(result, row)
    least = first_rows[TOKENS[0]]
    invariant = {tokens: torch.equal(rows, least) for tokens, rows in first_rows.items()}
    add(result, {"kind": "batch_invariance", "matrix": name, "equal_to_8_tokens": invariant})


def multiply(
    x: Tensor, weight: HummingWeight, configs: Configs, locks: Tensor, out: Tensor
) -> Tensor:
    """`HummingGemm` with other tiles."""
    return torch.ops.humming.humming_gemm(
        *configs,
        x,
        weight.codes,
        outputs=out,
        weight_scale=weight.block_scales,
        global_scale=weight.dequant_scale,
        locks=locks,
    )


def bench_tiles(result: dict, folder: Path, sweep: bool) -> None:
    """Every change of `TILE_CHANGES` to the heuristic's tiles, on each matrix: error, and milliseconds beside the heuristic's."""
    gemm = HummingGemm(DEVICE)
    weights = {
        name: pack(random_weight(*shape), mma_of(DEVICE)) for name, shape in MATRICES.items()
    }
    tried: dict[tuple[str, int], dict[str, Configs]] = {}
    for (name, weight), tokens in itertools.product(weights.items(), TILE_CHANGES):
        layer, compute, tuning = gemm.configs(weight, tokens)
        changed = {
            json.dumps(change): (layer, compute, json.dumps(json.loads(tuning) | change))
            for change in ({}, *TILE_CHANGES[tokens])
        }
        tried[name, tokens] = changed
    failures = compile_kernels({c for found in tried.values() for c in found.values()}, DEVICE)
    for (name, tokens), changed in tried.items():
        weight = weights[name]
        x = torch.randn(tokens, weight.shape[1], device=DEVICE).bfloat16()
        exact = x.double() @ expand(weight, torch.float64).t() * weight.dequant_scale.double()
        sets = [copy_of(weight) for _ in range(num_sets(weight.nbytes))]
        out = torch.empty(tokens, weight.shape[0], dtype=torch.bfloat16, device=DEVICE)
        best = {"ms": float("inf")}
        for change, configs in changed.items():
            row = {"kind": "tiles", "matrix": name, "tokens": tokens, "change": change}
            if configs in failures:
                row["failure"] = str(failures[configs])[-200:]
            else:
                calls = [partial(multiply, x, w, configs, gemm.locks, out) for w in sets]
                try:
                    out.fill_(float("nan"))
                    multiply(x, weight, configs, gemm.locks, out)
                    row |= {"error": error(out, exact), "ms": round(time_ms(calls), 4)}
                except RuntimeError as failure:
                    row["failure"] = str(failure)[-200:]
            if row.get("error", 1) < ROUNDED_PARTS and row["ms"] < best["ms"]:
                best = row
            result["rows"].append(row)
            if change == "{}":
                usual = row
        print("tiles", name, tokens, "heuristic", usual["ms"], "best", json.dumps(best), flush=True)


def check_other_sizes(result: dict) -> None:
    """Padded sizes, and the other architectures' instruction forced on this one."""
    many = (1, 16, 100)
    cases: list[tuple[tuple[int, int], Mma, tuple[int, ...]]] = [
        ((576, 576), mma_of(DEVICE), many),
        ((576, 1536), mma_of(DEVICE), many),
        ((1024, 2048), "mma", many),
    ]
    gemm = HummingGemm(DEVICE)
    for shape, mma, counts in cases:
        weight = pack(random_weight(*shape), mma)
        for tokens in counts:
            x = torch.randn(tokens, shape[1], device=DEVICE).bfloat16()
            exact = x.double() @ expand(weight, torch.float64).t() * weight.dequant_scale.double()
            row = {"kind": "gemm_check", "shape": shape, "mma": mma, "tokens": tokens}
            out = torch.full((tokens, shape[0]), float("nan"), dtype=torch.bfloat16, device=DEVICE)
            try:
                row["error"] = error(gemm(x, weight, out), exact)
                good = row["error"] < ROUNDED_PARTS
                expect(result, good, f"gemm {shape} {mma} {tokens}: {row['error']}")
            except (RuntimeError, AssertionError) as failure:
                row["failed"] = str(failure)[-500:]
                expect(result, False, f"gemm {shape} {mma} {tokens}: {row['failed'][-200:]}")
            add(result, row)


# ---- common ----


def error(y: Tensor, exact: Tensor) -> float:
    """||y - exact|| / ||exact||"""
    difference = y.double() - exact
    return float(f"{(difference.norm() / exact.norm()).item():.3g}")


def num_sets(num_bytes: int) -> int:
    """Buffers of this size to rotate over so that none is in the L2 cache when its turn comes."""
    cache = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(1, -(-3 * cache // num_bytes))


def copy_of(weight: object) -> object:
    """The same weight in memory of its own."""
    return weight.to("cpu").to(DEVICE)


def time_ms(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median milliseconds a call, of a CUDA graph that makes each call at least once and eight in all."""
    calls = calls * max(1, -(-8 // len(calls)))
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for replay in range(replays + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if replay >= 3:
            times.append(start.elapsed_time(stop) / len(calls))
    return statistics.median(times)


def add(result: dict, row: dict) -> None:
    print(json.dumps(row), flush=True)
    result["rows"].append(row)


if __name__ == "__main__":
    sys.exit(main())
