"""`deterministic`: a run on a GPU repeats its numbers bit for bit, and a resumed run equals the uninterrupted one.

A CPU does so anyway. On a GPU the order of a sum may depend on which thread block ends first, on a candidate kernel that was
a little faster this time, and on how large batches are. With the setting:

    Humming, in the engine    no split of K (`use_batch_invariant`, qerl.kernels.gemm)
    torch, in the trainer     deterministic algorithms only; what has none raises. Flash attention's backward asks the same flag
                              (2.11 and 2.13: `_flash_attention_backward` in attention_backward.cu)
    cuBLAS                    CUBLAS_WORKSPACE_CONFIG: a workspace of its own for every stream
    compiled code, both       reductions are chosen by rule instead of by timing candidates (Inductor's `deterministic`)
    sizes                     from `memory_gib` alone, not from what other processes leave free

vLLM runs without torch's flag, which would refuse operators of its that are only slow or never reached; its scheduler looks at
no clock (read in 0.26 and 0.32), so the same requests meet in the same batches. What is not promised: that a sample's numbers
are the same in another batch, on another card, or with other versions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from qerl.config import Config
from qerl.errors import UserError

if TYPE_CHECKING:
    from qerl.planning.memory_plan import MemoryPlan

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""The settings that torch takes for deterministic; 8 buffers of 4 MiB, or of 16 KiB"""


def needs_determinism(config: Config, device_type: str) -> bool:
    """Whether anything has to be done for `deterministic` on this type of device."""
    return config.deterministic and device_type == "cuda"


def prepare_determinism(config: Config, plan: "MemoryPlan") -> None:
    """Check that the promise can be kept, and set cuBLAS's workspace; must run before cuBLAS is first used.

    Raises UserError on a GPU for the transformers engine, for sizes that depend on other processes, and for a
    CUBLAS_WORKSPACE_CONFIG that is not deterministic.
    """
    if not needs_determinism(config, plan.place.device_type):
        return
    if plan.place.engine != "vllm":
        raise UserError(
            f"deterministic on a GPU needs engine=vllm, not {plan.place.engine}: torch's cumulative sum, which that engine "
            "samples with, has no fixed order there"
        )
    if plan.budget.gib != config.memory_gib:
        raise UserError(
            "deterministic on a GPU needs memory_gib, at most what is free: from it follow batch sizes, and from these the "
            f"order of sums; the plan has {plan.budget.gib:.1f} GiB, {plan.budget.reason}"
        )
    workspace = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise UserError(
            f"deterministic needs {CUBLAS_VARIABLE} to be {' or '.join(CUBLAS_WORKSPACES)}, not {workspace!r}: unset it"
        )


@contextmanager
def torch_determinism(*, algorithms: bool, compiled: bool) -> Iterator[None]:
    """Whether torch's operators (`algorithms`) and the code it compiles (`compiled`) repeat themselves inside.

    Afterwards all is as it was. New memory is not filled, as torch would do to make the use of garbage repeatable too.
    """
    from torch._inductor import config as inductor

    memory: Any = (
        torch.utils.deterministic
    )  # its attribute is a property of the module, which type checkers miss
    before = (
        torch.are_deterministic_algorithms_enabled(),
        inductor.deterministic,
        memory.fill_uninitialized_memory,
    )

    def set_to(algorithms: bool, compiled: bool, fill: bool) -> None:
        torch.use_deterministic_algorithms(algorithms)  # sets Inductor's too
        inductor.deterministic = compiled
        memory.fill_uninitialized_memory = fill

    set_to(algorithms, compiled, False)
    try:
        yield
    finally:
        set_to(*before)
