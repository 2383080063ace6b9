"""The drafter that draws its tokens from a causal language model, and the choice of drafter for a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specker import checks
from specker.cached_model import CachedModel, on_device, vocab_size
from specker.drafts import (
    Conditions,
    Continuations,
    Drafter,
    EarlyExit,
    ModelDraft,
    PromptLookup,
    Proposal,
    SkipLayers,
    point_masses,
)
from specker.layers import num_layers, skip_layers
from specker.lookup import ContinuationDrafter, LookupDrafter
from specker.processors import process_rows
from specker.sample import DraftReceipt, SampleResult, sample
from specker.sampling import Sampling
from specker.status import Status

_ARG_MAX = Sampling(temperature=0.0)


class ModelDrafter:
    """Draws draft tokens from a causal language model, one pass each.

    Args:
        draft: the model and what is special about it.
        vocab: columns of the target's logits.
        batch: number of sequences.

    Raises:
        ValueError: the vocabularies do not fit.

    Example:
        >>> drafter = ModelDrafter(ModelDraft(model), vocab=32, batch=1)  # doctest: +SKIP
        >>> drafter.propose([[1, 2, 3]], [4], Conditions(Sampling(), seeds)).token_ids.shape  # doctest: +SKIP
        torch.Size([1, 4])
    """

    def __init__(self, draft: ModelDraft, vocab: int, batch: int) -> None:
        self._cached = CachedModel(draft.model, "draft", batch)
        self._greedy = draft.greedy
        self._vocab = vocab
        self._target_ids = _target_ids(draft, vocab)
        self._own_ids = _own_ids(draft, vocab, self._target_ids)
        if draft.greedy:
            # Scalars are made once for all calls, and those made in inference mode would be of no use outside it.
            checks.check_parameters(_ARG_MAX, batch, vocab, draft.model.device)

    def propose(
        self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int], conditions: Conditions
    ) -> Proposal:
        """Draw `num_wanted` tokens behind each sequence."""
        device, num_tokens = conditions.seeds.device, max(num_wanted)
        if num_tokens == 0:
            return point_masses([[] for _ in sequences], device)
        lengths = on_device([len(sequence) for sequence in sequences], device)
        pending = [
            self._readable(sequence[done:]) for sequence, done in zip(sequences, self._cached.lengths, strict=True)
        ]
        nothing: list[list[int]] = [[] for _ in sequences]
        rows, draws = [], []
        token_ids: list[torch.Tensor] = []
        block = None
        for step in range(num_tokens):
            row = self._columns(self._cached.advance(nothing if step else pending, block)[:, 0])
            if conditions.processors is not None and self._target_ids is None:
                drafted = torch.stack(token_ids, dim=1).tolist() if step else nothing
                texts = [[*sequence, *more] for sequence, more in zip(sequences, drafted, strict=True)]
                row = process_rows(conditions.processors, row[:, None], texts, nothing)[:, 0]
            draw = self._draw(row, lengths + step, conditions)
            rows.append(row)
            draws.append(draw)
            # An invalid row gives -1, which no table takes; its status reaches the caller.
            column = draw.token_ids.clamp(min=0)
            token_ids.append(draw.token_ids if self._target_ids is None else self._target_ids[column])
            block = (column if self._own_ids is None else self._own_ids[token_ids[-1]])[:, None]
        return self._proposal(rows, draws, token_ids, num_wanted, masked=self._masks(conditions))

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Take back what the cache holds behind the first `num_tokens` of each sequence."""
        self._cached.keep(num_tokens)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences."""
        self._cached.select(rows)

    def _columns(self, row: torch.Tensor) -> torch.Tensor:
        """Return the columns that name tokens of the target."""
        if self._target_ids is None:
            return row[:, : self._vocab]
        if row.shape[-1] != len(self._target_ids):
            raise ValueError(
                f"draft_to_target_ids: expected one id for each of {row.shape[-1]} draft columns, "
                f"got {len(self._target_ids)}"
            )
        return row

    def _draw(self, row: torch.Tensor, position: torch.Tensor, conditions: Conditions) -> SampleResult:
        sampling = _ARG_MAX if self._greedy else conditions.draft_sampling or conditions.sampling
        allowed = conditions.allowed_tokens if self._masks(conditions) else None
        return sample(row, seed=conditions.seeds, position=position, allowed_tokens=allowed, **sampling._asdict())

    def _masks(self, conditions: Conditions) -> bool:
        # The mask counts in target ids; a draft that counts otherwise proposes freely, and the verifier rejects.
        return conditions.allowed_tokens is not None and self._target_ids is None

    def _readable(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._own_ids is None:
            return token_ids
        return self._own_ids[torch.tensor(token_ids, dtype=torch.int64, device=self._own_ids.device)].tolist()

    def _proposal(
        self,
        rows: list[torch.Tensor],
        draws: list[SampleResult],
        token_ids: list[torch.Tensor],
        num_wanted: Sequence[int],
        *,
        masked: bool,
    ) -> Proposal:
        # sample() knows a row that fails as its target; here it is the draft's.
        failed = torch.stack([draw.status for draw in draws]).ne(0).any(dim=0)
        status = failed.to(torch.int32) * int(Status.DRAFT_INVALID)
        proposal = Proposal(torch.stack(token_ids, dim=1), list(num_wanted), status)
        if self._greedy:
            return proposal
        return proposal._replace(
            logits=torch.stack(rows, dim=1),
            receipt=DraftReceipt.stack([draw.receipt for draw in draws]),
            draft_to_target_ids=self._target_ids,
            masked=masked,
        )


def open_drafter(draft: Any, target: Any, batch: int) -> Drafter:
    """Return the drafter for what a caller names as draft.

    Args:
        draft: `PromptLookup`, `Continuations`, `SkipLayers`, `EarlyExit`, `ModelDraft` or a causal language model.
        target: the model whose tokens are drafted.
        batch: number of sequences.

    Raises:
        TypeError: draft is none of these.
        ValueError: the vocabularies or devices of draft and target do not fit.

    Example:
        >>> type(open_drafter(PromptLookup(), target, 1)).__name__  # doctest: +SKIP
        'LookupDrafter'
    """
    if isinstance(draft, PromptLookup):
        return LookupDrafter(draft, batch, target.device)
    if isinstance(draft, Continuations):
        return ContinuationDrafter(draft, batch, target.device)
    if isinstance(draft, EarlyExit):
        draft = SkipLayers(tuple(range(_exit_layer(draft, target), num_layers(target))))
    if isinstance(draft, SkipLayers):
        draft = ModelDraft(skip_layers(target, draft.layers))
    if isinstance(draft, torch.nn.Module):
        draft = ModelDraft(draft)
    if not isinstance(draft, ModelDraft) or not isinstance(draft.model, torch.nn.Module):
        given = draft.model if isinstance(draft, ModelDraft) else draft
        raise TypeError(
            "draft: expected a model, ModelDraft, SkipLayers, EarlyExit, PromptLookup or Continuations, "
            f"got {type(given).__name__}"
        )
    if draft.model.device != target.device:
        raise ValueError(f"draft: expected a model on {target.device} like the target, got one on {draft.model.device}")
    return ModelDrafter(draft, vocab_size(target), batch)


def _exit_layer(draft: EarlyExit, target: Any) -> int:
    if not 1 <= draft.num_layers <= num_layers(target):
        raise ValueError(f"early exit: expected a number of layers in 1..{num_layers(target)}, got {draft.num_layers}")
    return draft.num_layers


def _target_ids(draft: ModelDraft, vocab: int) -> torch.Tensor | None:
    """Return the target id of each draft column, None where the columns are the target's."""
    own_vocab = vocab_size(draft.model)
    if draft.draft_to_target_ids is not None:
        ids = draft.draft_to_target_ids
        if draft.padded_vocabulary:
            raise ValueError("padded_vocabulary: expected False with draft_to_target_ids, got True")
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
            raise ValueError(
                "draft_to_target_ids: expected a one-dimensional int64 tensor that is not empty, "
                f"got shape {tuple(ids.shape)} {ids.dtype}"
            )
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(
                f"draft_to_target_ids: expected ids in 0..{vocab - 1}, got {int(ids.min())}..{int(ids.max())}"
            )
        return ids.to(draft.model.device)
    if own_vocab != vocab and not draft.padded_vocabulary:
        raise ValueError(
            f"draft: expected the target's vocabulary of {vocab} tokens, got {own_vocab}; for models that number the "
            "same tokens alike ModelDraft(model, padded_vocabulary=True)"
        )
    # Columns beyond the target's are cut off, missing ones need the map.
    return torch.arange(own_vocab, device=draft.model.device) if own_vocab < vocab else None


def _own_ids(draft: ModelDraft, vocab: int, target_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Return the draft's id of each target id, None where the draft reads target ids as they are."""
    if target_ids is None or draft.model.get_input_embeddings().num_embeddings >= vocab:
        return None
    columns = torch.arange(len(target_ids), device=target_ids.device)
    # Of several columns with one target id the first reads it.
    own_ids = torch.full((vocab,), vocab, device=target_ids.device).scatter_reduce(0, target_ids, columns, "amin")
    return own_ids.where(own_ids < vocab, draft.unknown_token_id)
