"""Drafters without a model: copies from the sequence itself, or from given texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specker.drafts import Conditions, Continuations, PromptLookup, Proposal, point_masses


class LookupDrafter:
    """Proposes what followed the latest earlier occurrence of the last n-gram, longest n-grams first.

    Args:
        lookup: the lengths of the n-grams.
        batch: number of sequences.
        device: where the proposals go.

    Example:
        >>> drafter = LookupDrafter(PromptLookup(), batch=1, device=torch.device("cpu"))
        >>> drafter.propose([[5, 6, 7, 8, 5, 6]], [3]).token_ids.tolist()
        [[7, 8, 5]]
    """

    def __init__(self, lookup: PromptLookup, batch: int, device: torch.device) -> None:
        if not 1 <= lookup.min_ngram <= lookup.max_ngram:
            raise ValueError(
                "prompt lookup: expected 1 <= min_ngram <= max_ngram, "
                f"got min_ngram {lookup.min_ngram} and max_ngram {lookup.max_ngram}"
            )
        self._indices = [_NgramIndex(lookup) for _ in range(batch)]
        self._device = device

    def propose(
        self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int], _conditions: Conditions | None = None
    ) -> Proposal:
        """Copy up to `num_wanted` tokens behind each sequence; none where its last tokens are new."""
        copies = [
            index.continuation(sequence, wanted)
            for index, sequence, wanted in zip(self._indices, sequences, num_wanted, strict=True)
        ]
        return point_masses(copies, self._device)

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Do nothing: the index holds only tokens that were kept."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences."""
        self._indices = [self._indices[row] for row in rows]


class ContinuationDrafter:
    """Proposes the rest of the first given text that agrees with all new tokens of a sequence.

    Args:
        continuations: the texts.
        batch: number of sequences.
        device: where the proposals go.

    Example:
        >>> drafter = ContinuationDrafter(Continuations([[5, 9, 3]]), batch=1, device=torch.device("cpu"))
        >>> drafter.propose([[1, 2]], [2]).token_ids.tolist(), drafter.propose([[1, 2, 5]], [4]).token_ids.tolist()
        ([[5, 9]], [[9, 3]])
    """

    def __init__(self, continuations: Continuations, batch: int, device: torch.device) -> None:
        self._texts = [tuple(text) for text in continuations.token_ids]
        self._device = device
        self._starts: list[int] | None = None
        self._candidates = [list(self._texts) for _ in range(batch)]
        self._checked = [0] * batch

    def propose(
        self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int], _conditions: Conditions | None = None
    ) -> Proposal:
        """Copy up to `num_wanted` tokens behind each sequence; none where no text agrees with it."""
        # The first call comes with the prompts alone.
        self._starts = self._starts or [len(sequence) for sequence in sequences]
        copies = []
        for row, (sequence, wanted) in enumerate(zip(sequences, num_wanted, strict=True)):
            new_tokens = tuple(sequence[self._starts[row] :])
            done, count = self._checked[row], len(new_tokens)
            self._candidates[row] = [
                text for text in self._candidates[row] if text[done:count] == new_tokens[done:] and len(text) > count
            ]
            self._checked[row] = count
            copies.append(self._candidates[row][0][count : count + wanted] if self._candidates[row] else ())
        return point_masses(copies, self._device)

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Do nothing: only tokens that were kept are compared."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences."""
        self._starts = None if self._starts is None else [self._starts[row] for row in rows]
        self._candidates = [self._candidates[row] for row in rows]
        self._checked = [self._checked[row] for row in rows]


class _NgramIndex:
    """What index follows the latest occurrence of each n-gram of a growing sequence; every token is entered once."""

    def __init__(self, lookup: PromptLookup) -> None:
        self._lengths = range(lookup.max_ngram, lookup.min_ngram - 1, -1)
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_entered = 0

    def continuation(self, sequence: Sequence[int], num_wanted: int) -> list[int]:
        # The n-grams that end at the last token are looked for, so they are not entered yet.
        for end in range(self._num_entered + 1, len(sequence)):
            for length in self._lengths:
                if length <= end:
                    self._followers[tuple(sequence[end - length : end])] = end
        self._num_entered = max(self._num_entered, len(sequence) - 1)
        for length in self._lengths:
            follower = self._followers.get(tuple(sequence[-length:]))
            if length <= len(sequence) and follower is not None:
                # The copy may run into itself: a text of period 2 is continued with period 2.
                text = list(sequence)
                for source in range(follower, follower + num_wanted):
                    text.append(text[source])
                return text[len(sequence) :]
        return []
