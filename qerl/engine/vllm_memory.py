"""Giving vLLM's key/value cache back between rollouts, and taking it again at the same addresses.

With `enable_sleep_mode` vLLM allocates the cache (tag kv_cache) and what it makes while it loads a model (tag weights) in
pools whose pages can be unmapped while their addresses stay, so CUDA graphs survive. Only the cache is unmapped here. The base
is in no pool: it was allocated before the engine started. vLLM's own sleep levels 1 and 2 would unmap both tags.

    vLLM 0.26 to 0.30   the allocator's records are walked; the pages are mapped again by its `wake_up`
    from 0.31           `LLM.release_kv_cache_memory` and `LLM.wake_up(["kv_cache"])` do it

New pages hold arbitrary bytes. Block tables are among them, and attention kernels may multiply a zero probability with an
unused row of the cache, where 0 x NaN is NaN; so everything is zeroed. Read in the source of 0.26 and 0.32; docs/vllm.md says what was run.
"""
# pyright: reportMissingImports=false

import gc
from typing import Any

import torch

TAG = "kv_cache"


def cache_bytes(tag: str = TAG) -> int:
    """Bytes that vLLM's allocator holds under a tag, mapped or not."""
    return sum(data.handle[1] for data in _allocator().pointer_to_data.values() if data.tag == tag)


def release_cache(llm: Any) -> None:
    """Unmap the cache. No request may be running; what was cached is forgotten."""
    llm.sleep(level=0)  # stops scheduling, moves nothing
    torch.cuda.synchronize()
    if hasattr(llm, "release_kv_cache_memory"):
        llm.release_kv_cache_memory()
    else:
        _unmap(llm)
    gc.collect()
    torch.cuda.empty_cache()


def resume_cache(llm: Any) -> None:
    """Map the cache again, empty. What torch keeps but does not use is given to the driver first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if hasattr(llm, "release_kv_cache_memory"):
        llm.wake_up(tags=[TAG])  # resumes scheduling too
    else:
        _allocator().wake_up([TAG])
        llm.wake_up(tags=["scheduling"])
    llm.collective_rpc(_start_empty)


def drop_pools() -> None:
    """After an engine has been shut down: free its pools, or vLLM refuses to start another in this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is None:
        return
    if hasattr(allocator, "release_pools"):  # from 0.31 on
        allocator.release_pools()
    else:
        entries = list(allocator.allocator_and_pools.values())
        allocator.allocator_and_pools.clear()
        pools, allocators = (
            (list(part) for part in zip(*entries, strict=True)) if entries else ([], [])
        )
        entries.clear()
        pools.clear()  # a pool calls its allocator while it ends, so it goes first
        gc.collect()
        allocators.clear()
    torch.cuda.empty_cache()


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def _unmap(llm: Any) -> None:
    """vLLM 0.26 to 0.30: what `release_kv_cache_memory` does later."""
    from vllm.device_allocator.cumem import unmap_and_release

    if not llm.reset_prefix_cache():
        raise RuntimeError("requests are still running")
    for data in _allocator().pointer_to_data.values():
        if data.tag == TAG and not data.is_asleep:
            unmap_and_release(data.handle)
            data.is_asleep = True


def _start_empty(worker: Any) -> None:
    """Zero what has been mapped. Until 0.31 the runner keeps tables of its own there, which it then has to write again."""
    from vllm.device_allocator.cumem import libcudart

    for address, data in _allocator().pointer_to_data.items():
        if data.tag == TAG:
            libcudart.cudaMemset(address, 0, data.handle[1])
    torch.cuda.synchronize()
    if hasattr(worker.model_runner, "post_kv_cache_wake_up"):
        worker.model_runner.post_kv_cache_wake_up()
