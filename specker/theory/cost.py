"""The cost model of speculative decoding: expected tokens a round, speed-up, best gamma, break-even.

Acceptance is one number (every position alike) or a sequence (one number a position, given that all before
it were accepted). Costs are in units of one target pass over one row.

Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", section 3.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Number = float | Fraction
Acceptance = Number | Sequence[Number]
"""Probability that a draft token is accepted: one for every position, or one a position."""
Rows = npt.ArrayLike | Sequence[Fraction]
"""Probabilities, the vocabulary last."""


class BestGamma(NamedTuple):
    """The gamma with the largest speed-up, and that speed-up; gamma 0 means that drafting does not pay."""

    gamma: int
    speedup: float


def overlap(target: Rows, draft: Rows) -> npt.NDArray[Any]:
    """Return the acceptance probability of a draft token: the mass that two distributions share.

    Equivalent to `torch.minimum(target, draft).sum(-1)`.

    Args:
        target: `(..., vocab)` probabilities; arrays of `fractions.Fraction` stay exact.
        draft: likewise, same shape.

    Example:
        >>> round(float(overlap([0.3, 0.4, 0.3], [0.6, 0.3, 0.1])), 6)
        0.7
    """
    shared: npt.NDArray[Any] = np.minimum(np.asarray(target), np.asarray(draft)).sum(axis=-1)
    return shared


def survival(alpha: Acceptance, gamma: int) -> list[Number]:
    """Return the probabilities that the first 0, 1, ..., gamma draft tokens are all accepted.

    Args:
        alpha: in [0, 1]; a sequence needs at least gamma entries.
        gamma: draft tokens a round, at least 0.

    Raises:
        ValueError: for a gamma below 0 or beyond a sequence, or an alpha outside [0, 1].

    Example:
        >>> survival(0.5, 3)
        [1, 0.5, 0.25, 0.125]
    """
    if gamma < 0:
        raise ValueError(f"gamma: expected at least 0, got {gamma}")
    return list(itertools.accumulate([1, *_by_position(alpha, gamma)], operator.mul))


def num_accepted_law(alpha: Acceptance, gamma: int) -> list[Number]:
    """Return the probabilities that a round accepts exactly 0, 1, ..., gamma draft tokens.

    Raises:
        ValueError: as survival does.

    Example:
        >>> num_accepted_law(0.5, 2)
        [0.5, 0.25, 0.25]
    """
    surviving = survival(alpha, gamma)
    return [before - after for before, after in itertools.pairwise(surviving)] + surviving[-1:]


def expected_accepted(alpha: Acceptance, gamma: int) -> Number:
    """Return the expected number of accepted draft tokens of a round: the sum of alpha**k for k = 1..gamma.

    Raises:
        ValueError: as survival does.

    Example:
        >>> expected_accepted(0.5, 2)
        0.75
    """
    return sum(survival(alpha, gamma)[1:])


def expected_tokens(alpha: Acceptance, gamma: int) -> Number:
    """Return the expected number of tokens a round emits: the accepted ones and one recovered or bonus token.

    Raises:
        ValueError: as survival does.

    Example:
        >>> expected_tokens(0.5, 2)
        1.75
    """
    return 1 + expected_accepted(alpha, gamma)


def speedup(alpha: Acceptance, draft_cost: float, gamma: int, *, target_cost: Sequence[float] | None = None) -> float:
    """Return the speed relative to plain decoding: expected tokens over the cost of a round.

    Equivalent to `expected_tokens(alpha, gamma) / (target_cost[gamma] + draft_cost * gamma)`.

    Args:
        alpha: acceptance, one number or one a position.
        draft_cost: one draft step over one target pass of one row, at least 0.
        gamma: draft tokens a round.
        target_cost: cost of a target pass over 1, 2, ... rows relative to one row, so entry 0 is 1 and entry
            gamma is the pass of a round; None for the textbook's constant 1.

    Raises:
        ValueError: for a negative draft_cost, a target_cost too short or not above 0, or as survival does.

    Example:
        >>> round(speedup(0.7, 0.1, 4), 4)
        1.9808
    """
    return float(expected_tokens(alpha, gamma)) / _round_cost(draft_cost, gamma, target_cost)


def best_gamma(
    alpha: Acceptance,
    draft_cost: float,
    *,
    target_cost: Sequence[float] | None = None,
    max_gamma: int | None = None,
) -> BestGamma:
    """Return the gamma with the largest speed-up, the smallest among equals; 0 where drafting does not pay.

    Args:
        alpha: acceptance, one number or one a position.
        draft_cost: as in speedup.
        target_cost: as in speedup.
        max_gamma: largest gamma looked at; None for all that alpha and target_cost cover, or for all there
            are where neither is a sequence.

    Raises:
        ValueError: where no gamma is the largest (alpha 1 or draft_cost 0, no sequence, no max_gamma).

    Example:
        >>> best_gamma(0.7, 0.1).gamma
        4
    """
    limit = _covered_gamma(alpha, draft_cost, target_cost) if max_gamma is None else max_gamma
    tokens = itertools.accumulate(survival(alpha, limit))
    speedups = [float(expected) / _round_cost(draft_cost, gamma, target_cost) for gamma, expected in enumerate(tokens)]
    return BestGamma(int(np.argmax(speedups)), max(speedups))


def break_even(draft_cost: float, *, target_cost: Sequence[float] | None = None) -> float:
    """Return the acceptance above which one draft token a round is faster than plain decoding.

    With the textbook's constant target cost it is draft_cost itself, and below it no other gamma pays either.

    Raises:
        ValueError: for a target_cost with no entry for gamma 1.

    Example:
        >>> round(break_even(0.1), 6)
        0.1
    """
    return draft_cost if target_cost is None else _round_cost(draft_cost, 1, target_cost) - 1.0


def _by_position(alpha: Acceptance, gamma: int) -> list[Number]:
    positions = [alpha] * gamma if isinstance(alpha, (int, float, Fraction)) else list(alpha[:gamma])
    if len(positions) < gamma:
        raise ValueError(f"alpha: expected {gamma} positions, got {len(positions)}")
    for value in positions:
        if not 0 <= value <= 1:
            raise ValueError(f"alpha: expected values in [0, 1], got {value}")
    return positions


def _round_cost(draft_cost: float, gamma: int, target_cost: Sequence[float] | None) -> float:
    if not draft_cost >= 0.0:
        raise ValueError(f"draft_cost: expected at least 0, got {draft_cost}")
    if target_cost is None:
        return 1.0 + draft_cost * gamma
    if len(target_cost) <= gamma:
        raise ValueError(f"target_cost: expected an entry for gamma {gamma}, got {len(target_cost)} entries")
    if not target_cost[gamma] > 0.0:
        raise ValueError(f"target_cost: expected entries above 0, got {target_cost[gamma]}")
    return float(target_cost[gamma]) + draft_cost * gamma


def _covered_gamma(alpha: Acceptance, draft_cost: float, target_cost: Sequence[float] | None) -> int:
    measured = [] if target_cost is None else [len(target_cost) - 1]
    if not isinstance(alpha, (int, float, Fraction)):
        return min([len(alpha), *measured])
    if measured:
        return measured[0]
    if draft_cost == 0.0 or alpha == 1:
        raise ValueError(f"max_gamma: expected a number for alpha {alpha} and draft_cost {draft_cost}, got None")
    # A round emits fewer than 1 / (1 - alpha) tokens on average: at this gamma it costs more than it emits.
    return int(alpha / (1 - alpha) / draft_cost) + 1
