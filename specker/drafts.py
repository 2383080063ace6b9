"""Kinds of drafts: another model, the target with layers skipped, prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from specker.cached_model import CachedModel, skip_layers, vocab_size
from specker.sample import DraftReceipt, sample
from specker.sampling import Sampling
from specker.status import Status


class PromptLookup(NamedTuple):
    """Draft by copying: what followed the latest earlier occurrence of the last few tokens.

    The proposals are certain, point masses to the verifier, and cost no model pass. Good for text that repeats its
    prompt: edits, summaries with quotations, code.

    Source: Saxena 2023, "Prompt Lookup Decoding".

    Example:
        >>> PromptLookup(max_ngram=3)
        PromptLookup(max_ngram=3, min_ngram=1)
    """

    max_ngram: int = 3
    min_ngram: int = 1


class SkipLayers(NamedTuple):
    """Draft with the target itself, some of its layers left out; its weights are shared.

    Source: Zhang et al. 2023, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
    Decoding".

    Example:
        >>> SkipLayers(layers=(3, 17))
        SkipLayers(layers=(3, 17))
    """

    layers: tuple[int, ...]


class Proposal(NamedTuple):
    """Draft tokens for one round.

    `token_ids (batch, gamma)` int64, of which the first `num_draft_tokens (batch,)` of each row count. `logits
    (batch, gamma, vocab)` and `receipt` are those the tokens were drawn with, None for point masses. `status
    (batch,)` int32 has a bit set where drafting met an invalid row.
    """

    token_ids: torch.Tensor
    num_draft_tokens: torch.Tensor
    logits: torch.Tensor | None
    receipt: DraftReceipt | None
    status: torch.Tensor


class Drafter(Protocol):
    """What the decode loop asks of a draft."""

    def propose(self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int]) -> Proposal:
        """Propose up to `num_wanted` tokens behind each sequence."""

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Forget everything behind the first `num_tokens` of each sequence."""


class ModelDrafter:
    """Draws draft tokens from a causal language model, one pass each.

    Args:
        model: a `PreTrainedModel` with the target's vocabulary.
        sampling: temperature and filters to draw with.
        seeds: `(batch,)` int64, the stream of each sequence.

    Example:
        >>> drafter = ModelDrafter(draft, Sampling(), torch.tensor([7]))  # doctest: +SKIP
        >>> drafter.propose([[1, 2, 3]], [4]).token_ids.shape  # doctest: +SKIP
        torch.Size([1, 4])
    """

    def __init__(self, model: Any, sampling: Sampling, seeds: torch.Tensor) -> None:
        self._cached = CachedModel(model, "draft")
        self._sampling = sampling
        self._seeds = seeds

    def propose(self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int]) -> Proposal:
        """Draw `num_wanted` tokens behind each sequence."""
        device, num_tokens = self._seeds.device, max(num_wanted)
        if num_tokens == 0:
            return no_proposal(len(sequences), device)
        rows, draws = [], []
        unread = torch.tensor([sequence[self._cached.num_cached :] for sequence in sequences], device=device)
        for step in range(num_tokens):
            position = torch.tensor([len(sequence) + step for sequence in sequences], device=device)
            row = self._cached.advance(unread, num_logits=1)[:, 0]
            draw = sample(row, seed=self._seeds, position=position, **self._sampling._asdict())
            rows.append(row)
            draws.append(draw)
            # An invalid row gives -1, which no embedding takes; its status reaches the caller.
            unread = draw.token_ids.clamp(min=0)[:, None]
        # sample() knows a row that fails as its target; here it is the draft's.
        failed = torch.stack([draw.status for draw in draws]).ne(0).any(dim=0)
        return Proposal(
            token_ids=torch.stack([draw.token_ids for draw in draws], dim=1),
            num_draft_tokens=torch.tensor(list(num_wanted), device=device),
            logits=torch.stack(rows, dim=1),
            receipt=DraftReceipt.stack([draw.receipt for draw in draws]),
            status=failed.to(torch.int32) * int(Status.DRAFT_INVALID),
        )

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Take back what the cache holds behind the first `num_tokens` of each sequence."""
        self._cached.keep(min(num_tokens))


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

    def propose(self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int]) -> Proposal:
        """Copy up to `num_wanted` tokens behind each sequence; none where its last tokens are new."""
        copies = [
            index.continuation(sequence, wanted)
            for index, sequence, wanted in zip(self._indices, sequences, num_wanted, strict=True)
        ]
        width = max(map(len, copies))
        return no_proposal(len(sequences), self._device)._replace(
            token_ids=torch.tensor(
                [copy + [-1] * (width - len(copy)) for copy in copies], dtype=torch.int64, device=self._device
            ),
            num_draft_tokens=torch.tensor([len(copy) for copy in copies], device=self._device),
        )

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Do nothing: the index holds only tokens that were kept."""


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


def no_proposal(batch: int, device: torch.device) -> Proposal:
    """Return a proposal without draft tokens.

    Example:
        >>> no_proposal(2, torch.device("cpu")).token_ids.shape
        torch.Size([2, 0])
    """
    return Proposal(
        token_ids=torch.empty((batch, 0), dtype=torch.int64, device=device),
        num_draft_tokens=torch.zeros(batch, dtype=torch.int64, device=device),
        logits=None,
        receipt=None,
        status=torch.zeros(batch, dtype=torch.int32, device=device),
    )


def open_drafter(draft: Any, target: Any, sampling: Sampling, seeds: torch.Tensor) -> Drafter:
    """Return the drafter for what a caller names as draft.

    Args:
        draft: `PromptLookup`, `SkipLayers` or a causal language model with the target's vocabulary.
        target: the model whose tokens are drafted.
        sampling: temperature and filters to draw with.
        seeds: `(batch,)` int64 on the target's device.

    Raises:
        TypeError: draft is none of these.
        ValueError: the vocabularies or devices of draft and target differ.

    Example:
        >>> type(open_drafter(PromptLookup(), None, Sampling(), torch.tensor([7]))).__name__
        'LookupDrafter'
    """
    if isinstance(draft, PromptLookup):
        return LookupDrafter(draft, seeds.shape[0], seeds.device)
    if isinstance(draft, SkipLayers):
        return ModelDrafter(skip_layers(target, draft.layers), sampling, seeds)
    if not isinstance(draft, torch.nn.Module):
        raise TypeError(f"draft: expected a model, PromptLookup or SkipLayers, got {type(draft).__name__}")
    if vocab_size(draft) != vocab_size(target):
        raise ValueError(
            f"draft: expected the target's vocabulary of {vocab_size(target)} tokens, got {vocab_size(draft)}"
        )
    if draft.device != target.device:
        raise ValueError(f"draft: expected a model on {target.device} like the target, got one on {draft.device}")
    return ModelDrafter(draft, sampling, seeds)
