"""The distribution a row is sampled from, in eager float64: temperature, top-k, top-p, min-p, in this order.

Every filter keeps a set {id : value >= threshold}, so tokens tied at a threshold are all kept and the set depends on
the row's values alone. This sorts the row; the kernels find the same thresholds without sorting.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specker.sampling import GREEDY_TEMPERATURE


class Distribution(NamedTuple):
    """Rows of a sampling distribution; `probs` of an invalid row is all zero."""

    probs: torch.Tensor
    """`(..., vocab)` float64, normalised."""
    valid: torch.Tensor
    """`(...)` bool: the row holds no NaN, no +inf (no negative entry for probabilities) and some mass."""
    argmax: torch.Tensor
    """`(...)` int64, lowest id of the largest value."""
    row_max: torch.Tensor
    """`(...)` float64, largest value."""
    threshold: torch.Tensor
    """`(...)` float64: an id is kept iff its value >= threshold."""
    weight_sum: torch.Tensor
    """`(...)` float64, sum of the kept exp((value - row_max) / temperature)."""


def greedy_rows(temperature: torch.Tensor, top_p: torch.Tensor | None) -> torch.Tensor:
    """Return which sequences take the arg-max: temperature < 1e-5 or top_p <= 0."""
    # In float64, so that a float32 temperature falls on the same side of the bound in every backend.
    greedy = temperature.double() < GREEDY_TEMPERATURE
    return greedy if top_p is None else greedy | (top_p <= 0)


def distribution(
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    is_probs: bool,
) -> Distribution:
    """Return the distribution that each row is sampled from.

    Equivalent to, for one unfiltered row of logits:

        probs = torch.softmax(logits.double() / temperature, dim=-1)

    Args:
        rows: `(..., vocab)` logits or, with `is_probs`, non-negative weights; any float dtype.
        temperature, top_k, top_p, min_p: broadcastable to `rows.shape[:-1]`; None is "off".
        is_probs: the values are probabilities, that is, their own exponentials.
    """
    values, valid = _validated(rows, is_probs)
    row_max = values.amax(dim=-1, keepdim=True)
    ids = torch.arange(values.shape[-1], device=values.device)
    argmax = torch.where(values == row_max, ids, values.shape[-1]).amin(dim=-1)
    greedy = greedy_rows(temperature, top_p)
    divisor = torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    weights = (values / row_max) ** (1 / divisor) if is_probs else torch.exp((values - row_max) / divisor)
    threshold = _filter_threshold(values, weights, divisor, top_k, top_p, min_p, is_probs)
    kept = torch.where(values >= threshold, weights, 0.0)
    one_hot = (ids == argmax.unsqueeze(-1)).to(torch.float64)
    kept = torch.where(greedy.unsqueeze(-1), one_hot, kept)
    weight_sum = kept.sum(dim=-1, keepdim=True)
    probs = torch.where(valid.unsqueeze(-1), kept / weight_sum, 0.0)
    threshold = torch.where(greedy.unsqueeze(-1), row_max, threshold)
    return Distribution(
        probs,
        valid,
        argmax,
        row_max.squeeze(-1),
        threshold.expand_as(row_max).squeeze(-1),
        weight_sum.squeeze(-1),
    )


def _validated(rows: torch.Tensor, is_probs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = rows.to(torch.float64)
    finite = torch.isfinite(values)
    if is_probs:
        valid = (finite & (values >= 0)).all(dim=-1) & (values > 0).any(dim=-1)
    else:
        valid = (finite | (values == -math.inf)).all(dim=-1) & finite.any(dim=-1)
    # A harmless row stands in for an invalid one, so that no NaN is computed with.
    return torch.where(valid.unsqueeze(-1), values, 1.0), valid


def _filter_threshold(
    values: torch.Tensor,
    weights: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    is_probs: bool,
) -> torch.Tensor:
    vocab = values.shape[-1]
    row_max = values.amax(dim=-1, keepdim=True)
    threshold = torch.full_like(row_max, -math.inf)
    descending = values.sort(dim=-1, descending=True).values if top_k is not None or top_p is not None else values
    if top_k is not None:
        count = torch.where(top_k <= 0, vocab, top_k).clamp(max=vocab).expand(values.shape[:-1]).unsqueeze(-1)
        threshold = torch.where(count < vocab, descending.gather(-1, count - 1), threshold)
    if top_p is not None:
        kept = torch.where(values >= threshold, weights, 0.0).sort(dim=-1, descending=True).values
        mass = kept.cumsum(dim=-1)
        wanted = top_p.unsqueeze(-1)
        # The first prefix of the sorted row whose mass reaches top_p; rounding may leave none short of the end.
        size = (mass < wanted * mass[..., -1:]).sum(dim=-1, keepdim=True).clamp(max=vocab - 1)
        nucleus = torch.maximum(descending.gather(-1, size), threshold)
        threshold = torch.where(wanted < 1, nucleus, threshold)
    if min_p is not None:
        floor = min_p.unsqueeze(-1)
        share = row_max * floor**temperature if is_probs else row_max + temperature * floor.log()
        threshold = torch.where(floor > 0, torch.maximum(threshold, share), threshold)
    return threshold
