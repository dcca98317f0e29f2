"""From rows to what a reader wants: ratios, percent of the floor, the bottleneck in words. Pure functions of rows.

Every ratio is speed over speed, so above 1 the first is faster.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from qerl.benchmarking.processes import Row
from qerl.benchmarking.update_arms import ARMS as UPDATE_ARMS

ROLLOUT_ARMS = {"ours": "qerl, NVFP4 base", "nf4": "qerl, NF4 base (QLoRA's)"}
STEP_ARMS = {
    "ours": "qerl, NVFP4 base",
    "ours-equal-work": "qerl, every sequence trained, no prompt shared",
    "own-nf4": "qerl, NF4 base",
    "own-bf16": "qerl, bf16 base",
    "qlora": "QLoRA as practised",
}
STEP_RATIOS = {
    "step_vs_qlora_equal_work": ("ours-equal-work", "qlora"),
    "step_vs_qlora": ("ours", "qlora"),
    "step_vs_own_nf4": ("ours", "own-nf4"),
    "step_vs_bf16": ("ours", "own-bf16"),
}
"""Which arm's speed is divided by which"""


@dataclass(frozen=True)
class Summary:
    """What came out."""

    lines: list[str]
    """A table and sentences, for a terminal"""
    ratios: dict[str, float]


@dataclass(frozen=True)
class Depths:
    """Milliseconds of an update, taken apart by measuring it at two depths."""

    layer_ms: float
    rest_ms: float
    """Head, embedding, loss"""
    whole_ms: float
    """Of the whole model: computed, unless all of its layers were measured"""
    tokens: int


def summarize_update(rows: Sequence[Row], num_layers: int) -> Summary:
    """Of rows of `update_arms.measure` at one size and two depths; `num_layers` is the whole model's."""
    found = {
        arm: _depths([row for row in rows if row["arm"] == arm], num_layers)
        for arm in dict.fromkeys(row["arm"] for row in rows)
    }
    table: list[tuple[str, ...]] = [
        ("", "ms a layer", "ms besides", f"ms, {num_layers} layers", "tokens/s")
    ]
    for arm, depths in found.items():
        figures = (depths.layer_ms, depths.rest_ms, depths.whole_ms)
        speed = 1e3 * depths.tokens / depths.whole_ms
        table.append((UPDATE_ARMS[arm], *(f"{ms:,.1f}" for ms in figures), f"{speed:,.0f}"))
    lines, ratios = _aligned(table), {}
    if ours := found.get("ours"):
        for arm, depths in found.items():
            if arm == "ours":
                continue
            ratio = ratios[f"update_vs_{arm}"] = round(depths.whole_ms / ours.whole_ms, 3)
            if arm == "floor":
                lines.append(f"{100 * ratio:.0f} % of the floor's speed: {UPDATE_ARMS[arm]}.")
            else:
                lines.append(f"{ratio:.2f} times the speed of {UPDATE_ARMS[arm]}.")
        deepest = max((row for row in rows if row["arm"] == "ours"), key=lambda r: r["layers"])
        lines.append(_bottleneck(deepest["shares"], f"kernel time at {deepest['layers']} layers"))
    return Summary(lines, ratios)


def _depths(rows: Sequence[Row], num_layers: int) -> Depths:
    deep, shallow = (choose(rows, key=lambda row: row["layers"]) for choose in (max, min))
    between = deep["layers"] - shallow["layers"]
    layer_ms = (deep["ms"] - shallow["ms"]) / between if between else deep["ms"] / deep["layers"]
    # Small models are noisy: nothing takes less than no time.
    layer_ms = min(max(layer_ms, 0.0), deep["ms"] / deep["layers"])
    rest_ms = deep["ms"] - deep["layers"] * layer_ms
    return Depths(layer_ms, rest_ms, rest_ms + num_layers * layer_ms, deep["tokens"])


def summarize_rollout(rows: Sequence[Row]) -> Summary:
    """Of rows of `rollout_arms.measure`."""
    table = [("", "sequences", "tokens/s", "ms a decode step", "bound by memory", "of the bound")]
    for row in rows:
        share = row["floor_ms"] / row["step_ms"]
        figures = (
            f"{row['sequences']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{100 * share:.0f} %",
        )
        table.append((ROLLOUT_ARMS[row["arm"]], *figures))
    found = {(row["arm"], row["sequences"]): row for row in rows}
    lines, ratios = _aligned(table), {}
    for (arm, size), row in found.items():
        if arm == "ours":
            ratios[f"rollout_vs_floor_b{size}"] = round(row["floor_ms"] / row["step_ms"], 3)
        if arm == "ours" and (other := found.get(("nf4", size))):
            ratio = ratios[f"rollout_vs_qlora_b{size}"] = round(
                row["tokens_per_s"] / other["tokens_per_s"], 3
            )
            lines.append(f"{ratio:.2f} times the speed of the NF4 base at {size} sequences.")
    for row in rows:
        if row["arm"] == "ours":
            lines.append(_bottleneck(row["shares"], f"kernel time at {row['sequences']} sequences"))
    return Summary(lines, ratios)


def summarize_step(rows: Sequence[Row]) -> Summary:
    """Of rows of `bench_step.measure`: medians over steps and rounds."""
    arms = dict.fromkeys(row["arm"] for row in rows)
    phases = ("rollout", "update", "reward", "sync")
    table: list[tuple[str, ...]] = [
        ("", *(f"{phase} s" for phase in phases), "step s", "completion tokens/s")
    ]
    medians: dict[str, dict[str, float]] = {}
    for arm in arms:
        steps = [row for row in rows if row["arm"] == arm]
        values = {p: statistics.median(row[f"{p}_s"] for row in steps) for p in (*phases, "step")}
        values["speed"] = statistics.median(r["completion_tokens"] / r["step_s"] for r in steps)
        medians[arm] = values
        figures = (*(f"{values[p]:.2f}" for p in (*phases, "step")), f"{values['speed']:,.0f}")
        table.append((STEP_ARMS[arm], *figures))
    lines, ratios = _aligned(table), {}
    for name, (arm, other) in STEP_RATIOS.items():
        if arm in medians and other in medians:
            ratio = ratios[name] = round(medians[arm]["speed"] / medians[other]["speed"], 3)
            lines.append(f"{STEP_ARMS[arm]}: {ratio:.2f} times the speed of {STEP_ARMS[other]}.")
    if ours := medians.get("ours"):
        total = sum(ours[phase] for phase in phases)
        lines.append(_bottleneck({phase: ours[phase] / total for phase in phases}, "a step"))
    return Summary(lines, ratios)


def _bottleneck(shares: dict[str, float], of_what: str) -> str:
    """The shares of at least 1 %, the greatest first."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{kind} {100 * share:.0f} %" for kind, share in ordered if share >= 0.01]
    return f"Where {of_what} goes: {', '.join(parts)}."


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
