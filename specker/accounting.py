"""Accounting of a decode loop: what each round drafted and emitted, and where the time went."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from specker.stages import StageSeconds


class TokenKind(enum.Enum):
    """Where an emitted token comes from."""

    ACCEPTED = "accepted"
    """A draft token that was kept."""
    RECOVERED = "recovered"
    """Drawn from the residual where the first draft token was rejected."""
    BONUS = "bonus"
    """Drawn from the target after all draft tokens were accepted, or where there were none."""


class TokenBlock(NamedTuple):
    """What one round emitted for one sequence: the argument of the `on_tokens` callback.

    `sequence` is the number of the sequence in the batch; `kinds` has one entry for each of `token_ids`.

    Example:
        >>> block = TokenBlock(0, (17, 4), (TokenKind.ACCEPTED, TokenKind.BONUS))
        >>> [kind.value for kind in block.kinds]
        ['accepted', 'bonus']
    """

    sequence: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]


@dataclasses.dataclass
class SequenceStats:
    """Counters of one sequence.

    A recovered or a bonus token lengthens the output without being an accepted draft, so
    `emitted == accepted + recovered + bonus`. Only tokens in the output count: of a block that ends in an
    end-of-sequence token, the drafts behind it are neither accepted nor rejected.

    Example:
        >>> stats = SequenceStats()
        >>> stats.record(4, [TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.RECOVERED])
        >>> stats.accepted, stats.recovered, stats.acceptance_by_position
        (2, 1, [1.0, 1.0, 0.0, 0.0])
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    emitted: int = 0
    drafted_by_position: list[int] = dataclasses.field(default_factory=list)
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)
    rounds_by_drafted: list[int] = dataclasses.field(default_factory=list)
    """Entry n counts the rounds that drafted n tokens."""
    rounds_by_emitted: list[int] = dataclasses.field(default_factory=list)
    """Entry n counts the rounds that emitted n tokens."""
    expected_accepted: float = 0.0
    """What `accepted` is on average, given the rows: the sum of `VerifyResult.expected_accepted` over the rounds."""
    arrivals: float = 0.0
    """Draft tokens that are decided on average, given the rows: all before them in their block were accepted."""

    def record(self, num_drafted: int, kinds: Sequence[TokenKind], accept_probs: Sequence[float] = ()) -> None:
        """Count one round that drafted `num_drafted` tokens and emitted tokens of these kinds.

        Args:
            num_drafted: draft tokens of the round.
            kinds: of the tokens emitted.
            accept_probs: of each draft token, as `specker.verify(return_accept_probs=True)` gives them.
        """
        num_accepted = kinds.count(TokenKind.ACCEPTED)
        self.rounds += 1
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.recovered += kinds.count(TokenKind.RECOVERED)
        self.bonus += kinds.count(TokenKind.BONUS)
        self.emitted += len(kinds)
        for counts, number in ((self.drafted_by_position, num_drafted), (self.accepted_by_position, num_accepted)):
            counts.extend([0] * (num_drafted - len(counts)))
            counts[:number] = [count + 1 for count in counts[:number]]
        for counts, number in ((self.rounds_by_drafted, num_drafted), (self.rounds_by_emitted, len(kinds))):
            counts.extend([0] * (number + 1 - len(counts)))
            counts[number] += 1
        arrivals, accepted = expected_counts(accept_probs)
        self.arrivals += arrivals
        self.expected_accepted += accepted

    @property
    def overlap(self) -> float | None:
        """Estimated overlap alpha of target and draft, the acceptance of a draft token; None where none was drafted.

        The accept probabilities of the tokens stand for the draws themselves: the same mean with a smaller variance.
        """
        return self.expected_accepted / self.arrivals if self.arrivals else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position in a block, the share of its draft tokens that were accepted."""
        return _shares(self.accepted_by_position, self.drafted_by_position)


class GammaChoice(NamedTuple):
    """One choice of gamma by the cost model.

    `reason` is "explore" while costs are measured, "probe" for a rare look whether drafting pays again, else "model".
    `overlap` is the acceptance estimate; `draft_cost` (a draft token) and `target_cost` (the round's target pass and
    verification) are in units of a round of plain decoding, and `speedup` is what the model expects; None is unknown.
    """

    round: int
    gamma: int
    reason: str
    overlap: float
    draft_cost: float | None
    target_cost: float | None
    speedup: float | None


class GenerationStats(NamedTuple):
    """Counters of a call of `generate`: one `SequenceStats` a sequence, and what the batch shares.

    Properties of the same names are the sums over all sequences.
    """

    sequences: tuple[SequenceStats, ...]
    target_passes: int
    seconds: StageSeconds
    gamma_choices: tuple[GammaChoice, ...] = ()
    """What `gamma="auto"` chose in each round, and why; empty for any other gamma."""

    @property
    def rounds(self) -> int:
        """Rounds of draft, target pass and verification."""
        return sum(stats.rounds for stats in self.sequences)

    @property
    def drafted(self) -> int:
        """Tokens proposed by the draft."""
        return sum(stats.drafted for stats in self.sequences)

    @property
    def accepted(self) -> int:
        """Draft tokens that became output."""
        return sum(stats.accepted for stats in self.sequences)

    @property
    def recovered(self) -> int:
        """Tokens drawn from a residual."""
        return sum(stats.recovered for stats in self.sequences)

    @property
    def bonus(self) -> int:
        """Tokens drawn from the target after all drafts of a round were accepted."""
        return sum(stats.bonus for stats in self.sequences)

    @property
    def emitted(self) -> int:
        """New tokens of the output."""
        return sum(stats.emitted for stats in self.sequences)

    @property
    def expected_accepted(self) -> float:
        """What `accepted` is on average, given the rows."""
        return sum(stats.expected_accepted for stats in self.sequences)

    @property
    def overlap(self) -> float | None:
        """Estimated overlap alpha of target and draft over all sequences; None where nothing was drafted."""
        arrivals = sum(stats.arrivals for stats in self.sequences)
        return self.expected_accepted / arrivals if arrivals else None

    @property
    def accepted_per_round(self) -> float:
        """Mean number of accepted draft tokens of a round."""
        return self.accepted / self.rounds

    @property
    def tokens_per_target_pass(self) -> float:
        """New tokens of all sequences for each pass of the target: 1 a sequence is plain decoding."""
        return self.emitted / self.target_passes

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position in a block, the share of its draft tokens that were accepted, over all sequences."""
        return _shares(
            _add_up([stats.accepted_by_position for stats in self.sequences]),
            _add_up([stats.drafted_by_position for stats in self.sequences]),
        )

    @property
    def rounds_by_drafted(self) -> list[int]:
        """Entry n counts the rounds of all sequences that drafted n tokens."""
        return _add_up([stats.rounds_by_drafted for stats in self.sequences])

    @property
    def rounds_by_emitted(self) -> list[int]:
        """Entry n counts the rounds of all sequences that emitted n tokens."""
        return _add_up([stats.rounds_by_emitted for stats in self.sequences])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers, lists and dictionaries, ready for JSON."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        sequences = [
            {
                **dataclasses.asdict(stats),
                "overlap": stats.overlap,
                "acceptance_by_position": stats.acceptance_by_position,
            }
            for stats in self.sequences
        ]
        return {
            **totals,
            "seconds": {**self.seconds._asdict(), "total": self.seconds.total},
            "sequences": sequences,
            "gamma_choices": [choice._asdict() for choice in self.gamma_choices],
        }


_TOTALS = (
    "rounds", "drafted", "accepted", "recovered", "bonus", "emitted", "target_passes", "tokens_per_target_pass",
    "accepted_per_round", "expected_accepted", "overlap", "acceptance_by_position", "rounds_by_drafted",
    "rounds_by_emitted",
)  # fmt: skip


def expected_counts(accept_probs: Sequence[float]) -> tuple[float, float]:
    """Return how many draft tokens of a block are decided, and how many accepted, on average.

    Example:
        >>> expected_counts([0.5, 0.5])
        (1.5, 0.75)
    """
    arrivals, accepted, survival = 0.0, 0.0, 1.0
    for probability in accept_probs:
        arrivals += survival
        survival *= probability
        accepted += survival
    return arrivals, accepted


def cut_at_eos(token_ids: Sequence[int], eos_token_ids: Collection[int]) -> list[int]:
    """Return the tokens up to and with the first end-of-sequence token.

    Example:
        >>> cut_at_eos([5, 2, 7], {2})
        [5, 2]
    """
    for index, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return list(token_ids[: index + 1])
    return list(token_ids)


def token_kinds(num_emitted: int, num_accepted: int, num_drafted: int) -> tuple[TokenKind, ...]:
    """Return the kinds of the first `num_emitted` tokens of a block, the accepted ones first.

    Example:
        >>> [kind.value for kind in token_kinds(num_emitted=2, num_accepted=1, num_drafted=4)]
        ['accepted', 'recovered']
    """
    last = TokenKind.BONUS if num_accepted == num_drafted else TokenKind.RECOVERED
    return ((TokenKind.ACCEPTED,) * num_accepted + (last,))[:num_emitted]


def _add_up(counts: list[list[int]]) -> list[int]:
    length = max(map(len, counts), default=0)
    return [sum(row[index] for row in counts if index < len(row)) for index in range(length)]


def _shares(counts: list[int], totals: list[int]) -> list[float]:
    return [count / total for count, total in zip(counts, totals, strict=True)]
