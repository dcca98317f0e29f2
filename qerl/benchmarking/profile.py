"""Where the time of a piece of work goes: kernels by name from torch's profiler, summed into a few kinds."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qerl.benchmarking.device import finish

KINDS = (
    ("attention", r"flash|fmha|attention|attn|sdpa|sdp_"),
    ("unpacking", r"expand_|dequant"),
    (
        "GEMMs",
        r"gemm|gemv|cutlass|nvjet|cublas|humming|marlin|aten::(add)?mm|aten::bmm|mkldnn|xmma",
    ),
    ("adapter", r"shrink|grow"),
    ("copies", r"memcpy|memset|aten::copy_|aten::clone"),
)
"""Kinds by what kernels (on a CPU: operations) are called, the first that fits; everything else is element-wise"""
REST = "element-wise and other"


def kernel_times(work: Callable[[], Any], device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds, calls and names of the kernels of one call of `work`, longest first; on a CPU of operations."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        work()
        finish(device)
    rows = [
        {
            "ms": round((e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3, 3),
            "calls": e.count,
            "name": e.key[:120],
        }
        for e in recorded.key_averages()
    ]
    return sorted((row for row in rows if row["ms"]), key=lambda row: -row["ms"])


def less(
    kernels: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Kernels of a longer piece of work without those of a shorter one that it begins with, longest first."""
    known = {other["name"]: other for other in others}
    rows = []
    for kernel in kernels:
        other = known.get(kernel["name"], {"ms": 0.0, "calls": 0})
        ms, calls = kernel["ms"] - other["ms"], kernel["calls"] - other["calls"]
        if ms > 0 and calls > 0:
            rows.append({"ms": round(ms, 3), "calls": calls, "name": kernel["name"]})
    return sorted(rows, key=lambda row: -row["ms"])


def shares(kernels: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Share of kernel time by kind, the greatest first."""
    sums: dict[str, float] = {}
    for kernel in kernels:
        kind = kind_of(kernel["name"])
        sums[kind] = sums.get(kind, 0.0) + kernel["ms"]
    total = sum(sums.values())
    return {kind: round(ms / total, 3) for kind, ms in sorted(sums.items(), key=lambda i: -i[1])}


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((kind for kind, names in KINDS if re.search(names, kernel, re.IGNORECASE)), REST)
