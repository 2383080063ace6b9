"""Filter thresholds: top-k, then top-p, then min-p, of every row that may decide; no sort, no copy of the row.

One program goes through some rows, one at a time. A filter keeps {id : value >= threshold}, where a value is kept iff

    top-k    fewer than k values are greater
    top-p    the mass of the greater values is < top_p * (mass that top-k keeps)
    min-p    value >= row_max + temperature * log(min_p)

so tied values are all kept or all dropped. Bytes per logit: its own size, read once for min-p alone and twice as a rule
for top-k and top-p: once to bin the values, once to collect those of the bin that holds the threshold. Top-p on top of
a top-k that keeps more than MAX_CANDIDATES ids bins and collects again, a bin with too many different values is divided
again, and where the boundary of top-p is too close for float32 weights the row is weighed again in float64. 16 KB of
scratch a program. Rows without a filter get the threshold -inf at once.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .arguments import load_real
from .blocks import flag, kernel
from .decide import load_sequence
from .emission import load_shards, round_up
from .rows import row_at, rows_of
from .selection import (
    candidate_weights,
    mass_from,
    narrow,
    nucleus_floor,
    smallest_kept,
    sweep,
    value_above,
    value_below,
)

# The filters in their order; top-p a second time, in float64, where float32 weights leave a doubt.
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
PRECISE_SUM = tl.constexpr(2)
PRECISE_TOP_P = tl.constexpr(3)
MIN_P = tl.constexpr(4)


@triton.jit
def min_p_floor(min_p, temperature, row_max, IS_PROBS: tl.constexpr):
    """Return the min-p threshold; -inf where it is off."""
    if IS_PROBS:
        floor = row_max.to(tl.float64) * tl.exp(temperature * tl.log(min_p))
    else:
        floor = row_max.to(tl.float64) + temperature * tl.log(min_p)
    return tl.where(min_p > 0.0, floor, float("-inf"))


@triton.jit
def collect(
    row, bound, row_max, lowest_max, temperature, row_sum, top_p, kept_mass, wanted,
    by_mass, precise, sums_only, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Collect the values around the threshold, which is not below `bound`, and weigh those above them.

    Returns (highest value collected, whether all above the threshold are, how many are, count and mass above them);
    with `sums_only` nothing is collected and the values >= bound are weighed.
    """
    low = tl.full((), float("-inf"), tl.float32)
    high = row_max
    complete = tl.full((), 0, tl.int32)
    if sums_only:
        # Nothing lies between these bounds: the row is summed only.
        low = tl.full((), float("inf"), tl.float32)
        high = value_below(bound)
    elif FITS:
        complete = complete + 1
    else:
        low = 2.0 * lowest_max - row_max
        if by_mass > 0:
            low = nucleus_floor(row_max, temperature, kept_mass, tl.maximum(top_p, 0.0), row[1], IS_PROBS)
        low, high, complete = narrow(
            row, tl.maximum(low, bound), row_max, temperature, row_sum, wanted, by_mass, precise, scratch,
            IS_PROBS, ALIGNED, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
        )  # fmt: skip
        high = tl.where(complete > 0, row_max, high)
    tl.store(scratch[0], 0)
    tl.debug_barrier()
    above_count, above_mass = sweep(
        row, low, high, row_max, temperature, precise, scratch, 1.0, 0, 1.0, 0, 0,
        True, IS_PROBS, ALIGNED, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
    )  # fmt: skip
    tl.debug_barrier()
    return high, complete, tl.load(scratch[0], volatile=True), above_count, above_mass


@triton.jit
def filter_row(
    row, top_k, top_p, min_p, temperature, row_max, lowest_max, row_sum, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the float64 threshold of a row and the mass that it keeps."""
    candidates_ptr = scratch[2]
    slots = tl.arange(0, MAX_CANDIDATES)
    threshold = tl.full((), float("-inf"), tl.float32)
    top_k_threshold = threshold
    high = row_max
    kept_mass = row_sum
    # Whether the candidates in memory are all the ids that are kept so far.
    complete = tl.full((), 0, tl.int32)
    close = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    above_count = tl.full((), 0, tl.int32)
    above_mass = tl.full((), 0.0, tl.float64)
    floor = min_p_floor(min_p, temperature, row_max, IS_PROBS)
    for phase in range(TOP_K, MIN_P + 1):
        limits = (top_k > 0) & (top_k < row[1])
        if phase == TOP_P:
            limits = flag(top_p < 1.0)
        if (phase == PRECISE_SUM) | (phase == PRECISE_TOP_P):
            limits = close > 0
        if phase == MIN_P:
            limits = flag(floor > threshold.to(tl.float64))
        if limits:
            sums_only = (phase == PRECISE_SUM) | (phase == MIN_P)
            by_mass = tl.where(phase == TOP_K, 0, 1)
            precise = tl.where((phase == PRECISE_SUM) | (phase == PRECISE_TOP_P), 1, 0)
            wanted = top_p * kept_mass
            if phase == TOP_K:
                wanted = top_k.to(tl.float64)
            exact = tl.where(FITS, 1, complete)
            if complete == 0:
                bound = tl.where(phase == MIN_P, round_up(floor), threshold)
                high, complete, count, above_count, above_mass = collect(
                    row, bound, row_max, lowest_max, temperature, row_sum, top_p, kept_mass, wanted,
                    by_mass, precise, sums_only, scratch,
                    IS_PROBS, ALIGNED, FITS, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
                )  # fmt: skip
            values = tl.load(candidates_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
            weights = candidate_weights(values, row_max, temperature, IS_PROBS)
            if phase == MIN_P:
                threshold = round_up(floor)
            elif phase != PRECISE_SUM:
                above = above_mass
                if phase == TOP_K:
                    above = above_count.to(tl.float64)
                elif FITS:
                    wanted = top_p * mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES)
                threshold = smallest_kept(
                    candidates_ptr, values, count, above, wanted, by_mass, threshold, value_above(high),
                    row_max, temperature, IS_PROBS, MAX_CANDIDATES,
                )  # fmt: skip
            kept_mass = mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES)
            if phase == TOP_K:
                top_k_threshold = threshold
            if phase == TOP_P:
                # Float32 weights are trusted where they leave no doubt on which side of top-p a value lies.
                without = mass_from(values, weights, value_above(threshold), count, above_mass, MAX_CANDIDATES)
                doubt = flag(tl.minimum(wanted - without, kept_mass - wanted) < 2e-6 * wanted)
                if (exact == 0) & doubt:
                    close = close + 1
                    complete = complete * 0
                    threshold = top_k_threshold
            tl.debug_barrier()
    # Where min-p decides, its float64 value is the threshold, not the float32 above it.
    return tl.where(threshold == round_up(floor), floor, threshold.to(tl.float64)), kept_mass


@triton.jit
def load_top_k(pointer, stride, sequence):
    """Return the top-k of a sequence as int32; 0 is off."""
    if pointer is None:
        value = tl.full((), 0, tl.int32)
    else:
        value = tl.minimum(tl.maximum(tl.load(pointer + sequence * stride), 0), 0x7FFFFFFF).to(tl.int32)
    return value


@triton.jit
def filter_entry(
    row_threshold_ptr, row_sum_ptr, buffers, scratch, entry,
    row, top_k, top_p, min_p, temperature, num_shards,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write threshold and kept mass of one row that samples; -inf at once where no filter is on or it is invalid."""
    threshold = tl.full((), float("-inf"), tl.float64)
    limits = ((top_k > 0) & (top_k < row[1])) | flag(top_p < 1.0) | flag(min_p > 0.0)
    if limits:
        maxima, masses, row_max = load_shards(buffers, entry, num_shards, temperature, IS_PROBS, BLOCK_SHARDS)
        row_sum = tl.sum(masses, axis=0)
        if row_sum > 0.0:
            finite = tl.where(maxima > float("-inf"), maxima, float("inf"))
            threshold, kept_mass = filter_row(
                row, top_k, top_p, min_p, temperature, row_max.to(tl.float32), tl.min(finite, axis=0),
                row_sum, scratch, IS_PROBS, ALIGNED, FITS, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
            )  # fmt: skip
            tl.store(row_sum_ptr + entry, kept_mass)
    tl.store(row_threshold_ptr + entry, threshold)


@kernel
def filter_thresholds(
    row_threshold_ptr, row_sum_ptr,  # (batch, rows_per_sequence)
    counts_ptr, masses_ptr, candidates_ptr,  # (programs, NUM_BINS), likewise, (programs, MAX_CANDIDATES)
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
    BLOCK_VOCAB: tl.constexpr, BLOCK_SHARDS: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    FITS: tl.constexpr, SAME_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): program i filters rows i, i + programs, and so on."""
    program = tl.program_id(0)
    buffers = (shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, None, None, None)
    bins = program.to(tl.int64) * NUM_BINS
    scratch = (counts_ptr + bins, masses_ptr + bins, candidates_ptr + program.to(tl.int64) * MAX_CANDIDATES)
    for turn in range(program, num_rows, tl.num_programs(0)):
        sequence = (turn // rows_per_sequence).to(tl.int64)
        row = (turn % rows_per_sequence).to(tl.int64)
        entry = sequence * rows_per_sequence + row
        status, length, target_offset, draft_offset, front, start, temperature, draft_temperature = load_sequence(
            integers_ptr, temperatures_ptr, sequence
        )
        runs = ((status & contract.INVALID_ARGUMENT) == 0) & flag(temperature > 0.0)
        is_target = row <= gamma
        index = tl.where(is_target, row, row - gamma - 1)
        target_rows = rows_of(
            target_logits_ptr, target_offset, stride_target_row, vocab, sequence, front,
            (bias_offsets_ptr, bias_ids_ptr, bias_values_ptr),
            (allowed_ptr, stride_allowed_sequence, stride_allowed_row),
        )  # fmt: skip
        draft_rows = rows_of(
            draft_logits_ptr, draft_offset, stride_draft_row, draft_vocab, sequence, start,
            (draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr),
            (draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row),
        )  # fmt: skip
        target_row = row_at(target_rows, index)
        row_ptr = target_row[0]
        top_k = load_top_k(top_k_ptr, stride_top_k, sequence)
        top_p = load_real(top_p_ptr, stride_top_p, sequence, 1.0)
        min_p = load_real(min_p_ptr, stride_min_p, sequence, 0.0)
        wanted = runs & (row <= length)
        if draft_logits_ptr is not None:
            top_k = tl.where(is_target, top_k, load_top_k(draft_top_k_ptr, stride_draft_top_k, sequence))
            top_p = tl.where(is_target, top_p, load_real(draft_top_p_ptr, stride_draft_top_p, sequence, 1.0))
            min_p = tl.where(is_target, min_p, load_real(draft_min_p_ptr, stride_draft_min_p, sequence, 0.0))
            temperature = tl.where(is_target, temperature, draft_temperature)
            drafted = (row > gamma) & (index < length) & flag(draft_temperature > 0.0)
            wanted = runs & ((row <= length) | drafted)
            if SAME_ROWS:
                if row > gamma:
                    # Neither has a bias or a mask here, so the rows differ by their address only.
                    row_ptr = draft_logits_ptr + (draft_offset + index * stride_draft_row)
            elif wanted & (row > gamma):
                filter_entry(
                    row_threshold_ptr, row_sum_ptr, buffers, scratch, entry, row_at(draft_rows, index),
                    top_k, top_p, min_p, temperature, num_shards,
                    DRAFT_IS_PROBS, ALIGNED, FITS, BLOCK_VOCAB, BLOCK_SHARDS, NUM_BINS, MAX_CANDIDATES,
                )  # fmt: skip
                wanted = wanted & (row <= gamma)
        if wanted:
            filter_entry(
                row_threshold_ptr, row_sum_ptr, buffers, scratch, entry,
                (row_ptr, vocab, target_row[2], target_row[3]), top_k, top_p, min_p, temperature, num_shards,
                TARGET_IS_PROBS, ALIGNED, FITS, BLOCK_VOCAB, BLOCK_SHARDS, NUM_BINS, MAX_CANDIDATES,
            )  # fmt: skip
