"""Where the rows of every sequence lie, so that the reference reads padded and flat inputs alike."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specker import random
from specker.status import Status


class Layout(NamedTuple):
    """Index tuples into the inputs, one entry a (sequence, position)."""

    batch: int
    draft_token_ids: torch.Tensor
    target_rows: tuple[torch.Tensor, ...]
    draft_rows: tuple[torch.Tensor, ...]
    uniform_rows: tuple[torch.Tensor, ...]
    receipt_rows: tuple[torch.Tensor, ...]
    target_mask_rows: tuple[torch.Tensor, ...]
    draft_mask_rows: tuple[torch.Tensor, ...]
    drafted: torch.Tensor
    length: torch.Tensor
    num_rows: torch.Tensor
    """Target rows of each sequence: its length, and the bonus row where there is one."""
    status: torch.Tensor


def make_layout(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    num_draft_tokens: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    draft_index: torch.Tensor | None,
    gamma: int,
) -> Layout:
    """Return the rows of every (sequence, position); what lies past a sequence's length decides nothing."""
    device = target.device
    positions = torch.arange(gamma + 1, device=device)
    if cu_num_draft_tokens is None:
        batch = draft_token_ids.shape[0]
        length = torch.full((batch,), gamma, device=device) if num_draft_tokens is None else num_draft_tokens.long()
        good = (length >= 0) & (length <= gamma)
        start = torch.zeros(batch, dtype=torch.int64, device=device)
    else:
        batch = cu_num_draft_tokens.shape[0] - 1
        bounds = cu_num_draft_tokens.long()
        start, length = bounds[:-1], bounds.diff()
        good = (length >= 0) & (length <= gamma) & (start >= 0) & (bounds[1:] <= draft_token_ids.shape[0])
        good &= (torch.arange(batch, device=device) > 0) | (start == 0)
    status = torch.where(good, 0, int(Status.INVALID_NUM_DRAFT_TOKENS)).to(torch.int32)
    length, start = torch.where(good, length, 0), torch.where(good, start, 0)
    sequence = torch.arange(batch, device=device).unsqueeze(-1)
    # A flat target may have one row a draft token and no bonus rows.
    has_bonus_rows = cu_num_draft_tokens is None or target.shape[0] != draft_token_ids.shape[0]
    num_rows = length + int(has_bonus_rows)
    # A position past the rows reads the sequence's own first rows again: its values decide nothing.
    inside = torch.where(positions < num_rows.unsqueeze(-1), positions, 0)
    drafted = positions[:-1] < length.unsqueeze(-1)
    inside_draft = torch.where(drafted, positions[:-1], 0)
    slot = sequence
    if draft_index is not None and draft is not None:
        in_range = (draft_index >= 0) & (draft_index < draft.shape[0])
        status = torch.where(in_range, status, status | Status.INVALID_DRAFT_INDEX)
        slot = torch.where(in_range, draft_index.long(), 0).unsqueeze(-1)
    rows: tuple[tuple[torch.Tensor, ...], ...]
    masks: tuple[tuple[torch.Tensor, ...], ...]
    if cu_num_draft_tokens is None:
        tokens = draft_token_ids.long()
        rows = ((sequence, inside), (slot, inside_draft), (sequence, inside), (sequence, inside_draft))
        masks = ((sequence, inside), (sequence, inside_draft))
    else:
        flat_draft = (start.unsqueeze(-1) + inside_draft).clamp(max=max(draft_token_ids.shape[0] - 1, 0))
        flat_target = start.unsqueeze(-1) + (num_rows - length).unsqueeze(-1) * sequence + inside
        # A sequence without rows of its own may stand behind the last one.
        flat_target = flat_target.clamp(max=max(target.shape[0] - 1, 0))
        tokens = draft_token_ids.long()[flat_draft] if draft_token_ids.shape[0] else torch.zeros_like(flat_draft)
        by_slot = draft is not None and draft.dim() == 3
        draft_rows = (slot, inside_draft) if by_slot else (flat_draft,)
        rows = ((flat_target,), draft_rows, (flat_target,), (flat_draft,))
        masks = ((sequence, flat_target), (sequence, flat_draft))
    return Layout(
        batch, tokens, rows[0], rows[1], rows[2], rows[3], masks[0], masks[1], drafted, length, num_rows, status
    )


def decision_uniforms(
    layout: Layout, seed: torch.Tensor | None, position: torch.Tensor | None, uniforms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (accept, emission, valid): a uniform a position, drawn by Philox or as injected."""
    width = layout.drafted.shape[-1] + 1
    offsets = torch.arange(width, device=layout.length.device)
    if uniforms is None:
        if seed is None or position is None:
            raise ValueError("seed and position: expected tensors where uniforms is None, got None")
        pair = random.uniforms(seed.unsqueeze(-1), position.unsqueeze(-1) + offsets, random.VERIFY_PURPOSE)
        valid = torch.ones(layout.batch, dtype=torch.bool, device=layout.length.device)
        return pair[0].expand(layout.batch, width), pair[1].expand(layout.batch, width), valid
    injected = uniforms[layout.uniform_rows]
    used = (offsets < layout.num_rows.unsqueeze(-1)).unsqueeze(-1)
    valid = (((injected >= 0) & (injected < 1)) | ~used).flatten(1).all(dim=-1)
    return injected[..., 0], injected[..., 1], valid
