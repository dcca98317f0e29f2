"""A key/value cache whose rows are right-padded, so that prefill is the trainer's packed forward.

Prefill stores each prompt's keys and values once; `spread` copies a prompt's row to its samples; each decode step
writes one token a row at that row's own position. transformers' attention modules call `update` and nothing else.
"""

import torch
from torch import Tensor

from qerl.model.attention import PackedLayout, pad


class KVCache:
    """State: one [rows, kv_heads, capacity, head_dim] pair a layer, and how many tokens each row holds."""

    def __init__(self, num_layers: int, layout: PackedLayout, lengths: Tensor, num_new_tokens: int):
        self.keys: list[Tensor] = [torch.empty(0)] * num_layers
        self.values: list[Tensor] = [torch.empty(0)] * num_layers
        self.prefill_layout: PackedLayout | None = layout
        self.lengths = lengths
        self.num_new_tokens = num_new_tokens

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return what attention should see: the same in prefill, all so far in decoding.

        Prefill: [1, kv_heads, T, D] packed. Decoding: [rows, kv_heads, 1, D].
        """
        if self.prefill_layout is not None:
            self.keys[layer] = pad(key[0].transpose(0, 1), self.prefill_layout)
            self.values[layer] = pad(value[0].transpose(0, 1), self.prefill_layout)
            return key, value
        rows = torch.arange(key.shape[0], device=key.device)
        self.keys[layer][rows, :, self.lengths] = key[:, :, 0]
        self.values[layer][rows, :, self.lengths] = value[:, :, 0]
        seen = self.num_seen
        return self.keys[layer][:, :, :seen], self.values[layer][:, :, :seen]

    def spread(self, row_of_sample: Tensor) -> None:
        """End prefill: row i becomes a copy of prompt row `row_of_sample[i]`, with room for the new tokens."""
        self.prefill_layout = None
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                heads, length, head_dim = tensor.shape[1:]
                rows = tensor.new_zeros(
                    len(row_of_sample), heads, length + self.num_new_tokens, head_dim
                )
                rows[:, :, :length] = tensor.index_select(0, row_of_sample)
                tensors[layer] = rows
        self.lengths = self.lengths[row_of_sample]
        self.begin_step()

    def begin_step(self) -> None:
        """Fix how far this decode step looks: up to and with the token that it adds."""
        self.num_seen = int(self.lengths.max()) + 1

    def mask(self) -> Tensor:
        """[rows, 1, 1, num_seen] bool: the tokens a row holds and the one it is about to add."""
        places = torch.arange(self.num_seen, device=self.lengths.device)
        return (places <= self.lengths[:, None])[:, None, None]

    def end_step(self) -> None:
        """Count the token that every row has added."""
        self.lengths = self.lengths + 1

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor.index_select(0, rows)
        self.lengths = self.lengths[rows]
