"""The meaning of every operator, in plain PyTorch and float64, to be read beside the papers.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2) with the letters spelled out: `target` is the
distribution that is kept, `draft` the one the draft tokens were drawn from. Nothing here is fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specker import random
from specker.adjustments import Adjustment, adjusted
from specker.distribution import Distribution, distribution, greedy_rows
from specker.layout import Layout, decision_uniforms, make_layout
from specker.sampling import Parameters
from specker.scoring import Scored, score
from specker.status import INVALID_ARGUMENT, Status

RECEIPT_FIELDS = ("token_logit", "row_max", "threshold", "weight_sum")
"""Columns of a packed receipt."""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    bias_offsets: torch.Tensor | None,
    bias_token_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_tokens: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverse CDF; return (token_ids, status, packed receipt)."""
    batch = logits.shape[0]
    status = _parameter_status(batch, logits.device, temperature, top_p, min_p)
    adjustment = Adjustment(bias_offsets, bias_token_ids, bias_values, allowed_tokens)
    sequence = torch.arange(batch, device=logits.device).unsqueeze(-1)
    logits = adjusted(logits.unsqueeze(1), adjustment, (sequence, sequence * 0), is_probs=False).squeeze(1)
    row = distribution(logits, *_as_float64(temperature, top_k, top_p, min_p), is_probs=False)
    status = torch.where(row.valid | _argument_bits(status), status, status | Status.TARGET_INVALID)
    emission = random.uniforms(seed, position, random.DRAFT_PURPOSE)[1].expand(batch)
    drawn = torch.where(status == 0, _inverse_cdf(row.probs, emission), -1)
    token_logit = logits.gather(-1, drawn.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(torch.float64)
    receipt = torch.stack((token_logit, row.row_max, row.threshold, row.weight_sum), dim=-1)
    return drawn, status, torch.where((status == 0).unsqueeze(-1), receipt, math.nan)


def verify(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    draft_receipt: torch.Tensor | None,
    num_draft_tokens: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    draft_index: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    draft_temperature: torch.Tensor,
    draft_top_k: torch.Tensor | None,
    draft_top_p: torch.Tensor | None,
    draft_min_p: torch.Tensor | None,
    bias_offsets: torch.Tensor | None,
    bias_token_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_tokens: torch.Tensor | None,
    draft_bias_offsets: torch.Tensor | None,
    draft_bias_token_ids: torch.Tensor | None,
    draft_bias_values: torch.Tensor | None,
    draft_allowed_tokens: torch.Tensor | None,
    draft_columns: torch.Tensor | None,
    draft_column_target_ids: torch.Tensor | None,
    seed: torch.Tensor | None,
    position: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    max_num_draft_tokens: int,
    target_is_probs: bool,
    draft_is_probs: bool,
    return_logprobs: bool,
    return_accept_probs: bool,
) -> tuple[torch.Tensor, ...]:
    """Accept draft tokens in order, then emit one recovered or bonus token; see `specker.verify`."""
    layout = make_layout(
        draft_token_ids,
        target,
        draft,
        num_draft_tokens,
        cu_num_draft_tokens,
        draft_index,
        max_num_draft_tokens,
    )
    if layout.batch and target.shape[0] == 0:
        # Where no sequence has a row, one that decides nothing is read all the same.
        target = torch.nn.functional.pad(target, (0, 0, 0, 1))
        uniforms = None if uniforms is None else torch.nn.functional.pad(uniforms, (0, 0, 0, 1))
        allowed_tokens = None if allowed_tokens is None else torch.nn.functional.pad(allowed_tokens, (0, 0, 0, 1))
    accept_uniforms, emission_uniforms, uniforms_valid = decision_uniforms(layout, seed, position, uniforms)
    status = layout.status | _parameter_status(layout.batch, target.device, temperature, top_p, min_p)
    status = torch.where(uniforms_valid, status, status | Status.INVALID_UNIFORMS)
    if draft is not None:
        status = status | _parameter_status(layout.batch, target.device, draft_temperature, draft_top_p, draft_min_p)

    adjustment = Adjustment(bias_offsets, bias_token_ids, bias_values, allowed_tokens)
    rows = adjusted(target[layout.target_rows], adjustment, layout.target_mask_rows, target_is_probs)
    target_law = distribution(rows, *_per_position(temperature, top_k, top_p, min_p), is_probs=target_is_probs)
    greedy = greedy_rows(temperature, top_p).expand(layout.batch).unsqueeze(-1)
    draft_law = None
    if draft is not None:
        parameters = _per_position(draft_temperature, draft_top_k, draft_top_p, draft_min_p)
        adjustment = Adjustment(draft_bias_offsets, draft_bias_token_ids, draft_bias_values, draft_allowed_tokens)
        rows = adjusted(draft[layout.draft_rows], adjustment, layout.draft_mask_rows, draft_is_probs)
        draft_law = distribution(rows, *parameters, is_probs=draft_is_probs)
        if draft_columns is not None and draft_column_target_ids is not None:
            # Several draft columns may share a target id: their mass is added.
            by_column = draft_law.probs[..., draft_columns]
            probs = torch.zeros_like(target_law.probs[:, : by_column.shape[1]])
            draft_law = draft_law._replace(probs=probs.index_add_(-1, draft_column_target_ids, by_column))

    mapped = draft_columns is not None
    receipt = None if draft_receipt is None else draft_receipt[layout.receipt_rows]
    if receipt is not None and not mapped:
        receipt = _matching(receipt, rows, layout.draft_token_ids)
    scored = score(layout, target_law, draft_law, receipt, draft_temperature, mapped, accept_uniforms, greedy)
    runs = _argument_bits(status).logical_not()
    num_accepted = torch.where(runs, scored.accepted.cumprod(dim=-1).sum(dim=-1), 0)
    emitted = _emit(layout, target_law, draft_law, scored, num_accepted, emission_uniforms, greedy)

    positions = torch.arange(max_num_draft_tokens + 1, device=target.device)
    decided = positions[:-1] <= num_accepted.unsqueeze(-1)
    bits = torch.where(decided & layout.drafted, scored.bits, 0)
    for index in range(max_num_draft_tokens):
        status = torch.where(runs, status | bits[:, index], status)
    status = torch.where(runs, status | emitted.bits, status)

    emits = runs & emitted.valid
    tokens = torch.nn.functional.pad(layout.draft_token_ids, (0, 1), value=-1)
    token_ids = torch.where(positions < num_accepted.unsqueeze(-1), tokens, -1)
    final = (positions == num_accepted.unsqueeze(-1)) & emits.unsqueeze(-1)
    token_ids = torch.where(final, emitted.token_ids.unsqueeze(-1), token_ids)
    num_emitted = num_accepted + emits.to(torch.int64)
    logprobs, accept_probs, expected = _optional_outputs(
        target_law, scored, token_ids, runs, return_logprobs, return_accept_probs
    )
    return token_ids, num_accepted, num_emitted, status, logprobs, accept_probs, expected


def verify_plain(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    draft_receipt: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Verify rows of logits under one law for target and draft, as most rounds are: `verify` with nothing else."""
    law, no_adjustment = (temperature, top_k, top_p, min_p), (None, None, None, None)
    return verify(
        draft_token_ids, target, draft, draft_receipt, None, None, None, *law, *law, *no_adjustment,
        *no_adjustment, None, None, seed, position, None, target.shape[1] - 1, False, False, False, False,
    )[:4]  # fmt: skip


def _matching(receipt: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return NaN for receipts that tell another logit than their row does: they belong to another row or token."""
    column = token_ids.clamp(0, rows.shape[-1] - 1).unsqueeze(-1)
    matches = rows.gather(-1, column).double() == receipt[..., :1]
    return torch.where(matches, receipt, math.nan)


class _Emitted(NamedTuple):
    """The recovered or bonus token of every sequence."""

    token_ids: torch.Tensor
    valid: torch.Tensor
    bits: torch.Tensor


def _emit(
    layout: Layout,
    target: Distribution,
    draft: Distribution | None,
    scored: Scored,
    num_accepted: torch.Tensor,
    emission_uniforms: torch.Tensor,
    greedy: torch.Tensor,
) -> _Emitted:
    sequence = torch.arange(layout.batch, device=num_accepted.device)
    target_row = target.probs[sequence, num_accepted]
    has_row = num_accepted < layout.num_rows
    valid = target.valid[sequence, num_accepted] & has_row
    rejected = num_accepted < layout.length
    bits = torch.where(valid | ~has_row, 0, int(Status.TARGET_INVALID)).to(torch.int32)
    mass = target_row
    if layout.drafted.shape[-1] > 0:
        position = num_accepted.clamp(max=layout.drafted.shape[-1] - 1)
        if draft is None:
            ids = torch.arange(target_row.shape[-1], device=target_row.device)
            removed = layout.draft_token_ids[sequence, position].unsqueeze(-1)
            residual = torch.where(ids == removed, 0.0, target_row)
        else:
            residual = (target_row - draft.probs[sequence, position]).clamp(min=0)
        total = residual.sum(dim=-1)
        wanted = rejected & scored.residual[sequence, position] & ~greedy.squeeze(-1)
        empty = ~((total > 0) & torch.isfinite(total))
        mass = torch.where((wanted & ~empty).unsqueeze(-1), residual, target_row)
        bits = torch.where(wanted & empty & valid, bits | Status.RESIDUAL_EMPTY, bits)
    token_ids = _inverse_cdf(mass, emission_uniforms[sequence, num_accepted])
    return _Emitted(token_ids, valid, bits)


def _inverse_cdf(mass: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first id whose prefix mass exceeds uniform * total, else the last id with mass."""
    prefix = mass.cumsum(dim=-1)
    first = (prefix <= uniform.unsqueeze(-1) * prefix[..., -1:]).sum(dim=-1)
    ids = torch.arange(mass.shape[-1], device=mass.device)
    last = torch.where(mass > 0, ids, 0).amax(dim=-1)
    return torch.minimum(first, last)


def _optional_outputs(
    target: Distribution,
    scored: Scored,
    token_ids: torch.Tensor,
    runs: torch.Tensor,
    return_logprobs: bool,
    return_accept_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = target.probs.new_empty(0, dtype=torch.float32)
    logprobs, accept_probs, expected = nothing, nothing.clone(), nothing.clone()
    if return_logprobs:
        picked = target.probs.gather(-1, token_ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        logprobs = torch.where(token_ids >= 0, picked.log(), 0.0).float()
    if return_accept_probs:
        accept_probs = torch.where(runs.unsqueeze(-1), scored.accept_probs, math.nan).float()
        chances = torch.where(runs.unsqueeze(-1), scored.accept_probs, 0.0).nan_to_num(nan=0.0)
        expected = chances.cumprod(dim=-1).sum(dim=-1).float()
    return logprobs, accept_probs, expected


def _parameter_status(
    batch: int,
    device: torch.device,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    status = torch.zeros(batch, dtype=torch.int32, device=device)
    good = torch.isfinite(temperature) & (temperature >= 0)
    status = torch.where(good, status, status | Status.INVALID_TEMPERATURE)
    if top_p is not None:
        status = torch.where(top_p >= 0, status, status | Status.INVALID_TOP_P)
    if min_p is not None:
        status = torch.where((min_p >= 0) & (min_p <= 1), status, status | Status.INVALID_MIN_P)
    return status


def _argument_bits(status: torch.Tensor) -> torch.Tensor:
    return (status & int(INVALID_ARGUMENT)) != 0


def _as_float64(
    temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> Parameters:
    return (
        temperature.double(),
        None if top_k is None else top_k.long(),
        None if top_p is None else top_p.double(),
        None if min_p is None else min_p.double(),
    )


def _per_position(
    temperature: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None
) -> Parameters:
    first, *filters = _as_float64(temperature, top_k, top_p, min_p)
    top_k, top_p, min_p = (None if parameter is None else parameter.unsqueeze(-1) for parameter in filters)
    return first.unsqueeze(-1), top_k, top_p, min_p
