"""A key-value cache in which the slot of a token is its position, so that taking tokens back moves nothing.

Sequences that accept different numbers of draft tokens grow apart. Here every sequence keeps its keys and values at
its own positions 0, 1, 2, ... of one buffer: a rejected token's slot is simply written again in the next pass, and what
lies behind a sequence's end is masked out. There are no holes to close and nothing to realign, and the buffer grows by
half from time to time where transformers' own cache is copied in every pass.

What it costs, measured by `python -m bench.bench_cache` (eight sequences behind 200 tokens, five tokens each, a model
of 135 million parameters on one thread): a pass over sequences of different lengths took 0.93 to 1.05 times as long as
one with transformers' own cache over equal lengths, which is the noise of the machine; shifting the sequences to a
common end after every pass took 1.17 to 1.26 times as long.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch

_SPARE_SLOTS = 64


class SlotPlan:
    """Where the tokens of the next pass are written, shared by all layers of one cache.

    `start`: slot of the first token, where all sequences are equally long. `end`: slots that attention reads.
    `slots (batch, width)`: the slot of each token where the sequences differ, -1 for padding; else None.

    Example:
        >>> SlotPlan().end
        0
    """

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self.slots: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None

    def write_behind(self, start: int, width: int) -> None:
        """Write `width` tokens of every sequence from slot `start` on."""
        self.start, self.end, self.slots, self.rows = start, start + width, None, None

    def write_at(self, slots: torch.Tensor, end: int) -> None:
        """Write each token at its own slot, and let attention read the first `end` slots."""
        self.start, self.end, self.slots = 0, end, slots
        self.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]


class SlotLayer:
    """Keys and values of one layer, `(batch, heads, slots, dim)` each, with the methods of transformers' layers."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, plan: SlotPlan) -> None:
        self.plan = plan
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.is_initialized = False

    def lazy_initialization(self, *_states: torch.Tensor) -> None:
        """Do nothing: the buffers are made when they are first written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens into their slots and return the part that attention reads."""
        self.keys = self._write(self.keys, key_states)
        self.values = self._write(self.values, value_states)
        self.is_initialized = True
        return self.keys[:, :, : self.plan.end], self.values[:, :, : self.plan.end]

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these sequences."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_seq_length(self, *_args: Any) -> int:
        """Return how many tokens lie before the next pass."""
        return self.plan.start

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Return how many slots a pass over `query` tokens reads (a count, or before 5.0 their positions), and 0."""
        return self.plan.start + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """Return -1: there is no longest length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1: there is no longest length."""
        return -1

    def _write(self, buffer: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        buffer = self._grown(buffer, states)
        if self.plan.slots is None:
            buffer[:, :, self.plan.start : self.plan.end] = states
        else:
            # Padding goes to the last slot, which is never read.
            buffer[self.plan.rows, :, self.plan.slots] = states.transpose(1, 2)
        return buffer

    def _grown(self, buffer: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        capacity = 0 if buffer is None else buffer.shape[2]
        if buffer is not None and self.plan.end < capacity:
            return buffer
        # Zeros, because attention multiplies the masked slots too, and NaN times nothing is NaN.
        capacity = max(self.plan.end + _SPARE_SLOTS, capacity * 3 // 2)
        grown = states.new_zeros((*states.shape[:2], capacity, states.shape[3]))
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown


def open_cache(plan: SlotPlan) -> Any:
    """Return an empty transformers `Cache` whose layers follow the plan.

    Example:
        >>> len(open_cache(SlotPlan()))  # doctest: +SKIP
        0
    """
    layer = _layer_class()
    return importlib.import_module("transformers.cache_utils").Cache(layer_class_to_replicate=lambda: layer(plan))


def select_sequences(cache: Any, rows: Sequence[int], device: torch.device) -> None:
    """Keep only these sequences of a cache that `open_cache` made.

    Example:
        >>> select_sequences(cache, [0, 2], torch.device("cpu"))  # doctest: +SKIP
    """
    kept = torch.tensor(rows, dtype=torch.int64, device=device)
    for layer in cache.layers:
        layer.select(kept)


@functools.cache
def _layer_class() -> type[SlotLayer]:
    # transformers asks for its own base class, and importing that is left until a model is there.
    base = importlib.import_module("transformers.cache_utils").CacheLayerMixin
    return type("SlotCacheLayer", (SlotLayer, base), {})
