"""How many tokens to draft: a number, a schedule, or the choice of the cost model from what the rounds measure."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from specker.accounting import GammaChoice, SequenceStats, expected_counts
from specker.theory.cost import best_gamma, speedup

_LOG = logging.getLogger(__name__)
# Rounds of each kind, plain and drafting, before the model is trusted; no more than so many in all.
_EXPLORED, _MOST_EXPLORED = 3, 12
_REMEMBERED = 16


class AutoGamma(NamedTuple):
    """Choose gamma in every round by the cost model: the most tokens a second, and 0 where drafting does not pay.

    The first rounds alternate between plain decoding and drafting to measure what each costs; the acceptance is a
    running mean of accept probabilities for each sequence. With `target_cost` and `draft_cost` given, nothing is
    measured, and the choice depends on the texts alone.

    Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", section 3.

    Example:
        >>> AutoGamma(max_gamma=6).max_gamma
        6
    """

    max_gamma: int = 8
    target_cost: Sequence[float] | None = None
    """Cost of a round's target pass and verification for gamma 0, 1, ..., max_gamma, in units of gamma 0."""
    draft_cost: float | None = None
    """Cost of one draft token in the same unit."""
    memory: float = 0.98
    """Weight of a round's acceptance relative to that of the round after it, in (0, 1]."""
    probe_every: int = 64
    """After so many rounds without a draft one token is drafted, to see whether that pays again; 0 is never."""


Gamma: TypeAlias = "int | Sequence[int] | torch.Tensor | Callable[[SequenceStats], int] | AutoGamma | Literal['auto']"
"""Draft tokens a round: for all sequences, for each, from a sequence's counters before the round, or by cost."""


class RoundRecord(NamedTuple):
    """What a round was: the sequences in it, what each drafted and its accept probabilities, and the seconds."""

    sequences: Sequence[int]
    accept_probs: Sequence[Sequence[float]]
    """One entry a draft token."""
    draft_seconds: float
    pass_seconds: float
    """Of the target's pass and the verification."""
    reads_prompt: bool
    """Whether the pass read more than a round's tokens, so that its seconds say nothing about the next."""


class Policy(Protocol):
    """What the decode loop asks before and tells behind each round."""

    choices: list[GammaChoice]
    measures: bool
    """Whether `observe` wants to be called."""

    def choose(self, sequences: Sequence[int], stats: Sequence[SequenceStats], /) -> list[int]:
        """Return the draft tokens wanted for each of these sequences; `stats` has one entry for each."""

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round."""


class Scheduled:
    """A gamma for each sequence that does not depend on costs: fixed, or from its counters.

    Example:
        >>> Scheduled([2, 5]).choose([1], [SequenceStats()])
        [5]
    """

    measures = False

    def __init__(self, gammas: Sequence[int] | Callable[[SequenceStats], int]) -> None:
        self.choices: list[GammaChoice] = []
        self._gammas = gammas

    def choose(self, sequences: Sequence[int], stats: Sequence[SequenceStats], /) -> list[int]:
        """Return the gamma of each sequence."""
        if not callable(self._gammas):
            return [self._gammas[sequence] for sequence in sequences]
        return [_checked(self._gammas(counters)) for counters in stats]

    def observe(self, record: RoundRecord) -> None:
        """Do nothing."""


class CostModelPolicy:
    """The running estimates behind `AutoGamma`, and its choice.

    One gamma serves the whole batch, since a pass is as wide as its longest block.

    Example:
        >>> policy = CostModelPolicy(AutoGamma(target_cost=[1.0, 1.1, 1.3], draft_cost=0.1, max_gamma=2), batch=1)
        >>> policy.choose([0], [SequenceStats()])
        [1]
    """

    measures = True

    def __init__(self, settings: AutoGamma, batch: int) -> None:
        self.choices: list[GammaChoice] = []
        self._settings = settings
        # As if a tenth of a draft token had been seen, accepted by half: what is measured outweighs it at once.
        self._arrivals, self._accepted = [0.1] * batch, [0.05] * batch
        self._pass_seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._draft_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_plain, self._num_drafting, self._num_explored, self._num_idle = 0, 0, 0, 0

    def choose(self, sequences: Sequence[int], _stats: Sequence[SequenceStats], /) -> list[int]:
        """Return the gamma with the largest expected speed-up, the same for all these sequences."""
        alphas = [self._accepted[sequence] / self._arrivals[sequence] for sequence in sequences]
        overlap = statistics.fmean(alphas)
        exploring = self._exploring()
        if exploring is not None:
            self._num_explored += 1
            choice = GammaChoice(len(self.choices), exploring, "explore", overlap, None, None, None)
        else:
            choice = self._by_cost(alphas, overlap, len(sequences))
        self._num_idle = 0 if choice.gamma else self._num_idle + 1
        self.choices.append(choice)
        _LOG.debug("%s", choice)
        return [choice.gamma] * len(sequences)

    def observe(self, record: RoundRecord) -> None:
        """Take in the acceptance and the seconds of a round."""
        for sequence, accept_probs in zip(record.sequences, record.accept_probs, strict=True):
            if accept_probs:
                arrivals, accepted = expected_counts(accept_probs)
                self._arrivals[sequence] = self._settings.memory * self._arrivals[sequence] + arrivals
                self._accepted[sequence] = self._settings.memory * self._accepted[sequence] + accepted
        drafted = max(map(len, record.accept_probs))
        if record.reads_prompt:
            return
        self._pass_seconds[len(record.sequences) * (drafted + 1)].append(record.pass_seconds)
        if drafted:
            self._num_drafting += 1
            self._draft_seconds.append(record.draft_seconds / drafted)
        else:
            self._num_plain += 1

    def _exploring(self) -> int | None:
        """Return the gamma to try out, None where the costs are known or stay unknown for want of drafts."""
        if self._settings.target_cost is not None:
            return None
        wide, enough = max(self._settings.max_gamma // 2, 1), self._num_explored >= _MOST_EXPLORED
        if self._num_drafting < _EXPLORED and (not enough or not self._num_drafting):
            return wide if self._num_drafting <= self._num_plain else 0
        return 0 if self._num_plain < _EXPLORED and (not enough or not self._num_plain) else None

    def _by_cost(self, alphas: Sequence[float], overlap: float, active: int) -> GammaChoice:
        limit = self._settings.max_gamma
        draft_cost, target_cost = self._costs(active)
        survivals = [statistics.fmean(alpha**count for alpha in alphas) for count in range(limit + 1)]
        # The mean over the sequences, as one acceptance a position.
        by_position = [after / before if before else 0.0 for before, after in itertools.pairwise(survivals)]
        best = best_gamma(by_position, draft_cost, target_cost=target_cost, max_gamma=limit)
        gamma, reason, gain = best.gamma, "model", best.speedup
        if gamma == 0 and 0 < self._settings.probe_every <= self._num_idle:
            gamma, reason = 1, "probe"
            gain = speedup(by_position, draft_cost, 1, target_cost=target_cost)
        return GammaChoice(len(self.choices), gamma, reason, overlap, draft_cost, target_cost[gamma], gain)

    def _costs(self, active: int) -> tuple[float, list[float]]:
        """Return the cost of a draft token and of the target's pass for each gamma, relative to plain decoding."""
        if self._settings.target_cost is not None and self._settings.draft_cost is not None:
            return self._settings.draft_cost, list(self._settings.target_cost)
        medians = sorted((tokens, statistics.median(seconds)) for tokens, seconds in self._pass_seconds.items())
        seconds = [_on_line(medians, active * (gamma + 1)) for gamma in range(self._settings.max_gamma + 1)]
        return statistics.median(self._draft_seconds) / seconds[0], [value / seconds[0] for value in seconds]


def open_policy(gamma: Any, batch: int) -> Policy:
    """Return the policy for what a caller names as gamma.

    Raises:
        TypeError: it is none of the kinds of `Gamma`.
        ValueError: a number is out of range, or there is not one a sequence.

    Example:
        >>> open_policy(3, batch=2).choose([0, 1], [SequenceStats(), SequenceStats()])
        [3, 3]
    """
    if gamma == "auto" if isinstance(gamma, str) else isinstance(gamma, AutoGamma):
        settings = AutoGamma() if isinstance(gamma, str) else gamma
        _check_auto(settings)
        return CostModelPolicy(settings, batch)
    if callable(gamma) and not isinstance(gamma, torch.Tensor):
        return Scheduled(gamma)
    if isinstance(gamma, str):
        raise TypeError(f"gamma: expected a number, one a sequence, a schedule, AutoGamma or 'auto', got {gamma!r}")
    values = gamma.tolist() if isinstance(gamma, torch.Tensor) else gamma
    gammas = list(values) if isinstance(values, (list, tuple)) else [values] * batch
    if len(gammas) != batch:
        raise ValueError(f"gamma: expected one number or {batch}, one a sequence, got {len(gammas)}")
    return Scheduled(list(map(_checked, gammas)))


def _checked(gamma: Any) -> int:
    if isinstance(gamma, bool) or not isinstance(gamma, int):
        raise TypeError(
            f"gamma: expected a number, one a sequence, a schedule, AutoGamma or 'auto', got {type(gamma).__name__}"
        )
    if gamma < 0:
        raise ValueError(f"gamma: expected a number >= 0, got {gamma}")
    return gamma


def _check_auto(settings: AutoGamma) -> None:
    if settings.max_gamma < 1:
        raise ValueError(f"max_gamma: expected a number >= 1, got {settings.max_gamma}")
    if not 0.0 < settings.memory <= 1.0:
        raise ValueError(f"memory: expected a number in (0, 1], got {settings.memory}")
    if (settings.target_cost is None) != (settings.draft_cost is None):
        raise ValueError("target_cost and draft_cost: expected both or none, got one of them")
    if settings.target_cost is not None and len(settings.target_cost) <= settings.max_gamma:
        raise ValueError(
            f"target_cost: expected {settings.max_gamma + 1} entries for gamma 0..{settings.max_gamma}, "
            f"got {len(settings.target_cost)}"
        )


def _on_line(points: Sequence[tuple[int, float]], place: int) -> float:
    """Return the value at `place` of the line through the nearest two points; never below their smallest value."""
    nearest = sorted(sorted(points, key=lambda point: abs(point[0] - place))[:2])
    if len(nearest) == 1 or nearest[0][0] == place:
        return nearest[0][1]
    (left, low), (right, high) = nearest
    # A wider pass that was measured quicker was measured badly.
    slope = max(high - low, 0.0) / (right - left)
    return max(low + slope * (place - left), min(low, high))
