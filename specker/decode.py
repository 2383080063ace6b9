"""One round of the decode loop over the sequences that are still running: draft, read, verify, take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specker.cached_model import CachedModel, on_device
from specker.drafts import Conditions, Drafter, Proposal
from specker.processors import process_rows
from specker.rounds import VerifyResult
from specker.stages import StageClock
from specker.status import Status, raise_for_bits
from specker.verify import verify

# A residual without mass is drawn from the target by the verifier: rounding, no fault of the caller's.
FAULTS = ~int(Status.DRAFT_TOKEN_PLACEHOLDER | Status.RESIDUAL_EMPTY)


class Outcome(NamedTuple):
    """What verification made of one sequence's draft; `accept_probs` has one entry a draft token."""

    token_ids: list[int]
    num_accepted: int
    num_drafted: int
    accept_probs: list[float]


class Decoder:
    """The sequences that still run, with the caches of both models.

    Args:
        target: the target's cache.
        drafter: what drafts.
        sequences: the tokens of each prompt; they grow in place by what the caller appends.
        conditions: what the draws depend on.
        clock: counts the time of the stages.

    Example:
        >>> decoder = Decoder(CachedModel(target, "target"), drafter, [[1, 2]], conditions, clock)  # doctest: +SKIP
        >>> decoder.round([4])[0].token_ids  # doctest: +SKIP
        [9, 3]
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter,
        sequences: Sequence[list[int]],
        conditions: Conditions,
        clock: StageClock,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._sequences = list(sequences)
        self._conditions = conditions
        self._clock = clock
        self._batch = len(sequences)
        self.active = list(range(len(sequences)))
        """The numbers of the sequences that still run."""

    def round(self, num_wanted: Sequence[int]) -> list[Outcome]:
        """Run one round over the active sequences; the host waits for the device once, for the outcome.

        Raises:
            InvalidInputError: a row was invalid; nothing of the round is emitted.
        """
        with self._clock.stage("draft"):
            proposal = self._drafter.propose(self._sequences, num_wanted, self._conditions)
        with self._clock.stage("target"):
            width = proposal.token_ids.shape[1]
            # No embedding takes the -1 that stands for a draft token that is missing.
            block, pending = proposal.token_ids.clamp(min=0), self._pending()
            target_logits = self._target.advance(pending, block, proposal.num_tokens, num_logits=width + 1)
        with self._clock.stage("verify"):
            result = self._verify(proposal, target_logits)
            outcomes = self._outcomes(result, proposal)
        kept = [
            len(sequence) + outcome.num_accepted for sequence, outcome in zip(self._sequences, outcomes, strict=True)
        ]
        self._target.keep(kept)
        self._drafter.keep(kept)
        return outcomes

    def retain(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the active sequences alone."""
        self.active = [self.active[row] for row in rows]
        # Nothing is read any more where none is left.
        if rows and len(rows) < len(self._sequences):
            self._target.select(rows)
            self._drafter.select(rows)
            self._conditions = self._conditions.select(rows)
        self._sequences = [self._sequences[row] for row in rows]

    def _pending(self) -> list[list[int]]:
        return [sequence[done:] for sequence, done in zip(self._sequences, self._target.lengths, strict=True)]

    def _verify(self, proposal: Proposal, target_logits: torch.Tensor) -> VerifyResult:
        conditions, device = self._conditions, target_logits.device
        width = proposal.token_ids.shape[1]
        if conditions.processors is not None:
            blocks = [row[:count] for row, count in zip(proposal.token_ids.tolist(), proposal.num_tokens, strict=True)]
            target_logits = process_rows(conditions.processors, target_logits, self._sequences, blocks)
        draft: dict[str, Any] = {}
        if proposal.logits is not None:
            draft = {
                "draft_sampling": conditions.draft_sampling,
                "draft_receipt": proposal.receipt,
                "draft_allowed_tokens": conditions.allowed_tokens if proposal.masked else None,
                "draft_to_target_ids": proposal.draft_to_target_ids,
            }
        ragged = any(count != width for count in proposal.num_tokens)
        return verify(
            proposal.token_ids,
            target_logits,
            proposal.logits,
            num_draft_tokens=on_device(proposal.num_tokens, device) if ragged else None,
            allowed_tokens=conditions.allowed_tokens,
            seed=conditions.seeds,
            position=on_device([len(sequence) for sequence in self._sequences], device),
            return_accept_probs=True,
            **draft,
            **conditions.sampling._asdict(),
        )

    def _outcomes(self, result: VerifyResult, proposal: Proposal) -> list[Outcome]:
        width = proposal.token_ids.shape[1]
        status = result.status | proposal.status
        # One table, so that the host waits once; float64 holds token ids and status bits exactly.
        columns = [torch.stack([result.num_accepted, result.num_emitted, status], dim=1), result.token_ids]
        if result.accept_probs is not None:
            columns.append(result.accept_probs)
        table = torch.cat([column.double() for column in columns], dim=1).tolist()
        if any(int(row[2]) & FAULTS for row in table):
            # The message counts sequences as the caller does.
            numbered = status.new_zeros(self._batch)
            numbered[torch.tensor(self.active, device=status.device)] = status
            raise_for_bits(numbered, FAULTS)
        return [
            Outcome(list(map(int, row[3 : 3 + int(row[1])])), int(row[0]), count, row[4 + width : 4 + width + count])
            for row, count in zip(table, proposal.num_tokens, strict=True)
        ]
