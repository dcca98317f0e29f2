"""What this process takes of a GPU: all of it, not only what torch's allocator knows.

    process = what the driver lists for it (NVML), or where it is not listed: card's total - free - others
            = CUDA context, code, cuBLAS            (outside torch)
            + what torch's allocator has reserved   (vLLM's pools and CUDA graphs are in it)
            - what is reserved but not mapped       (a key/value cache that was given back keeps its addresses)

torch counts the peak of its own part only. The rest changes slowly, so the peak of the process is torch's peak, less what
was unmapped then, plus the rest as it is when one looks.

A container with process numbers of its own finds no process in the driver's list. There `others` is what other processes held
when this one first looked: what they take or give back later counts as this one's.
"""

import os
from collections.abc import Callable
from functools import cache

import pynvml
import torch

CONTEXT_BYTES = int(0.5 * 2**30)
"""A CUDA context just after it was opened: an estimate until it is measured."""


class CudaMemory:
    """State: how to ask the driver, what is unmapped now, and the highest use so far. One a device: `cuda_memory`."""

    def __init__(self, device: torch.device):
        self.device = device
        free, self.total = torch.cuda.mem_get_info(device)
        own = CONTEXT_BYTES + torch.cuda.memory_reserved(device)
        self.others = max(0, self.total - free - own)
        self.listed = driver_list(device)
        self.unmapped = 0
        self._peak = 0

    def used(self) -> int:
        """Bytes that this process takes now."""
        if self.listed is not None and (listed := self.listed()) is not None:
            return listed
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.total - free - self.others

    def available(self) -> int:
        """Bytes that this process could have in all, what it has among them."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + self.used()

    def peak(self) -> int:
        """Most bytes that this process has taken so far."""
        mapped = torch.cuda.memory_reserved(self.device) - self.unmapped
        outside = self.used() - mapped
        since = torch.cuda.max_memory_reserved(self.device) - self.unmapped + outside
        self._peak = max(self._peak, since)
        return self._peak

    def start_peak(self) -> None:
        """Forget the peak so far: a run counts its own."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._peak = 0

    def set_unmapped(self, num_bytes: int) -> None:
        """Say how much of what torch has reserved is not mapped from now on. Call it while all of it is still mapped."""
        self.peak()
        self.unmapped = num_bytes
        torch.cuda.reset_peak_memory_stats(self.device)

    def limit(self, num_bytes: int, outside: int, unmapped: int) -> bool:
        """Make torch raise an out-of-memory error beyond so many bytes for the process.

        Args:
            num_bytes: the cap on the whole process.
            outside: what to leave for what torch does not count.
            unmapped: the most that will be reserved without being mapped; torch counts it.

        Returns whether that could be done: not where the cap and `unmapped` are more than the card has.
        """
        share = (num_bytes - outside + unmapped) / self.total
        if share > 1:
            return False
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        return True


def driver_list(device: torch.device) -> Callable[[], int | None] | None:
    """A function that returns the bytes listed for this process by the driver; None if it is not in the list.

    This process must have opened its CUDA context on the device.
    """
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (
        pynvml.NVMLError,
        AttributeError,
    ):  # no NVML (WSL, some containers), or a part of a card
        return None

    def listed() -> int | None:
        try:
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            return None
        found = (p.usedGpuMemory for p in processes if p.pid == os.getpid())
        return next(found, None)

    # Another namespace's process could have this number; it would hardly have this memory.
    now = listed()
    return listed if now is not None and now >= torch.cuda.memory_reserved(device) else None


@cache
def _cuda_memory(index: int) -> CudaMemory:
    return CudaMemory(torch.device("cuda", index))


def cuda_memory(device: torch.device) -> CudaMemory:
    """The account of a device; the first call fixes what others hold."""
    return _cuda_memory(torch.cuda.current_device() if device.index is None else device.index)
