"""Operator `verify_into`: a round between two small launches, one that prepares it and one that writes it out.

One program a sequence writes a few numbers a position into tensors of another engine's.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import contract
from .blocks import flag, kernel, spread, uniforms
from .prepare import POSITIONS, SMALL_LAUNCH, prepare, spread_strides
from .rounds import _on_device
from .verify import verify


@triton.jit
def add(totals_ptr, stride_totals, sequence, count):
    """Add a count to one of the caller's, of whichever integer type that is."""
    if totals_ptr is not None:
        total_ptr = totals_ptr + sequence * stride_totals
        tl.store(total_ptr, tl.load(total_ptr) + count.to(totals_ptr.dtype.element_ty))


@triton.jit
def count_passed(
    accept_probs_ptr, seed, position, sequence, gamma, num_accepted,
    PURPOSE: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return how many draft tokens of a sequence pass their own test, also behind the first rejection."""
    passed = num_accepted & 0
    for chunk in range(0, gamma, BLOCK_POSITIONS):
        steps = (chunk + tl.arange(0, BLOCK_POSITIONS)).to(tl.int64)
        chances = tl.load(accept_probs_ptr + sequence * gamma + steps, mask=steps < gamma, other=0.0).to(tl.float64)
        drawn, _ = uniforms(seed, position + steps, PURPOSE)
        passed += tl.sum((drawn < chances).to(tl.int64), axis=0)
    # Accept probabilities are float32: rounding must not take back a token that was kept.
    return tl.maximum(passed, num_accepted)


@kernel
def deliver(
    output_token_ids_ptr, stride_output_sequence, stride_output_row,  # (batch, gamma + 1) or (output_size,)
    output_places_ptr, stride_output_places_sequence, stride_output_places_row,  # (batch, columns)
    passed_total_ptr, stride_passed, accepted_total_ptr, stride_accepted,  # (batch,), likewise
    emitted_total_ptr, stride_emitted, status_total_ptr, stride_status_total,
    token_ids_ptr, num_accepted_ptr, num_emitted_ptr, status_ptr, accept_probs_ptr,  # of the round, contiguous
    seed_ptr, stride_seed, position_ptr, stride_position, bonus_token_ids_ptr, stride_bonus,  # (batch,) or (1,)
    places_ptr, stride_places_sequence, stride_places_row,  # (batch, >= gamma + 1)
    padding, gamma, columns, output_size, PURPOSE: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Grid (batch,)."""
    sequence = tl.program_id(0).to(tl.int64)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    num_emitted = tl.load(num_emitted_ptr + sequence)
    status = tl.load(status_ptr + sequence)
    complete = flag((status & (contract.INVALID_ARGUMENT | contract.TARGET_INVALID)) == 0)
    complete = complete & flag(num_emitted == num_accepted)
    for chunk in range(0, tl.maximum(gamma + 1, columns), BLOCK_POSITIONS):
        positions = (chunk + tl.arange(0, BLOCK_POSITIONS)).to(tl.int64)
        inside = positions <= gamma
        shown = inside & (positions <= num_accepted)
        tokens = tl.load(token_ids_ptr + sequence * (gamma + 1) + positions, mask=shown, other=0)
        if bonus_token_ids_ptr is not None:
            bonus = tl.load(bonus_token_ids_ptr + sequence * stride_bonus).to(tl.int64)
            tokens = tl.where((positions == num_accepted) & spread(complete, positions), bonus, tokens)
        tokens = tl.where(shown, tokens, padding).to(output_token_ids_ptr.dtype.element_ty)
        place = positions
        written = inside
        offsets = sequence * stride_output_sequence + positions * stride_output_row
        if places_ptr is not None:
            pointers = places_ptr + sequence * stride_places_sequence + positions * stride_places_row
            place = tl.load(pointers, mask=inside, other=-1).to(tl.int64)
            written = inside & (place >= 0) & (place < output_size)
            offsets = place * stride_output_row
        tl.store(output_token_ids_ptr + offsets, tokens, mask=written)
        if output_places_ptr is not None:
            kept = tl.where(shown, place, -1).to(output_places_ptr.dtype.element_ty)
            offsets = sequence * stride_output_places_sequence + positions * stride_output_places_row
            tl.store(output_places_ptr + offsets, kept, mask=positions < columns)
    if passed_total_ptr is not None:
        position = tl.load(position_ptr + sequence * stride_position).to(tl.int64)
        passed = count_passed(
            accept_probs_ptr, tl.load(seed_ptr + sequence * stride_seed), position, sequence, gamma, num_accepted,
            PURPOSE, BLOCK_POSITIONS,
        )  # fmt: skip
        add(passed_total_ptr, stride_passed, sequence, passed)
    add(accepted_total_ptr, stride_accepted, sequence, num_accepted)
    add(emitted_total_ptr, stride_emitted, sequence, num_emitted)
    if status_total_ptr is not None:
        status_total_ptr += sequence * stride_status_total
        tl.store(status_total_ptr, tl.load(status_total_ptr) | status)


def verify_into(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    next_siblings: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    cu_num_rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    position: torch.Tensor | None,
    accept_uniforms: torch.Tensor | None,
    emission_uniforms: torch.Tensor | None,
    max_num_draft_tokens: int,
    target_is_probs: bool,
    draft_is_probs: bool,
    bonus_token_ids: torch.Tensor | None,
    places: torch.Tensor | None,
    padding: int,
    output_token_ids: torch.Tensor,
    output_places: torch.Tensor | None,
    passed_total: torch.Tensor | None,
    accepted_total: torch.Tensor | None,
    emitted_total: torch.Tensor | None,
    status_total: torch.Tensor | None,
) -> torch.Tensor:
    """Launch one round and its delivery; arguments and result as `specker.delivery.verify_into`."""
    if passed_total is not None and (seed is None or position is None):
        raise ValueError("passed_total: expected seed and position with it, got None")
    if slots is not None and temperature is None:
        raise ValueError("slots: expected temperature with it, got None")
    gamma, drafts = max_num_draft_tokens, (draft_token_ids, cu_num_draft_tokens, position)
    operands = prepare(
        drafts, (next_tokens, next_siblings), cu_num_rows, slots, temperature, seed, accept_uniforms,
        emission_uniforms, gamma, draft_is_probs,
    )  # fmt: skip
    batch = draft_token_ids.shape[0] if operands.bounds is None else operands.bounds.shape[0] - 1
    nothing = (None,) * 10
    token_ids, num_accepted, num_emitted, status, _, accept_probs, _ = verify(
        operands.token_ids, target, draft, None, operands.num_draft_tokens, operands.bounds,
        None if draft is None else slots, operands.temperature, None, None, None, operands.draft_temperature, None,
        None, None, *nothing, operands.seed, operands.position, operands.uniforms, gamma, target_is_probs,
        draft_is_probs, False, passed_total is not None,
    )  # fmt: skip
    if batch == 0:
        return status
    places_out = output_places if places is not None else None
    rows = output_token_ids.stride() if places is None else (0, output_token_ids.stride(0))
    counts = passed_total is not None
    with _on_device(target):
        deliver[(batch,)](
            output_token_ids, *rows, *spread_strides(places_out, 2), *spread_strides(passed_total),
            *spread_strides(accepted_total), *spread_strides(emitted_total), *spread_strides(status_total),
            token_ids, num_accepted, num_emitted, status, accept_probs if counts else None,
            *spread_strides(operands.seed if counts else None), *spread_strides(operands.position if counts else None),
            *spread_strides(bonus_token_ids), *spread_strides(places, 2), padding, gamma,
            0 if places_out is None else places_out.shape[1], output_token_ids.shape[0],
            PURPOSE=contract.VERIFY_PURPOSE, BLOCK_POSITIONS=POSITIONS, **SMALL_LAUNCH,
        )  # fmt: skip
    return status
