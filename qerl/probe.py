"""The longest microbatch that the plan allows, run once before the first step: if it does not fit, that is known now.

Forward and backward of made-up tokens, packed as full as the plan allows, with the engine's cache given back if the plan
gives it back. Nothing remains of it: the gradients are dropped, no random number is drawn, no weight is written.
"""

import torch

from qerl.config import Config
from qerl.memory import peak_gib
from qerl.model.packing import Item, pack
from qerl.model.policy import Policy
from qerl.planning.footprint import microbatch_tokens
from qerl.planning.memory_plan import MemoryPlan
from qerl.types import Rollout


def probe_update(config: Config, policy: Policy, plan: MemoryPlan) -> float:
    """Run it. Returns the process' peak in GiB so far; raises what running out of memory raises."""
    prompt_length = plan.place.longest_prompt
    completion_length = config.rollout.max_completion_length
    budget = microbatch_tokens(config, prompt_length, plan.sizes.max_tokens_per_microbatch)
    count = max(1, budget // (prompt_length + completion_length))
    items = [Item(_rollout(i, prompt_length, completion_length), 1.0, 1.0) for i in range(count)]
    microbatches = pack(
        items,
        max_tokens=budget,
        share_prompts=False,
        hidden_size=policy.base.config.hidden_size,
        device=policy.device,
    )
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        logprobs, entropy = policy.logprobs(next(iter(microbatches)), config.rollout.temperature)
        (logprobs.mean() + 0 * entropy.mean()).backward()
    finally:
        for parameter in parameters:
            parameter.grad = None
    return peak_gib(policy.device)


def _rollout(index: int, prompt_length: int, completion_length: int) -> Rollout:
    """Tokens that every vocabulary has."""
    return Rollout(
        problem_id=str(index),
        sample_index=0,
        prompt_ids=(index % 100,) * prompt_length,
        completion_ids=(1,) * completion_length,
        logprobs=(0.0,) * completion_length,
        loss_mask=(True,) * completion_length,
        finish_reason="length",
        version=0,
    )
