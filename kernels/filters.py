"""Filter thresholds: top-k, then top-p, then min-p, of every row that may decide; no sort, no copy of the row.

A filter keeps {id : value >= threshold}, where a value is kept iff

    top-k    fewer than k values are greater
    top-p    the mass of the greater values is < top_p * (mass that top-k keeps)
    min-p    value >= row_max + temperature * log(min_p)

so tied values are all kept or all dropped. One program goes through some rows, one at a time. As a rule the candidates
that `filter_candidates` has collected settle a row, and nothing of it is read here. Where they do not (too many, too
few, or too little mass), the row is read twice for each filter: once to bin the values, once to collect those of the
bin that holds the threshold; a bin with too many different values is divided again. Where the boundary of top-p is too
close for float32 weights the row is weighed again in float64. 12 KB of scratch a program, 4 KB of candidates a row.
Rows without a filter get the threshold -inf at once.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import flag, kernel
from .emission import load_shards, round_up
from .limits import candidate_bound, min_p_floor, row_to_filter
from .selection import (
    UNIT,
    candidate_weights,
    key_value,
    mass_from,
    mass_of,
    narrow,
    nucleus_floor,
    ordered_key,
    smallest_kept,
    sweep,
    value_above,
    value_below,
)

# More than the relative error of a sum of float32 weights, of which 5e-7 is the bound.
SUM_ERROR = tl.constexpr(6e-7)
# The filters in their order.
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)


@triton.jit
def collect(
    row, bound, row_max, lowest_max, temperature, row_sum, top_p, kept_mass, wanted,
    by_mass, sums_only, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FILTER_SHARD: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Collect the values around the threshold, which is not below `bound`, and weigh those above them.

    Returns (lowest and highest value collected, whether all from there on are, how many are, count and mass above);
    with `sums_only` nothing is collected and the values >= bound are weighed.
    """
    low = tl.full((), float("-inf"), tl.float32)
    high = row_max
    complete = tl.full((), 0, tl.int32)
    if sums_only:
        # Nothing lies between these bounds: the row is summed only.
        low = tl.full((), float("inf"), tl.float32)
        high = value_below(bound)
    else:
        low = 2.0 * lowest_max - row_max
        if by_mass > 0:
            low = nucleus_floor(row_max, temperature, kept_mass, tl.maximum(top_p, 0.0), row[1], IS_PROBS)
        low, high, complete = narrow(
            row, tl.maximum(low, bound), row_max, temperature, row_sum, wanted, by_mass, scratch,
            IS_PROBS, ALIGNED, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
        )  # fmt: skip
        high = tl.where(complete > 0, row_max, high)
    tl.store(scratch[0], 0)
    tl.debug_barrier()
    above_count, above_mass = sweep(
        row, low, high, row_max, temperature, scratch, 1.0, 0, 1.0, 0, 0,
        True, IS_PROBS, ALIGNED, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
    )  # fmt: skip
    tl.debug_barrier()
    return low, high, complete, tl.load(scratch[0], volatile=True), above_count, above_mass


@triton.jit
def precise_top_p(
    row, candidates_ptr, count, complete, low, high, floor, top_p, row_max, temperature,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FILTER_SHARD: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the top-p threshold among the values >= floor by float64 weights, and the mass it keeps.

    The candidates, weighed in float64, settle it if it is one of them; else the values are halved by reading the row.
    """
    first = ordered_key(floor).to(tl.int64)
    last = ordered_key(row_max).to(tl.int64)
    threshold = floor
    kept_mass = tl.full((), 0.0, tl.float64)
    above = tl.full((), 0.0, tl.float64)
    wanted = tl.full((), 0.0, tl.float64)
    # What the row is read for: all that is kept so far, then what is above the candidates, then halves.
    query = floor
    turn = tl.full((), 0, tl.int32)
    while turn >= 0:
        mass = mass_of(row, query, row_max, temperature, IS_PROBS, ALIGNED, FILTER_SHARD)
        if turn == 0:
            wanted = top_p * mass
            query = value_above(high)
        above = tl.where((turn == 1) & (complete == 0), mass, above)
        if (turn == 1) | ((turn == 0) & (complete > 0)):
            slots = tl.arange(0, MAX_CANDIDATES)
            values = tl.load(candidates_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
            weights = candidate_weights(values, row_max, temperature, IS_PROBS)
            threshold = smallest_kept(values, weights, above, wanted, UNIT, floor, value_above(high), low, high)
            kept_mass = above + tl.sum(tl.where(values >= threshold, weights, 0), axis=0).to(tl.float64) / UNIT
            settled = (above < wanted) & (kept_mass >= wanted)
            turn = tl.where(settled, -1, 2)
        elif turn == 0:
            turn += 1
        elif turn == 2:
            little = mass < wanted
            middle = (first + last) >> 1
            last = tl.where(little, middle, last)
            first = tl.where(little, first, middle + 1)
        else:
            kept_mass = mass
            turn = tl.full((), -1, tl.int32)
        if turn == 2:
            query = value_above(key_value((first + last) >> 1))
            if first >= last:
                threshold = key_value(first)
                query = threshold
                turn += 1
    return threshold, kept_mass


@triton.jit
def filter_row(
    row, count, bound, top_k, top_p, min_p, temperature, row_max, lowest_max, row_sum, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, FILTER_SHARD: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the float64 threshold of a row and the mass that it keeps; `count` values >= bound are collected."""
    candidates_ptr = scratch[2]
    slots = tl.arange(0, MAX_CANDIDATES)
    threshold = tl.full((), float("-inf"), tl.float32)
    low = bound
    high = row_max
    kept_mass = row_sum
    # Whether the candidates in memory are all the values from `low` on.
    complete = tl.where(count <= MAX_CANDIDATES, 1, 0)
    # Whether the mass that is kept so far is a sum of float64 weights.
    exact = tl.full((), 1 if FITS else 0, tl.int32)
    above_count = tl.full((), 0, tl.int32)
    above_mass = tl.full((), 0.0, tl.float64)
    floor = min_p_floor(min_p, temperature, row_max, IS_PROBS)
    # Whether nothing below the bound can be kept, whatever the other filters say.
    raised = (tl.where(FITS, 1, 0) == 0) & flag(min_p > 0.0) & flag(bound == round_up(floor))
    for phase in range(TOP_K, MIN_P + 1):
        limits = flag(top_k > 0)
        if phase == TOP_P:
            limits = flag(top_p < 1.0)
        if phase == MIN_P:
            limits = flag(floor > threshold.to(tl.float64))
        values = tl.load(candidates_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
        weights = candidate_weights(values, row_max, temperature, IS_PROBS)
        if FITS and phase == TOP_P:
            kept_mass = mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES)
        by_mass = tl.where(phase == TOP_K, 0, 1)
        wanted = top_p * kept_mass
        if phase == TOP_K:
            wanted = top_k.to(tl.float64)
        if (complete > 0) & (phase != MIN_P):
            held = mass_from(values, weights, threshold, count, 0.0, MAX_CANDIDATES)
            if phase == TOP_K:
                held = count.to(tl.float64)
            if held < wanted:
                # What the bound hides matters, unless min-p drops it.
                complete = tl.where(raised, complete, 0)
                limits = limits & ~raised
        if limits:
            if complete == 0:
                low, high, complete, count, above_count, above_mass = collect(
                    row, tl.where(phase == MIN_P, round_up(floor), threshold), row_max, lowest_max, temperature,
                    row_sum, top_p, kept_mass, wanted, by_mass, phase == MIN_P, scratch,
                    IS_PROBS, ALIGNED, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
                )  # fmt: skip
                values = tl.load(candidates_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
                weights = candidate_weights(values, row_max, temperature, IS_PROBS)
            before = threshold
            if phase == MIN_P:
                threshold = round_up(floor)
            else:
                above = above_mass
                amounts = weights
                unit = UNIT
                if phase == TOP_K:
                    above = above_count.to(tl.float64)
                    amounts = tl.where(slots < count, 1, 0).to(tl.int64)
                    unit = 1.0
                threshold = smallest_kept(values, amounts, above, wanted, unit, threshold, value_above(high), low, high)
            without = mass_from(values, weights, value_above(threshold), count, above_mass, MAX_CANDIDATES)
            kept_mass = mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES)
            if phase == TOP_K:
                exact = tl.maximum(exact, complete)
            # Float32 weights are trusted where they leave no doubt on which side of top-p a value lies.
            doubt = flag(tl.minimum(wanted - without, kept_mass - wanted) < wanted * SUM_ERROR)
            if (phase == TOP_P) & (exact == 0) & doubt:
                threshold, kept_mass = precise_top_p(
                    row, candidates_ptr, count, complete, low, high, before, top_p, row_max, temperature,
                    IS_PROBS, ALIGNED, FILTER_SHARD, MAX_CANDIDATES,
                )  # fmt: skip
            tl.debug_barrier()
    # Where min-p decides, its float64 value is the threshold, not the float32 above it.
    return tl.where(threshold == round_up(floor), floor, threshold.to(tl.float64)), kept_mass


@triton.jit
def filter_entry(
    row_threshold_ptr, row_sum_ptr, buffers, candidate_counts_ptr, scratch, entry, row, parameters, num_shards,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, FILTER_SHARD: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write threshold and kept mass of one row that samples; -inf where it is invalid."""
    top_k, top_p, min_p, temperature = parameters
    threshold = tl.full((), float("-inf"), tl.float64)
    maxima, masses, row_max = load_shards(buffers, entry, None, num_shards, temperature, IS_PROBS, BLOCK_SHARDS)
    row_sum = tl.sum(masses, axis=0)
    if row_sum > 0.0:
        finite = tl.where(maxima > float("-inf"), maxima, float("inf"))
        threshold, kept_mass = filter_row(
            row, tl.load(candidate_counts_ptr + entry),
            candidate_bound(maxima, top_k, top_p, min_p, temperature, IS_PROBS, FITS),
            top_k, top_p, min_p, temperature, row_max.to(tl.float32), tl.min(finite, axis=0),
            row_sum, scratch, IS_PROBS, ALIGNED, FITS, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
        )  # fmt: skip
        tl.store(row_sum_ptr + entry, kept_mass)
    tl.store(row_threshold_ptr + entry, threshold)


@kernel
def filter_thresholds(
    row_threshold_ptr, row_sum_ptr,  # (batch, rows_per_sequence)
    counts_ptr, masses_ptr,  # (programs, NUM_BINS)
    candidate_counts_ptr, candidates_ptr,  # (batch, rows_per_sequence), (batch, rows_per_sequence, MAX_CANDIDATES)
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr,  # (batch, rows_per_sequence, num_shards)
    integers_ptr, temperatures_ptr,
    target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
    top_k_ptr, stride_top_k, top_p_ptr, stride_top_p, min_p_ptr, stride_min_p,
    draft_top_k_ptr, stride_draft_top_k, draft_top_p_ptr, stride_draft_top_p, draft_min_p_ptr, stride_draft_min_p,
    bias_offsets_ptr, bias_ids_ptr, bias_values_ptr,  # (batch + 1,), (entries,), likewise
    allowed_ptr, stride_allowed_sequence, stride_allowed_row,  # (batch, rows, words)
    draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr,
    draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row, draft_vocab,
    gamma, vocab, num_shards, rows_per_sequence, num_rows,
    ALIGNED: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    FILTER_SHARD: tl.constexpr, BLOCK_SHARDS: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    FITS: tl.constexpr, SAME_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): program i filters rows i, i + programs, and so on."""
    program = tl.program_id(0)
    buffers = (shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, None, None, None)
    bins = program.to(tl.int64) * NUM_BINS
    for turn in range(program, num_rows, tl.num_programs(0)):
        wanted, is_draft, entry, target_row, draft_row, parameters = row_to_filter(
            turn, rows_per_sequence, gamma, vocab, draft_vocab, integers_ptr, temperatures_ptr,
            target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
            top_k_ptr, stride_top_k, top_p_ptr, stride_top_p, min_p_ptr, stride_min_p,
            draft_top_k_ptr, stride_draft_top_k, draft_top_p_ptr, stride_draft_top_p,
            draft_min_p_ptr, stride_draft_min_p,
            (bias_offsets_ptr, bias_ids_ptr, bias_values_ptr),
            (allowed_ptr, stride_allowed_sequence, stride_allowed_row),
            (draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr),
            (draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row), SAME_ROWS,
        )  # fmt: skip
        scratch = (counts_ptr + bins, masses_ptr + bins, candidates_ptr + entry * MAX_CANDIDATES)
        if not wanted:
            tl.store(row_threshold_ptr + entry, float("-inf"))
        elif draft_logits_ptr is not None and not SAME_ROWS:
            if is_draft:
                filter_entry(
                    row_threshold_ptr, row_sum_ptr, buffers, candidate_counts_ptr, scratch, entry, draft_row,
                    parameters, num_shards, DRAFT_IS_PROBS, ALIGNED, FITS, FILTER_SHARD, BLOCK_SHARDS, NUM_BINS,
                    MAX_CANDIDATES,
                )  # fmt: skip
            else:
                filter_entry(
                    row_threshold_ptr, row_sum_ptr, buffers, candidate_counts_ptr, scratch, entry, target_row,
                    parameters, num_shards, TARGET_IS_PROBS, ALIGNED, FITS, FILTER_SHARD, BLOCK_SHARDS, NUM_BINS,
                    MAX_CANDIDATES,
                )  # fmt: skip
        else:
            filter_entry(
                row_threshold_ptr, row_sum_ptr, buffers, candidate_counts_ptr, scratch, entry, target_row,
                parameters, num_shards, TARGET_IS_PROBS, ALIGNED, FITS, FILTER_SHARD, BLOCK_SHARDS, NUM_BINS,
                MAX_CANDIDATES,
            )  # fmt: skip
