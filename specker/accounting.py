"""Accounting of a decode loop: what each round drafted and emitted, and where the time went."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch


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


class StageSeconds(NamedTuple):
    """Seconds of a run by stage: drafting, target passes, verification, everything else."""

    draft: float
    target: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self)


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

    def record(self, num_drafted: int, kinds: Sequence[TokenKind]) -> None:
        """Count one round that drafted `num_drafted` tokens and emitted tokens of these kinds."""
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

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position in a block, the share of its draft tokens that were accepted."""
        return _shares(self.accepted_by_position, self.drafted_by_position)


class GenerationStats(NamedTuple):
    """Counters of a call of `generate`: one `SequenceStats` a sequence, and what the batch shares.

    Properties of the same names are the sums over all sequences.
    """

    sequences: tuple[SequenceStats, ...]
    target_passes: int
    seconds: StageSeconds

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


class StageClock:
    """Adds up the time of the stages of a loop, on a GPU without making the host wait.

    Example:
        >>> clock = StageClock(torch.device("cpu"))
        >>> with clock.stage("draft"):
        ...     pass
        >>> clock.seconds().target
        0.0
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = time.perf_counter()
        self._seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the block for the stage "draft", "target" or "verify"."""
        if self._on_gpu:
            # The host runs ahead of a GPU, so the times are taken by the GPU and read at the end.
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_seconds = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin_seconds

    def seconds(self) -> StageSeconds:
        """Return the time of each stage so far; on a GPU waits for it to finish."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total = time.perf_counter() - self._start
        stages = dict(self._seconds)
        for name, begin, end in self._events:
            stages[name] += begin.elapsed_time(end) / 1000
        return StageSeconds(**stages, other=max(total - sum(stages.values()), 0.0))


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
