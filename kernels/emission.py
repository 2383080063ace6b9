"""Device functions of the draw: weights of the row that emits, and the hierarchical inverse CDF.

The residual is taken between weights rather than probabilities: with W the weight sum of a row,

    residual = max(target_weight - draft_weight * (W_target / W_draft), 0)

so rows with equal numbers cancel to exactly 0.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .blocks import NO_ID, exponent_scale, flag, safe_shift, shifted_weights, spread, weights_float64
from .decide import merge_excluded, merge_rows, row_filter
from .rows import column_weights, load_shard
from .tiles import load_tile


@triton.jit
def round_up(value):
    """Return the smallest float32 that is not below a float64, so that comparing float32 values needs no float64."""
    near = value.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True)
    above = tl.where(near == 0.0, 1, tl.where(near > 0.0, bits + 1, bits - 1)).to(tl.float32, bitcast=True)
    return tl.where(near.to(tl.float64) < value, above, near)


@triton.jit
def load_shards(buffers, row, excluded, num_shards, temperature, IS_PROBS: tl.constexpr, BLOCK_SHARDS: tl.constexpr):
    """Return maxima and masses (in units of the row maximum) of the shards of one row, and the row maximum.

    `excluded` is the logit of a token that the shard sums leave out, -inf where none is; None where none ever is.
    """
    shard_max_ptr, shard_sum_ptr = buffers[0], buffers[1]
    shards = tl.arange(0, BLOCK_SHARDS)
    inside = shards < num_shards
    maxima = tl.load(shard_max_ptr + row * num_shards + shards, mask=inside, other=float("-inf"))
    sums = tl.load(shard_sum_ptr + row * num_shards + shards, mask=inside, other=0.0)
    row_max = tl.max(maxima, axis=0).to(tl.float64)
    if excluded is not None:
        row_max = merge_excluded(row_max, excluded, IS_PROBS)
    factor = weights_float64(maxima.to(tl.float64), row_max, temperature, IS_PROBS)
    return maxima, tl.where(maxima == float("-inf"), sums, sums * factor), row_max


@triton.jit
def draft_facts(
    buffers, sizes, sequence, index, wanted, temperature, target_sum,
    HAS_DRAFT: tl.constexpr, HAS_RECEIPT: tl.constexpr, MAPPED: tl.constexpr, IS_PROBS: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr,
):  # fmt: skip
    """Return (removed id or -1, shift, scale, threshold, factor, only column or -1) of the draft row to subtract.

    A point mass, and the arg-max of a greedy draft, holds the whole draft mass: removing its id is the residual. The
    arg-max of a reduced vocabulary is a column, and its mass is subtracted where that column's target id is found.
    """
    gamma, num_shards, rows_per_sequence = sizes
    records_ptr = buffers[5]
    record_ptr = records_ptr + (sequence * (gamma + 1) + index) * contract.POSITION_FIELDS
    removed = tl.load(record_ptr + contract.TOKEN_FIELD, mask=wanted, other=-1.0).to(tl.int32)
    shift = tl.full((), 0.0, tl.float32)
    scale = tl.full((), 1.0, tl.float32)
    threshold = tl.full((), float("-inf"), tl.float64)
    factor = tl.full((), 0.0, tl.float32)
    only = tl.full((), -1, tl.int32)
    if HAS_DRAFT:
        greedy = flag(temperature == 0.0)
        one = tl.zeros((1,), tl.int64)
        if HAS_RECEIPT:
            row_max = tl.load(record_ptr + contract.DRAFT_ROW_MAX_FIELD, mask=wanted, other=0.0)
            threshold = tl.load(record_ptr + contract.DRAFT_THRESHOLD_FIELD, mask=wanted, other=0.0)
            weight_sum = tl.load(record_ptr + contract.DRAFT_WEIGHT_SUM_FIELD, mask=wanted, other=1.0)
        else:
            rows = one + sequence * rows_per_sequence + gamma + 1 + index
            mask = spread(wanted, one)
            maxima, sums, argmax = merge_rows(
                buffers, rows, mask, None, num_shards, temperature, IS_PROBS, BLOCK_SHARDS
            )
            thresholds, sums = row_filter(buffers, rows, mask & ~spread(greedy, one), sums)
            row_max = tl.max(maxima, axis=0)
            threshold = tl.max(thresholds, axis=0)
            weight_sum = tl.max(sums, axis=0)
            removed = tl.where(greedy, tl.min(argmax, axis=0), removed)
            weight_sum = tl.where(greedy, 1.0, weight_sum)
        removed = tl.where(wanted & greedy, removed, -1)
        shift = safe_shift(row_max.to(tl.float32), IS_PROBS)
        scale = exponent_scale(tl.where(greedy, 1.0, temperature), IS_PROBS)
        subtracts = wanted & ~greedy
        if MAPPED:
            only = removed
            removed = tl.full((), -1, tl.int32)
            subtracts = wanted
        factor = tl.where(subtracts, target_sum / weight_sum, 0.0).to(tl.float32)
    return removed, shift, scale, round_up(threshold), factor, only


@triton.jit
def kept_weights(values, shift, scale, threshold, IS_PROBS: tl.constexpr):
    """Return float32 weights, 0 for ids that a filter drops."""
    return tl.where(values >= threshold, shifted_weights(values, shift, scale, IS_PROBS), 0.0)


@triton.jit
def residual_weights(kept, subtrahend, factor):
    """Return the weights that are left of a target row; the product is rounded, so that equal rows cancel."""
    drawn = kept - subtrahend * factor
    return tl.where(drawn > 0.0, drawn, 0.0)


@triton.jit
def mapped_weights(
    draft_row, columns, ids, mask, draft, IS_PROBS: tl.constexpr
):  # fmt: skip
    """Return the weights that a draft of a reduced vocabulary has at each target id."""
    _, shift, scale, threshold, _, only = draft
    return column_weights(draft_row, columns, ids, mask, shift, scale, threshold, only, IS_PROBS, False)


@triton.jit
def emission_weights(
    target_row, draft_row, columns, first, target_shift, target_scale, target_threshold, draft,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr, HAS_DRAFT: tl.constexpr,
    ALIGNED: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Return (target weights, weights drawn from) of a shard: the same numbers in every kernel that asks."""
    removed, draft_shift, draft_scale, draft_threshold, factor, _ = draft
    ids = tl.arange(0, SHARD) + first.to(tl.int32)
    values = load_shard(target_row, first, TARGET_IS_PROBS, ALIGNED, SHARD)
    kept = kept_weights(values, target_shift, target_scale, target_threshold, TARGET_IS_PROBS)
    drawn = kept
    if HAS_DRAFT:  # noqa: SIM102 (decided while compiling)
        if factor > 0.0:
            if columns[0] is None:
                values = load_shard(draft_row, first, DRAFT_IS_PROBS, ALIGNED, SHARD)
                subtrahend = kept_weights(values, draft_shift, draft_scale, draft_threshold, DRAFT_IS_PROBS)
            else:
                subtrahend = mapped_weights(draft_row, columns, ids, ids < target_row[1], draft, DRAFT_IS_PROBS)
            drawn = residual_weights(kept, subtrahend, factor)
    return kept, tl.where((drawn > 0.0) & (ids != removed), drawn, 0.0)


@triton.jit
def tile_weights(
    target_row, draft_row, first, target_shift, target_scale, target_threshold, draft,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr, SUBTRACTS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, SHARDS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Return (target weights, weights drawn from) of a tile; the removed id keeps its weight."""
    _, draft_shift, draft_scale, draft_threshold, factor, _ = draft
    values = load_tile(target_row, first, TARGET_IS_PROBS, ALIGNED, MASKED, SHARDS, SHARD)
    kept = kept_weights(values, target_shift, target_scale, target_threshold, TARGET_IS_PROBS)
    drawn = kept
    if SUBTRACTS:
        values = load_tile(draft_row, first, DRAFT_IS_PROBS, ALIGNED, MASKED, SHARDS, SHARD)
        subtrahend = kept_weights(values, draft_shift, draft_scale, draft_threshold, DRAFT_IS_PROBS)
        drawn = residual_weights(kept, subtrahend, factor)
    return kept, drawn


@triton.jit
def pick(ids, masses, wanted):
    """Return the first id with mass whose prefix exceeds `wanted`, else the last id with mass."""
    prefix = tl.cumsum(masses, axis=0)
    exceeds = (masses > 0.0) & (prefix > wanted)
    first = tl.min(tl.where(exceeds, ids, NO_ID), axis=0)
    last = tl.max(tl.where(masses > 0.0, ids, -1), axis=0)
    return tl.minimum(first, last)
