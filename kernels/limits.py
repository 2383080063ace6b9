"""Device functions that say what the filters of a row ask for, shared by the two filter kernels.

A candidate is a value that is not below the row's bound. Each shard with a maximum that high holds at least one, so a
bound that k shard maxima reach is not above the k-th largest value of the row: the candidates are all of its largest
values, and for a row of many shards they are few hundred.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .blocks import flag
from .emission import round_up
from .rows import row_at, rows_of
from .selection import key_value, ordered_key

# Shards of a row that are to have a candidate.
MOST_SHARDS = tl.constexpr(256)


@triton.jit
def load_top_k(pointer, stride, sequence):
    """Return the top-k of a sequence as int32; 0 is off."""
    if pointer is None:
        value = tl.full((), 0, tl.int32)
    else:
        value = tl.minimum(tl.maximum(tl.load(pointer + sequence * stride), 0), 0x7FFFFFFF).to(tl.int32)
    return value


@triton.jit
def min_p_floor(min_p, temperature, row_max, IS_PROBS: tl.constexpr):
    """Return the min-p threshold; -inf where it is off."""
    if IS_PROBS:
        floor = row_max.to(tl.float64) * tl.exp(temperature * tl.log(min_p))
    else:
        floor = row_max.to(tl.float64) + temperature * tl.log(min_p)
    return tl.where(min_p > 0.0, floor, float("-inf"))


@triton.jit
def candidate_bound(maxima, parameters, IS_PROBS: tl.constexpr, FITS: tl.constexpr):
    """Return the smallest value that is collected from a row: a function of its shard maxima and parameters."""
    top_k, top_p, min_p, temperature = parameters
    bound = tl.full((), float("-inf"), tl.float32)
    if not FITS:
        finite = maxima > float("-inf")
        keys = tl.where(finite, ordered_key(maxima), -0x7FFFFFFF)
        shards = tl.sum(finite.to(tl.int32), axis=0)
        # The lowest few maxima may be those of shards that hold little else, and many shards overfill the list.
        wanted = tl.minimum(shards - shards // 32, MOST_SHARDS)
        wanted = tl.where((top_k > 0) & (top_k < wanted), top_k, wanted)
        high = tl.max(keys, axis=0).to(tl.int64)
        low = tl.min(tl.where(finite, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
        # Any bound serves; the last digits of the best one would only cost time.
        for _ in range(16):
            middle = (low + high) >> 1
            enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= wanted
            high = tl.where(enough, high, middle)
            low = tl.where(enough, middle, low)
        bound = key_value(low)
        if min_p > 0.0:
            floor = round_up(min_p_floor(min_p, temperature, tl.max(maxima, axis=0), IS_PROBS))
            # Alone, min-p says what is needed. After another filter, what it drops need not be collected; but top-p
            # needs the mass of all that top-k keeps.
            alone = (top_k == 0) & flag(top_p >= 1.0)
            both = (top_k > 0) & flag(top_p < 1.0)
            bound = tl.where(alone, floor, tl.where(both, bound, tl.maximum(bound, floor)))
    return bound


@triton.jit
def write_limits(limits_ptr, entry, parameters, bound):
    """Write what `load_limits` returns."""
    top_k, top_p, min_p, temperature = parameters
    limit_ptr = limits_ptr + entry * contract.LIMIT_FIELDS
    tl.store(limit_ptr + contract.TOP_K_FIELD, top_k.to(tl.float64))
    tl.store(limit_ptr + contract.TOP_P_FIELD, top_p)
    tl.store(limit_ptr + contract.MIN_P_FIELD, min_p)
    tl.store(limit_ptr + contract.TEMPERATURE_FIELD, temperature)
    tl.store(limit_ptr + contract.BOUND_FIELD, bound.to(tl.float64))


@triton.jit
def load_limits(limits_ptr, entry):
    """Return top_k, top_p, min_p, temperature (0: nothing to filter) and bound of a row."""
    limit_ptr = limits_ptr + entry * contract.LIMIT_FIELDS
    top_k = tl.load(limit_ptr + contract.TOP_K_FIELD).to(tl.int32)
    top_p = tl.load(limit_ptr + contract.TOP_P_FIELD)
    min_p = tl.load(limit_ptr + contract.MIN_P_FIELD)
    temperature = tl.load(limit_ptr + contract.TEMPERATURE_FIELD)
    return top_k, top_p, min_p, temperature, tl.load(limit_ptr + contract.BOUND_FIELD).to(tl.float32)


@triton.jit
def row_of(
    turn, rows_per_sequence, gamma, vocab, draft_vocab, integers_ptr,
    target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
    bias, allowed, draft_bias, draft_allowed, SAME_ROWS: tl.constexpr,
):  # fmt: skip
    """Return whether row `turn` of the batch is a draft row, its target row and its draft row.

    Draft rows that differ from target rows by their address only come as target rows.
    """
    sequence = (turn // rows_per_sequence).to(tl.int64)
    row = (turn % rows_per_sequence).to(tl.int64)
    record_ptr = integers_ptr + sequence * contract.SEQUENCE_FIELDS
    is_draft = row > gamma
    index = tl.where(is_draft, row - gamma - 1, row)
    target_offset = tl.load(record_ptr + contract.TARGET_OFFSET_FIELD)
    front = tl.load(record_ptr + contract.FRONT_FIELD)
    target_row = row_at(
        rows_of(target_logits_ptr, target_offset, stride_target_row, vocab, sequence, front, bias, allowed), index
    )
    draft_row = target_row
    if draft_logits_ptr is not None:
        draft_offset = tl.load(record_ptr + contract.DRAFT_OFFSET_FIELD)
        start = tl.load(record_ptr + contract.START_FIELD)
        draft_row = row_at(
            rows_of(
                draft_logits_ptr, draft_offset, stride_draft_row, draft_vocab, sequence, start, draft_bias,
                draft_allowed,
            ),
            index,
        )  # fmt: skip
        if SAME_ROWS:
            # Neither has a bias or a mask here.
            row_ptr = target_row[0]
            if is_draft:
                row_ptr = draft_row[0]
            target_row = (row_ptr, vocab, target_row[2], target_row[3])
    return is_draft, target_row, draft_row
