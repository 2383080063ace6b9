"""Device functions that read and judge the arguments of one sequence.

All addresses are computed in 64 bits before a stride is multiplied. Values that are out of range become status bits and
are replaced by harmless ones, so that nothing outside the tensors is ever read.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract


@triton.jit
def load_real(pointer, stride, sequence, default: tl.constexpr):
    """Return a parameter of a sequence in float64."""
    return tl.full((), default, tl.float64) if pointer is None else tl.load(pointer + sequence * stride).to(tl.float64)


@triton.jit
def is_greedy(temperature, top_p):
    """Return whether a sequence takes the arg-max: the one predicate."""
    # A difference takes the constant in float64; a comparison would round it to float32 first.
    return (temperature - contract.GREEDY_TEMPERATURE < 0.0) | (top_p <= 0.0)


@triton.jit
def parameter_status(temperature, top_p, min_p):
    """Return the status bits of the parameters of a sequence."""
    bad_temperature = ~((temperature >= 0.0) & (temperature < float("inf")))
    status = tl.where(bad_temperature, contract.INVALID_TEMPERATURE, 0)
    status |= tl.where(top_p >= 0.0, 0, contract.INVALID_TOP_P)
    return status | tl.where((min_p >= 0.0) & (min_p <= 1.0), 0, contract.INVALID_MIN_P)


@triton.jit
def locate(lengths_ptr, stride_lengths, sequence, gamma, total, FLAT: tl.constexpr):
    """Return the start (0 in the padded form), the length and the status bit of a sequence."""
    start = sequence & 0
    if lengths_ptr is None:
        length = start + gamma
    elif FLAT:
        start = tl.load(lengths_ptr + sequence * stride_lengths).to(tl.int64)
        length = tl.load(lengths_ptr + (sequence + 1) * stride_lengths).to(tl.int64) - start
    else:
        length = tl.load(lengths_ptr + sequence * stride_lengths).to(tl.int64)
    valid = (length >= 0) & (length <= gamma)
    if FLAT:
        valid = valid & (start >= 0) & (start + length <= total) & ((sequence > 0) | (start == 0))
    # An invalid sequence is treated as an empty one at the front: every address stays inside.
    status = tl.where(valid, 0, contract.INVALID_NUM_DRAFT_TOKENS)
    return tl.where(valid, start, 0), tl.where(valid, length, 0), status


@triton.jit
def draft_slot(draft_index_ptr, stride_draft_index, sequence, draft_slots):
    """Return the leading row of the draft tensor that belongs to a sequence, and its status bit."""
    slot = sequence
    status = tl.full((), 0, tl.int32)
    if draft_index_ptr is not None:
        slot = tl.load(draft_index_ptr + sequence * stride_draft_index).to(tl.int64)
        valid = (slot >= 0) & (slot < draft_slots)
        status = tl.where(valid, 0, contract.INVALID_DRAFT_INDEX)
        slot = tl.where(valid, slot, 0)
    return slot, status


@triton.jit
def uniforms_status(uniforms_ptr, first, num_rows, stride_row, stride_kind, BLOCK_POSITIONS: tl.constexpr):
    """Return the status bit of injected uniforms that lie outside [0, 1)."""
    kinds = tl.arange(0, 2).to(tl.int64)
    bad = tl.full((), 0, tl.int32)
    for chunk in range(0, num_rows, BLOCK_POSITIONS):
        positions = (chunk + tl.arange(0, BLOCK_POSITIONS)).to(tl.int64)
        used = (positions < num_rows)[:, None] & (kinds >= 0)[None, :]
        offsets = (first + positions * stride_row)[:, None] + (kinds * stride_kind)[None, :]
        drawn = tl.load(uniforms_ptr + offsets, mask=used, other=0.0)
        outside = ~((drawn >= 0.0) & (drawn < 1.0))
        bad = tl.maximum(bad, tl.max(tl.max(outside.to(tl.int32), axis=1), axis=0))
    return tl.where(bad > 0, contract.INVALID_UNIFORMS, 0)
