"""What a run tries before its first step, when a failure still costs nothing: the agreement of trainer and engine, and
whether the longest microbatch fits (see `qerl.parity` and `qerl.probe`)."""

from typing import TYPE_CHECKING

import torch

from qerl.config import Config
from qerl.cuda_memory import cuda_memory
from qerl.failures import phase
from qerl.metrics import say
from qerl.parity import check_parity, parity_prompts
from qerl.planning.footprint import RUNTIME_BYTES
from qerl.planning.footprint_vllm import CODE_BYTES
from qerl.planning.memory_plan import MemoryPlan
from qerl.probe import probe_update

if TYPE_CHECKING:
    from qerl.run import Run


def cap_memory(plan: MemoryPlan, device: torch.device) -> None:
    """Let torch refuse what lies above the budget, on CUDA, and count the run's peak from here."""
    if device.type != "cuda":
        return
    cuda_memory(device).start_peak()
    sizes, on_vllm = plan.sizes, plan.place.engine == "vllm"
    outside = RUNTIME_BYTES["cuda"] + CODE_BYTES * on_vllm
    unmapped = sizes.kv_cache_bytes if sizes.releases_cache else 0
    if not cuda_memory(device).limit(plan.budget.num_bytes, outside, unmapped):
        say(
            "note: the cap on memory is kept by the plan alone: torch counts the key/value cache while it is given back, "
            "and cap and cache together are more than the card has"
        )


def wants_parity(config: Config, engine: str) -> bool:
    """Whether the gate is due when a run starts."""
    return config.parity == "always" or (config.parity == "auto" and engine == "vllm")


def check_start(run: "Run", plan: MemoryPlan) -> None:
    """Run the checks that are due. Raises RunError (parity, probe) when the run would go wrong."""
    config = run.config
    if wants_parity(config, plan.place.engine):
        with phase("parity"):
            parity, warning = check_parity(
                run.policy,
                run.engine,
                parity_prompts(run.data.train.prompt_ids),
                config.rollout.max_completion_length,
            )
        say(parity.line())
        if warning:
            say(f"warning: {warning}")
        run.record.add({"parity": parity.as_json()})
    if run.policy.device.type == "cuda":
        with phase("probe"):
            run.engine.release()
            peak = probe_update(config, run.policy, plan)
        run.record.add({"probe_peak_gib": peak})
        say(f"the longest microbatch fits: {peak:.2f} GiB at the peak")
