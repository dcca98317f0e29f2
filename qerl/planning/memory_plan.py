"""How a run fits into the memory there is: from the budget to concurrency, key/value cache and tokens a microbatch.

The transformers engine takes what the config says, and a plan that does not fit is refused. The vLLM engine needs sizes
before it starts, so here they are chosen:

1. What is always there is paid first, then what sampling and the update need besides the cache.
2. If the cache that all completions need at full length fits beside the update as asked for, it stays for good.
3. Else it is given back during the update, and each phase has the whole rest for itself: sampling as many sequences as
   fit at full length, so that none is ever preempted; the update as many tokens a microbatch, at most what was asked for.

4. What is left keeps layers' activations that backward would else recompute, unless the config says which it is to be.
5. If not even one sequence of full length fits into the update, the inputs of as many recomputed layers as it takes wait in
   the host's memory (qerl.model.offload).

A bigger microbatch than asked for is never chosen, so on a card with room the numbers of a run are the config's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from qerl.config import Config
from qerl.errors import UserError
from qerl.memory import free_gib
from qerl.planning.footprint import (
    footprint,
    microbatch_tokens,
    offloaded_bytes,
    peak_bytes,
    phase_bytes,
    recomputes,
    wanted_sizes,
)
from qerl.planning.footprint_vllm import cache_bytes
from qerl.planning.sizes import GIB, Part, Place, Sizes, dims_of
from qerl.quant.layout import Layout

RESERVE_SHARE, RESERVE_MIN_GIB = 0.05, 0.5
"""Kept free when memory_gib is not given: a share of what is free, and at least so much."""
BATCHED_TOKENS = (8192, 4096, 2048)
"""Most tokens in one forward pass of vLLM; the first that leaves room is taken."""
SLACK_SHARE = 0.03
"""Share of the budget that vLLM's sizes leave alone: gaps between the blocks of torch's allocator."""
STEP_TOKENS = 256
"""Microbatches are cut down in steps of so many tokens."""


@dataclass(frozen=True)
class Budget:
    """What the process may take."""

    gib: float
    reason: str
    host_gib: float = math.inf
    """Host memory that may be page-locked for it; unknown, so not limited, where the plan is for another machine"""

    @property
    def num_bytes(self) -> int:
        return int(self.gib * GIB)

    @property
    def without_slack(self) -> "Budget":
        """What is planned with where sizes are chosen to fill it."""
        return replace(self, gib=self.gib * (1 - SLACK_SHARE))


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes of a run and what they take."""

    place: Place
    budget: Budget
    sizes: Sizes
    parts: tuple[Part, ...]
    least_bytes: int
    """Peak with the smallest batches, the shortest microbatches and recomputation"""
    longest_context: int
    """Longest prompt and completion together that could be sampled and trained on, a sequence at a time; 0: none"""

    @property
    def peak_bytes(self) -> int:
        return peak_bytes(self.parts)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.budget.num_bytes


def budget_of(config: Config, device: torch.device) -> Budget:
    """memory_gib, or what other processes leave less a reserve.

    Raises UserError for a CUDA device that is not here (a plan for another machine) unless memory_gib says what it has.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        if config.memory_gib is None:
            raise UserError(
                "there is no GPU here: for a plan for another machine's, say with --memory-gib what it has"
            )
        return Budget(config.memory_gib, "memory_gib")
    host = math.inf if device.type == "cpu" else _without_reserve(free_gib(torch.device("cpu")))
    free = free_gib(device)
    if config.memory_gib is None:
        return Budget(_without_reserve(free), "free, less a reserve", host)
    if config.memory_gib <= free:
        return Budget(config.memory_gib, "memory_gib", host)
    return Budget(free, f"free (memory_gib is {config.memory_gib:g})", host)


def _without_reserve(gib: float) -> float:
    return gib - max(RESERVE_MIN_GIB, RESERVE_SHARE * gib)


def make_memory_plan(
    config: Config,
    layout: Layout,
    place: Place,
    budget: Budget,
    *,
    context_limit: int,
    trains: bool = True,
) -> MemoryPlan:
    """Choose the sizes. A plan that does not fit has the smallest ones, and says so by `fits`.

    `context_limit` is the model's own; without `trains` there is no update.
    """

    def parts_of(sizes: Sizes, config: Config = config) -> tuple[Part, ...]:
        return footprint(config, layout, place, sizes, trains=trains)

    smallest = _with_least_memory(config)
    least = parts_of(_least_sizes(smallest, layout, place, budget), smallest)
    if place.engine == "vllm":
        sizes = _choose(config, layout, place, budget.without_slack)
    else:
        sizes = wanted_sizes(config)

    def fits_context(length: int) -> bool:
        longer = _with_context(smallest, place, length)
        needed = parts_of(_least_sizes(longer, layout, place, budget), longer)
        return peak_bytes(needed) <= budget.num_bytes

    if trains:
        sizes = _place_inputs(config, layout, place, budget.without_slack, sizes, parts_of)
    return MemoryPlan(
        place=place,
        budget=budget,
        sizes=sizes,
        parts=parts_of(sizes),
        least_bytes=peak_bytes(least),
        longest_context=largest_that(fits_context, context_limit, place.longest_prompt),
    )


def _place_inputs(
    config: Config,
    layout: Layout,
    place: Place,
    budget: Budget,
    sizes: Sizes,
    parts_of: Callable[[Sizes], tuple[Part, ...]],
) -> Sizes:
    """`sizes` with as many layers kept from recomputation as there is room for, or as few offloaded as must be."""
    if not recomputes(config, place.device_type):
        return sizes
    num_layers = dims_of(layout).num_layers

    def fits(kept: int = 0, offloaded: int = 0) -> bool:
        changed = replace(sizes, kept_layers=kept, offloaded_layers=offloaded)
        return peak_bytes(parts_of(changed)) <= budget.num_bytes

    if not fits():
        most = _most_offloaded(config, layout, place, budget, sizes)
        if most == 0 or not fits(offloaded=most):
            return sizes
        spared = largest_that(lambda n: fits(offloaded=most - n), most, 0)
        return replace(sizes, offloaded_layers=most - spared)
    if config.train.gradient_checkpointing is not None:
        return sizes
    return replace(sizes, kept_layers=largest_that(lambda n: fits(kept=n), num_layers, 0))


def _most_offloaded(
    config: Config, layout: Layout, place: Place, budget: Budget, sizes: Sizes
) -> int:
    """How many layers' inputs the host has room for; 0 where nothing is recomputed, and on the CPU."""
    if place.device_type != "cuda" or not recomputes(config, place.device_type):
        return 0
    tokens = microbatch_tokens(config, place.longest_prompt, sizes.max_tokens_per_microbatch)
    of_layer = offloaded_bytes(layout, place.dtype, tokens, 1)
    return int(min(dims_of(layout).num_layers, max(0.0, budget.host_gib * GIB / of_layer)))


def largest_that(fits, limit: int, above: int) -> int:
    """The largest number in above + 1..limit for which `fits` holds, 0 if there is none. `fits` is monotone."""
    low, high = above, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low if low > above else 0


def _choose(config: Config, layout: Layout, place: Place, budget: Budget) -> Sizes:
    """vLLM's sizes; the smallest if none fit."""
    wanted = wanted_sizes(config)
    best: Sizes | None = None
    for releases in (False, True):
        for batched in BATCHED_TOKENS:
            sizes = replace(wanted, max_num_batched_tokens=batched, releases_cache=releases)
            found = _fit(config, layout, place, budget, sizes)
            if found is None:
                continue
            if _work(found) == _work(wanted):
                return found
            if best is None or _work(found) > _work(best):
                best = found
    return _least_sizes(config, layout, place, budget) if best is None else best


def _work(sizes: Sizes) -> tuple[int, int]:
    """What a plan is judged by. Concurrency first: a decode step reads the whole base for however few sequences."""
    return sizes.max_num_seqs, sizes.max_tokens_per_microbatch


def _fit(
    config: Config, layout: Layout, place: Place, budget: Budget, sizes: Sizes
) -> Sizes | None:
    """`sizes` with the cache, concurrency and microbatch that fit; None if not even one sequence does."""
    longest = place.longest_prompt + config.rollout.max_completion_length
    of_sequence = cache_bytes(layout, place.dtype, longest)
    # vLLM refuses to start unless one sequence of the longest allowed length fits.
    least = cache_bytes(
        layout, place.dtype, config.rollout.max_prompt_length + config.rollout.max_completion_length
    )

    def needs(tokens: int) -> tuple[int, int]:
        """Bytes of each phase beside the cache, when a microbatch has so many tokens; `sizes` as they are now."""
        parts = footprint(
            config,
            layout,
            place,
            replace(sizes, max_tokens_per_microbatch=tokens, kv_cache_bytes=0),
        )
        always = phase_bytes(parts, "always")
        return always + phase_bytes(parts, "rollout"), always + phase_bytes(parts, "update")

    wanted = sizes.max_tokens_per_microbatch
    rollout, update = needs(wanted)
    if sizes.releases_cache:
        room = budget.num_bytes - rollout
        if update > budget.num_bytes:
            steps = largest_that(
                lambda n: needs(n * STEP_TOKENS)[1] <= budget.num_bytes, wanted // STEP_TOKENS, 0
            )
            wanted = max(longest, steps * STEP_TOKENS)
            if needs(wanted)[1] > budget.num_bytes:
                alone = replace(sizes, max_tokens_per_microbatch=wanted)
                most = _most_offloaded(config, layout, place, budget, alone)
                sizes = replace(sizes, offloaded_layers=most)
            if needs(wanted)[1] > budget.num_bytes:
                return None
    else:
        room = budget.num_bytes - max(rollout, update)
    cache = min(max(sizes.max_num_seqs * of_sequence, least), room)
    rows = min(sizes.max_num_seqs, cache // of_sequence)
    if cache < least or rows < 1:
        return None
    return replace(
        sizes,
        max_num_seqs=rows,
        kv_cache_bytes=max(rows * of_sequence, least),
        max_tokens_per_microbatch=wanted,
    )


def _least_sizes(config: Config, layout: Layout, place: Place, budget: Budget) -> Sizes:
    """One sequence at a time."""
    sizes = wanted_sizes(config)
    if place.engine == "vllm":
        longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
        sizes = Sizes(
            max_num_seqs=1,
            max_tokens_per_microbatch=1,
            kv_cache_bytes=cache_bytes(layout, place.dtype, longest),
            max_num_batched_tokens=BATCHED_TOKENS[-1],
            releases_cache=True,
        )
    most = _most_offloaded(config, layout, place, budget, sizes)
    return replace(sizes, offloaded_layers=most)


def _with_least_memory(config: Config) -> Config:
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"max_batch_size": 1}),
            "train": config.train.model_copy(
                update={"max_tokens_per_microbatch": 1, "gradient_checkpointing": True}
            ),
        }
    )


def _with_context(config: Config, place: Place, length: int) -> Config:
    """Prompts and completions that are `length` tokens together."""
    rollout = config.rollout.model_copy(
        update={
            "max_prompt_length": place.longest_prompt,
            "max_completion_length": length - place.longest_prompt,
        }
    )
    return config.model_copy(update={"rollout": rollout})
