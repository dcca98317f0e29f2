"""Inputs of recomputed layers in the host's memory while backward does not need them yet.

A layer's input is [T, H] in bf16: 32,768 tokens of a 32B model are 335 MB a layer and 21 GB in all. Each is copied to
page-locked memory while the following layers compute, and back while the layers behind it are differentiated; a copy of
335 MB takes about 7 ms, the layer's products several times that. The host's blocks are made once and serve every microbatch.

    forward   put(x)     the copy starts; memory of an earlier input is free again
    backward  take(i)    waits for x, and lets the copy of input i - 1 start

Copies run on a stream of their own. Tensors belong to the stream that computes, which waits for a copy before it gives
memory away and before it reads what arrived. Without CUDA, where it saves nothing, the copies are made at once.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 16 * 2**20
"""Host memory is taken in such blocks: torch rounds page-locked memory up to a power of two"""
MAX_LEAVING = 2
"""Copies to the host that may be under way; their tensors are still on the device"""


def host_bytes(num_tensors: int, tensor_bytes: int) -> int:
    """Host memory that so many tensors take, in whole blocks."""
    return num_tensors * -(-tensor_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class _Copy:
    """A tensor on the device that is copied from or to the host, until `done`."""

    tensor: Tensor
    done: torch.cuda.Event | None


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: so many bytes from the start of these blocks on."""

    shape: torch.Size
    dtype: torch.dtype
    blocks: range


class HostStore:
    """State: the host's blocks, what lies in them, and the copies under way. Used by one microbatch at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks: list[Tensor] = []
        self._stored: list[_Stored] = []
        self._leaving: deque[_Copy] = deque()
        self._arriving: dict[int, _Copy] = {}

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return sum(block.nbytes for block in self._blocks)

    def start(self) -> None:
        """A new microbatch: its first tensor goes to place 0."""
        self._settle()
        while self._arriving:  # of a backward that was never finished
            self._wait(self._arriving.popitem()[1])
        self._stored.clear()

    def put(self, x: Tensor) -> int:
        """Start copying x, of any shape, to the host; returns its place."""
        place = len(self._stored)
        stored = _Stored(x.shape, x.dtype, self._room_for(x.nbytes))
        self._stored.append(stored)
        while len(self._leaving) >= MAX_LEAVING:
            self._wait(self._leaving.popleft())
        x = x.detach().contiguous()
        with self._copying():
            for block, part in self._parts(stored, x):
                block.copy_(part, non_blocking=True)
            self._leaving.append(self._copy(x))
        return place

    def take(self, place: int) -> Tensor:
        """The tensor of a place, on the device again; the one before it starts to come."""
        self._settle()
        wanted = self._arriving.pop(place, None) or self._fetch(place)
        if place > 0:
            self._arriving[place - 1] = self._fetch(place - 1)
        self._wait(wanted)
        return wanted.tensor

    def _fetch(self, place: int) -> _Copy:
        stored = self._stored[place]
        x = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        with self._copying():
            for block, part in self._parts(stored, x):
                part.copy_(block, non_blocking=True)
            return self._copy(x)

    def _room_for(self, num_bytes: int) -> range:
        """The next free blocks, made if they are not there yet."""
        first = self._stored[-1].blocks.stop if self._stored else 0
        last = first + -(-num_bytes // BLOCK_BYTES)
        while len(self._blocks) < last:
            on_gpu = self.stream is not None
            self._blocks.append(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=on_gpu))
        return range(first, last)

    def _parts(self, stored: _Stored, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of equal length: bytes of a block, bytes of x."""
        parts = x.view(-1).view(torch.uint8).split(BLOCK_BYTES)
        return [
            (self._blocks[i][: part.numel()], part)
            for i, part in zip(stored.blocks, parts, strict=True)
        ]

    def _settle(self) -> None:
        """Make the computing stream wait for all copies to the host: their tensors' memory may then be used again."""
        while self._leaving:
            self._wait(self._leaving.popleft())

    def _copying(self) -> AbstractContextManager[object]:
        """What is done inside runs on the copies' stream, after all that has been launched so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def _copy(self, tensor: Tensor) -> _Copy:
        if self.stream is None:
            return _Copy(tensor, None)
        done = torch.cuda.Event()
        done.record(self.stream)
        return _Copy(tensor, done)

    def _wait(self, copy: _Copy) -> None:
        if copy.done is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.done)
