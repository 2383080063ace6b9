"""What changes a row as it is loaded: a sparse logit bias, an allowed-token mask, a reduced draft vocabulary."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from specker import checks

WORD_BITS = 32
"""Tokens in a word of an allowed-token mask."""

# Its exponential times a probability stays a float32.
_LARGEST_ON_PROBS = 80.0


class LogitBias(NamedTuple):
    """Values added to single logits before temperature and filters, as a sparse list.

    Duplicates add up. A value of -inf bans its token. On probabilities each value multiplies by its exponential and may
    be 80 at most. On a device, where ids are not looked at, an entry out of range has no effect.

    Example:
        >>> LogitBias(torch.tensor([0, 0]), torch.tensor([3, 5]), torch.tensor([-1.5, float("-inf")])).values
        tensor([-1.5000,    -inf])
    """

    sequence_ids: torch.Tensor
    """`(count,)` int32 or int64, which sequence."""
    token_ids: torch.Tensor
    """`(count,)` int32 or int64, which column of its rows."""
    values: torch.Tensor
    """`(count,)` float32, finite or -inf."""


class Adjustment(NamedTuple):
    """A bias and a mask as the operators take them; None is "off"."""

    bias_offsets: torch.Tensor | None
    """`(batch + 1,)` int64: where each sequence's entries begin and end."""
    bias_token_ids: torch.Tensor | None
    """`(count,)` int64, ascending within a sequence."""
    bias_values: torch.Tensor | None
    """`(count,)` float32."""
    allowed_tokens: torch.Tensor | None
    """`(batch, rows, words)` int32, indexed like the rows themselves; strides of 0 repeat."""


NO_ADJUSTMENT = Adjustment(None, None, None, None)


def bias_operands(
    name: str, bias: LogitBias | None, batch: int, vocab: int, is_probs: bool, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return a bias sorted by sequence and token, with the bounds of each sequence.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, shape or device, or (on the CPU) a value out of range.
    """
    if bias is None:
        return None, None, None
    if not isinstance(bias, LogitBias):
        raise TypeError(f"{name}: expected a LogitBias, got {type(bias).__name__}")
    count = bias.values.shape[0] if isinstance(bias.values, torch.Tensor) and bias.values.dim() == 1 else None
    checks.check_tensor(f"{name}.values", bias.values, (count,), (torch.float32,), device)
    checks.check_index(f"{name}.sequence_ids", bias.sequence_ids, (count,), device)
    checks.check_index(f"{name}.token_ids", bias.token_ids, (count,), device)
    if checks.host_readable(device):
        _check_range(f"{name}.sequence_ids", bias.sequence_ids, batch)
        _check_range(f"{name}.token_ids", bias.token_ids, vocab)
        if bool((torch.isnan(bias.values) | (bias.values == math.inf)).any()):
            raise ValueError(f"{name}.values: expected finite values or -inf, got {bias.values.tolist()}")
        if is_probs and bool((bias.values > _LARGEST_ON_PROBS).any()):
            largest = float(bias.values.max())
            raise ValueError(f"{name}.values: expected at most {_LARGEST_ON_PROBS:g} on probabilities, got {largest:g}")
    inside = (bias.sequence_ids >= 0) & (bias.sequence_ids < batch) & (bias.token_ids >= 0) & (bias.token_ids < vocab)
    # What is out of range sorts behind the last sequence, where no kernel looks.
    key = torch.where(inside, bias.sequence_ids.long() * vocab + bias.token_ids, batch * vocab)
    order = key.argsort(stable=True)
    bounds = torch.arange(batch + 1, device=device) * vocab
    return torch.searchsorted(key[order], bounds), bias.token_ids.long()[order], bias.values[order]


def allowed_operand(
    name: str,
    allowed: torch.Tensor | None,
    batch: int,
    rows: int,
    vocab: int,
    flat: bool,
    device: torch.device,
    *,
    a_row_each: bool = False,
) -> torch.Tensor | None:
    """Return an allowed-token mask as a `(batch, rows, words)` view, whichever of its forms was given.

    Args:
        name: of the argument, for messages.
        allowed: int32, bit `token % 32` of word `token // 32`: `(batch, words)` for all rows of a sequence, or one
            mask a row: `(batch, rows, words)`, in the flat form `(rows, words)`.
        batch: sequences.
        rows: rows of a sequence, in the flat form rows of all sequences.
        vocab: columns of a row; `words * 32` must reach it.
        flat: rows lie behind one another.
        device: of the rows.
        a_row_each: admit one mask a row only; in the flat form the two might not be told apart.

    Raises:
        TypeError, ValueError: it has the wrong dtype, shape, device or strides.
    """
    if allowed is None:
        return None
    words = -(-vocab // WORD_BITS)
    by_row = isinstance(allowed, torch.Tensor) and (
        allowed.dim() == 3 if not flat else a_row_each or allowed.shape[:1] != (batch,)
    )
    shape: tuple[int | None, ...] = (
        (rows, None) if by_row and flat else (batch, rows, None) if by_row else (batch, None)
    )
    mask = checks.check_tensor(name, allowed, shape, (torch.int32,), device)
    if mask.shape[-1] < words:
        raise ValueError(f"{name}: expected at least {words} words of 32 tokens, got shape {tuple(mask.shape)}")
    if mask.stride(-1) != 1 and mask.shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last axis (stride 1), got strides {mask.stride()}")
    if by_row:
        return mask.unsqueeze(0).expand(batch, -1, -1) if flat else mask
    return mask.unsqueeze(1).expand(-1, rows, -1)


def draft_vocabulary_operands(
    draft_to_target_ids: torch.Tensor | None, draft_vocab: int, vocab: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (draft columns, their target ids), ordered by target id, so that a shard of ids is a range.

    Raises:
        TypeError, ValueError: the map has the wrong dtype, shape or device, or (on the CPU) an id out of range.
    """
    if draft_to_target_ids is None:
        return None, None
    ids = checks.check_index("draft_to_target_ids", draft_to_target_ids, (draft_vocab,), device)
    if checks.host_readable(device):
        _check_range("draft_to_target_ids", ids, vocab)
    target_ids, columns = ids.long().sort(stable=True)
    return columns, target_ids


def adjusted(
    rows: torch.Tensor, adjustment: Adjustment, mask_rows: tuple[torch.Tensor, ...], is_probs: bool
) -> torch.Tensor:
    """Return `(batch, positions, vocab)` rows with bias and mask applied: the meaning of an adjustment.

    Entries are added one after another in float32, so that every backend meets the same ties.
    """
    vocab = rows.shape[-1]
    offsets, biased, values_tensor, _ = adjustment
    if offsets is not None and biased is not None and values_tensor is not None:
        rows = rows.float().clone()
        values = (values_tensor.double().exp().float() if is_probs else values_tensor).tolist()
        bounds, token_ids = offsets.tolist(), biased.tolist()
        for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
            for token, value in zip(token_ids[begin:end], values[begin:end], strict=True):
                column = rows[sequence, :, token]
                rows[sequence, :, token] = column * value if is_probs else column + value
    if adjustment.allowed_tokens is not None:
        words = adjustment.allowed_tokens[mask_rows]
        bits = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, device=rows.device)) & 1
        rows = rows.masked_fill(bits.flatten(-2)[..., :vocab] == 0, 0.0 if is_probs else -math.inf)
    return rows


def _check_range(name: str, ids: torch.Tensor, size: int) -> None:
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.numel():
        raise ValueError(f"{name}: expected ids in 0..{size - 1}, got {int(outside[0])}")
