"""Part of the model without its activations: forward keeps the input, backward computes the rest again.

Two things are gained over `torch.utils.checkpoint`, which keeps a graph of what it recomputes:

* The product of a layer's last matrix is not needed a second time: its gradients depend on its input only. It is left out
  (`is_recomputing`), which saves 29 % of the recomputation of a 32B layer, a tenth of all products of a step.
* A part that treats tokens one by one, the MLP, runs in tiles of `TILE_TOKENS`. Inside a layer that is recomputed this costs
  no second recomputation, for the tiles make their own when backward reaches them.

What is kept may lie in host memory (offload.py).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl.model.offload import HostStore

TILE_TOKENS = 8192
"""Most tokens of one tile: large enough that expanding the matrices anew for each one is a small part of its products"""


class _State(threading.local):
    recomputing = False


_state = _State()


def is_recomputing() -> bool:
    """Whether what runs now is run again by backward: only what gradients need is used, so a last product is not."""
    return _state.recomputing


@contextmanager
def _recomputing() -> Iterator[None]:
    before, _state.recomputing = _state.recomputing, True
    try:
        yield
    finally:
        _state.recomputing = before


class _Recomputed(torch.autograd.Function):
    """x [..., T, H], parameters -> [..., T, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Callable[[Tensor], Tensor],
        tile_tokens: int | None,
        store: HostStore | None,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.part, ctx.tile_tokens, ctx.store = part, tile_tokens, store
        if store is None:
            ctx.save_for_backward(x, *parameters)
        else:
            ctx.place = store.put(x)
            ctx.save_for_backward(None, *parameters)
        if is_recomputing():
            return torch.empty_like(x)
        tiles = _tiles(x, tile_tokens)
        return part(x) if len(tiles) == 1 else torch.cat([part(tile) for tile in tiles], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, *parameters = ctx.saved_tensors
        x = kept if ctx.store is None else ctx.store.take(ctx.place)
        wants_x = ctx.needs_input_grad[3]
        grad_x = torch.empty_like(x) if wants_x else None
        totals: list[Tensor] = []
        start = 0
        tiles = _tiles(x, ctx.tile_tokens), _tiles(grad, ctx.tile_tokens)
        for tile, grad_tile in zip(*tiles, strict=True):
            leaf = tile.detach().requires_grad_(wants_x)
            with torch.enable_grad(), _recomputing():
                output = ctx.part(leaf)
            found = list(
                torch.autograd.grad(output, [*([leaf] if wants_x else []), *parameters], grad_tile)
            )
            if grad_x is not None:
                grad_x.narrow(-2, start, tile.shape[-2]).copy_(found.pop(0))
            start += tile.shape[-2]
            if totals:
                for total, more in zip(totals, found, strict=True):
                    total.add_(more)
            else:
                totals = found
        return None, None, None, grad_x, *totals


def _tiles(x: Tensor, tile_tokens: int | None) -> tuple[Tensor, ...]:
    return (x,) if tile_tokens is None else x.split(tile_tokens, dim=-2)


def recomputed(
    part: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: Sequence[Tensor],
    *,
    tile_tokens: int | None = None,
    store: HostStore | None = None,
) -> Tensor:
    """part(x), of which backward keeps x only.

    Args:
        part: keeps the shape; whatever it is given besides x and `parameters` gets no gradient.
        x: [..., T, H].
        parameters: what `part` uses that is trained; every one of them must take part.
        tile_tokens: run `part`, which must treat tokens one by one, on so many at a time.
        store: keep x there instead of on the device.
    """
    return cast(Tensor, _Recomputed.apply(part, tile_tokens, store, x, *parameters))
