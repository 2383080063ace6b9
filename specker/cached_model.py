"""A causal language model with the key-value cache of the sequences it has read, on any supported transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from specker.slot_cache import SlotPlan, open_cache, select_sequences

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# transformers' attention functions that take a mask with an entry for every query and key.
_MASKED_ATTENTION = ("sdpa", "eager")
# Tokens of a prompt that one masked pass reads at most.
_CHUNK = 512


class CachedModel:
    """A Hugging Face causal language model that reads on from where each sequence stopped, and can take tokens back.

    Args:
        model: a `PreTrainedModel` in evaluation mode whose layers are attention layers.
        role: the word for it in errors, such as "target".
        batch: number of sequences.

    Raises:
        ValueError: the model is in training mode, or keeps a state that cannot be taken back, or its attention cannot
            read sequences of different lengths and batch is above 1.

    Guarantees: each sequence is read at its own positions, whatever the others hold. The cost of sequences of
        different lengths is a mask `(batch, 1, tokens, longest)` a pass and the columns that pad the shorter ones.

    Example:
        >>> cached = CachedModel(target, "target")  # doctest: +SKIP
        >>> logits = cached.advance([[5, 9, 3]])  # doctest: +SKIP
    """

    def __init__(self, model: Any, role: str, batch: int = 1) -> None:
        if model.training:
            raise ValueError(f"{role}: expected a model in evaluation mode, got one in training mode; call .eval()")
        self.model = model
        self.lengths = [0] * batch
        self._parameters = inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        self._kinds, self._window = _attention_kinds(config), int(getattr(config, "sliding_window", None) or 0)
        _check_cache(model, self._kinds, role)
        if batch > 1:
            _check_batch(model, self._kinds, self._parameters, role)
        self._plan = SlotPlan()
        self._cache = open_cache(self._plan)

    def advance(
        self,
        pending: Sequence[Sequence[int]],
        block: torch.Tensor | None = None,
        block_lengths: Sequence[int] | None = None,
        num_logits: int = 1,
    ) -> torch.Tensor:
        """Read the tokens that follow those in the cache.

        Args:
            pending: what each sequence reads first; the lengths may differ.
            block: `(batch, width)` int64, what each reads behind that; None is nothing.
            block_lengths: how many of its columns each sequence reads; None is all.
            num_logits: of how many of the last columns the logits are wanted, at most width + 1.

        Returns:
            `(batch, num_logits, vocab)` in the model's dtype, float64 rounded to float32.
        """
        if len(set(map(len, pending))) > 1 and max(map(len, pending)) > _CHUNK:
            pending = self._read_ahead(pending)
        width = 0 if block is None else block.shape[1]
        lengths = [width] * len(pending) if block_lengths is None else list(block_lengths)
        longest = max(map(len, pending))
        device = self.model.device if block is None else block.device
        arguments: dict[str, Any] = {}
        if len({*zip(self.lengths, map(len, pending), lengths, strict=True)}) == 1 and lengths[0] == width:
            self._plan.write_behind(self.lengths[0], longest + width)
        else:
            arguments = self._ragged(list(map(len, pending)), lengths, longest + width, device)
        # No embedding takes a -1, so padding is read as token 0.
        padded = [[0] * (longest - len(tokens)) + list(tokens) for tokens in pending]
        columns = on_device(padded, device).reshape(len(pending), longest)
        arguments["input_ids"] = columns if block is None else torch.cat([columns, block], dim=1)
        # transformers 5.18 renamed the argument; the model's own signature says which name it has.
        arguments["cache" if "cache" in self._parameters else "past_key_values"] = self._cache
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = num_logits
        logits: torch.Tensor = self.model(**arguments, use_cache=True).logits[:, -num_logits:]
        self.lengths = [
            before + len(tokens) + more for before, tokens, more in zip(self.lengths, pending, lengths, strict=True)
        ]
        return logits.float() if logits.dtype == torch.float64 else logits

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Take back what each sequence holds behind its first `num_tokens`; no effect where it holds fewer."""
        self.lengths = list(map(min, self.lengths, num_tokens))

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences."""
        self.lengths = [self.lengths[row] for row in rows]
        select_sequences(self._cache, rows, self.model.device)

    def _read_ahead(self, pending: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Read long prompts of different lengths in parts, which bounds the mask, and return the last parts."""
        while max(map(len, pending)) > _CHUNK:
            parts = [max(min(len(tokens) - 1, _CHUNK), 0) for tokens in pending]
            self.advance([tokens[:part] for tokens, part in zip(pending, parts, strict=True)])
            pending = [tokens[part:] for tokens, part in zip(pending, parts, strict=True)]
        return pending

    def _ragged(
        self, num_pending: Sequence[int], num_block: Sequence[int], width: int, device: torch.device
    ) -> dict[str, Any]:
        """Plan a pass over sequences that differ, and return the arguments that tell the model about it."""
        longest = max(num_pending)
        ends = list(map(sum, zip(self.lengths, num_pending, num_block, strict=True)))
        table = on_device([self.lengths, num_pending, num_block, ends], device)
        begin, pending, block, end = table[..., None].unbind(0)
        columns = torch.arange(width, device=device)
        # The pending tokens stand right before the blocks, so that all logits wanted are in the last columns.
        padding = longest - pending
        real = (columns >= padding) & (columns < longest + block)
        # Padding stays within positions that the model knows.
        positions = (begin + columns - padding).minimum(end - 1).clamp(min=0)
        self._plan.write_at(positions.where(real, -1), max(ends))
        slots = torch.arange(max(ends), device=device)
        reads = slots <= positions[..., None]
        return {"position_ids": positions, "attention_mask": self._mask(reads, slots, positions)}

    def _mask(self, reads: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return the additive mask in the form that the model's kinds of layers want."""
        masks = {}
        for kind in self._kinds:
            seen = reads & (slots > positions[..., None] - self._window) if kind == _SLIDING else reads
            mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
            masks[kind] = mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)[:, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


def on_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return host integers as an int64 tensor, without making the host wait for a GPU.

    Example:
        >>> on_device([1, 2], torch.device("cpu"))
        tensor([1, 2])
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    # A copy from pageable memory waits for all that the GPU still has to do.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _attention_kinds(config: Any) -> frozenset[str]:
    """Return the kinds of the model's layers in transformers' words."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return frozenset(kinds)
    return frozenset([_SLIDING if getattr(config, "sliding_window", None) is not None else _FULL])


def _check_cache(model: Any, kinds: frozenset[str], role: str) -> None:
    unknown = sorted(kinds - {_FULL, _SLIDING, _CHUNKED})
    if unknown or getattr(model, "_is_stateful", False) or getattr(model.config, "is_encoder_decoder", False):
        what = " and ".join(unknown) or "a state or an encoder"
        raise ValueError(
            f"{role}: expected a decoder of attention layers, whose cache can take tokens back, "
            f"got {type(model).__name__} with {what}"
        )


def _check_batch(model: Any, kinds: frozenset[str], parameters: Any, role: str) -> None:
    """Raise ValueError where a model cannot read sequences of different lengths at their own positions."""
    name = type(model).__name__
    if _CHUNKED in kinds:
        raise ValueError(f"{role}: expected full or sliding-window attention for a batch, got {name} with {_CHUNKED}")
    missing = [argument for argument in ("attention_mask", "position_ids") if argument not in parameters]
    if missing:
        raise ValueError(f"{role}: expected a model that takes {' and '.join(missing)} for a batch, got {name}")
    attention = getattr(model.config, "_attn_implementation", "eager")
    if attention not in _MASKED_ATTENTION:
        raise ValueError(
            f"{role}: expected attention implementation {' or '.join(_MASKED_ATTENTION)} for a batch, got {attention}; "
            "load the model with attn_implementation='sdpa'"
        )


def vocab_size(model: Any) -> int:
    """Return the number of columns of a model's logits.

    Example:
        >>> vocab_size(target)  # doctest: +SKIP
        49152
    """
    return int(model.config.get_text_config().vocab_size)
