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
from .arguments import load_real
from .blocks import flag
from .decide import load_sequence
from .emission import round_up
from .rows import row_at, rows_of
from .selection import key_value, ordered_key


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
def candidate_bound(maxima, top_k, top_p, min_p, temperature, IS_PROBS: tl.constexpr, FITS: tl.constexpr):
    """Return the smallest value that is collected from a row: a function of its shard maxima and parameters."""
    bound = tl.full((), float("-inf"), tl.float32)
    if not FITS:
        finite = maxima > float("-inf")
        keys = tl.where(finite, ordered_key(maxima), -0x7FFFFFFF)
        shards = tl.sum(finite.to(tl.int32), axis=0)
        # The lowest few maxima may be those of shards that hold little else.
        wanted = shards - shards // 32
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
def row_to_filter(
    turn, rows_per_sequence, gamma, vocab, draft_vocab, integers_ptr, temperatures_ptr,
    target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
    top_k_ptr, stride_top_k, top_p_ptr, stride_top_p, min_p_ptr, stride_min_p,
    draft_top_k_ptr, stride_draft_top_k, draft_top_p_ptr, stride_draft_top_p, draft_min_p_ptr, stride_draft_min_p,
    bias, allowed, draft_bias, draft_allowed, SAME_ROWS: tl.constexpr,
):  # fmt: skip
    """Return (whether to filter it, whether by the draft's code, its entry, target row, draft row, parameters).

    Draft rows that differ from target rows by their address only come as target rows.
    """
    sequence = (turn // rows_per_sequence).to(tl.int64)
    row = (turn % rows_per_sequence).to(tl.int64)
    status, length, num_rows, target_offset, draft_offset, front, start, temperature, draft_temperature = load_sequence(
        integers_ptr, temperatures_ptr, sequence
    )
    runs = ((status & contract.INVALID_ARGUMENT) == 0) & flag(temperature > 0.0)
    is_target = row <= gamma
    index = tl.where(is_target, row, row - gamma - 1)
    target_row = row_at(
        rows_of(target_logits_ptr, target_offset, stride_target_row, vocab, sequence, front, bias, allowed), index
    )
    draft_row = target_row
    row_ptr = target_row[0]
    top_k = load_top_k(top_k_ptr, stride_top_k, sequence)
    top_p = load_real(top_p_ptr, stride_top_p, sequence, 1.0)
    min_p = load_real(min_p_ptr, stride_min_p, sequence, 0.0)
    wanted = runs & (row < num_rows)
    if draft_logits_ptr is not None:
        draft_row = row_at(
            rows_of(
                draft_logits_ptr,
                draft_offset,
                stride_draft_row,
                draft_vocab,
                sequence,
                start,
                draft_bias,
                draft_allowed,
            ),
            index,
        )
        top_k = tl.where(is_target, top_k, load_top_k(draft_top_k_ptr, stride_draft_top_k, sequence))
        top_p = tl.where(is_target, top_p, load_real(draft_top_p_ptr, stride_draft_top_p, sequence, 1.0))
        min_p = tl.where(is_target, min_p, load_real(draft_min_p_ptr, stride_draft_min_p, sequence, 0.0))
        temperature = tl.where(is_target, temperature, draft_temperature)
        drafted = (row > gamma) & (index < length) & flag(draft_temperature > 0.0)
        wanted = runs & ((row < num_rows) | drafted)
        if SAME_ROWS:  # noqa: SIM102 (decided while compiling)
            # Neither has a bias or a mask here.
            if row > gamma:
                row_ptr = draft_row[0]
    width = vocab if SAME_ROWS or draft_logits_ptr is None else tl.where(is_target, vocab, draft_vocab)
    top_k = tl.where(top_k < width, top_k, 0)
    wanted = wanted & ((top_k > 0) | flag(top_p < 1.0) | flag(min_p > 0.0))
    target_row = (row_ptr, vocab, target_row[2], target_row[3])
    return (
        wanted, ~is_target, sequence * rows_per_sequence + row, target_row, draft_row,
        (top_k, top_p, min_p, temperature),
    )  # fmt: skip
