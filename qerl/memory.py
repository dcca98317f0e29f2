"""How much memory and disk there is and how much this process takes, in GiB.

On CUDA all that this process takes of the card (qerl.cuda_memory) and what others leave of it. On the CPU, from Linux's /proc: anonymous memory (RssAnon: tensors and heap, without files
that are only mapped and can be dropped) now, and the highest resident size so far (VmHWM, mapped files included).
A container's limit counts like a smaller machine.
"""

import ctypes
import shutil
from pathlib import Path

import torch

from qerl.cuda_memory import cuda_memory

GIB = 2**30
_KIB_PER_GIB = 2**20
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""(limit, use) of the container, for version 2 and 1 of Linux's control groups."""


M_MMAP_THRESHOLD = -3
"""glibc's malloc.h"""
MMAP_BYTES = 2**20


def return_freed_memory() -> None:
    """Make the C library give every freed tensor of 1 MiB or more back to the system; for training on the CPU.

    glibc otherwise keeps such blocks in its heap, where the ones that backward still needs lie between free ones: an
    update of SmolLM2 with 3,000 tokens peaked at 8.3 GiB instead of 4.5. The price is about 5 % of CPU time, for pages
    are mapped anew. Nothing happens where the C library has no such setting (musl, macOS).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """`memory/current_gib` and `memory/peak_gib` of this process on the device, since its start."""
    return {"memory/current_gib": current_gib(device), "memory/peak_gib": peak_gib(device)}


def current_gib(device: torch.device) -> float:
    """What this process takes now."""
    if device.type == "cuda":
        return cuda_memory(device).used() / GIB
    return _proc_kib("/proc/self/status", "RssAnon") / _KIB_PER_GIB


def peak_gib(device: torch.device) -> float:
    """The most this process has taken so far."""
    if device.type == "cuda":
        return cuda_memory(device).peak() / GIB
    return _proc_kib("/proc/self/status", "VmHWM") / _KIB_PER_GIB


def free_gib(device: torch.device) -> float:
    """What can still be taken on the device; on CUDA with what this process already has."""
    if device.type == "cuda":
        return cuda_memory(device).available() / GIB
    free = _proc_kib("/proc/meminfo", "MemAvailable") / _KIB_PER_GIB
    container = _container_bytes()
    return free if container is None else min(free, (container[0] - container[1]) / GIB)


def total_gib(device: torch.device) -> float:
    """What the device has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1] / GIB
    total = _proc_kib("/proc/meminfo", "MemTotal") / _KIB_PER_GIB
    container = _container_bytes()
    return total if container is None else min(total, container[0] / GIB)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that memory ran out: torch's, Python's, or the CUDA driver's own words."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return True
        if "cuda error: out of memory" in str(found).lower():  # vLLM's pool maps pages by itself
            return True
        found = found.__cause__ or found.__context__
    return False


def free_disk_gib(path: Path) -> float:
    """Free space on the disk that holds `path`, or will hold it."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free / GIB


def _proc_kib(file: str, field: str) -> int:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise ValueError(f"{file} has no {field}")


def _container_bytes() -> tuple[int, int] | None:
    """(limit, use) in bytes, file cache not counted as use; None without a limit."""
    for limit_file, use_file in _CGROUPS:
        limit = Path(limit_file)
        if limit.exists() and (text := limit.read_text().strip()).isdecimal():
            use = int(Path(use_file).read_text())
            stat = dict(
                line.split() for line in limit.with_name("memory.stat").read_text().splitlines()
            )
            return int(text), use - int(stat["inactive_file"])
    return None
