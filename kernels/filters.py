"""Filter thresholds: top-k, then top-p, then min-p, of every row that may decide; no sort, no copy of the row.

One program goes through some rows, one at a time. A filter keeps {id : value >= threshold}, where a value is kept iff

    top-k    fewer than k values are greater
    top-p    the mass of the greater values is < top_p * (mass that top-k keeps)
    min-p    value >= row_max + temperature * log(min_p)

so tied values are all kept or all dropped. A histogram of the values near the threshold (counts, and masses in fixed
point, whose sums do not depend on the order of the atomic additions) finds the bin that holds it; the values of that
bin are then collected and compared with one another in float64. More rounds narrow the bin only where it holds more
values than can be collected. The row is read twice as a rule, after the statistics; 20 KB of scratch a program.

Rows without a filter get the threshold -inf at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .arguments import load_real
from .blocks import (
    as_groups,
    exponent_scale,
    flag,
    kernel,
    load_shard,
    shifted_weights,
    sum_groups,
    weights_float64,
)
from .decide import load_sequence
from .emission import load_shards, round_up


@triton.jit
def ordered_key(values):
    """Return int32 keys that order as the float32 values do; the two zeros have one key."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Return the float32 value of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bin_of(values, low, low_key, bin_scale, shift, linear, NUM_BINS: tl.constexpr):
    """Return the bin of every value of an interval: equal steps of the value, or of its key."""
    if linear > 0:
        bins = tl.minimum(((values - low) * bin_scale).to(tl.int32), NUM_BINS - 1)
    else:
        steps = ordered_key(values).to(tl.uint32, bitcast=True) - low_key.to(tl.int32).to(tl.uint32, bitcast=True)
        bins = (steps >> shift.to(tl.uint32)).to(tl.int32)
    return bins


@triton.jit
def sweep(
    row_ptr, vocab, low, high, row_max, scale, scratch, unit, low_key, bin_scale, shift, linear,
    COLLECT: tl.constexpr, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Read a row: count and weigh the values above `high`, bin or collect those in low..high."""
    counts_ptr, masses_ptr, candidates_ptr = scratch
    above_count = tl.full((), 0, tl.int32)
    above_mass = tl.full((), 0.0, tl.float64)
    columns = tl.arange(0, BLOCK_VOCAB)
    for first in range(0, vocab, BLOCK_VOCAB):
        values = load_shard(row_ptr, first, vocab, IS_PROBS, ALIGNED, BLOCK_VOCAB)
        exists = columns < vocab - first
        inside = exists & (values >= low) & (values <= high)
        above = exists & (values > high)
        weights = shifted_weights(values, row_max, scale, IS_PROBS)
        above_count += tl.sum(above.to(tl.int32), axis=0)
        above_mass += tl.sum(sum_groups(as_groups(tl.where(above, weights, 0.0))).to(tl.float64), axis=0)
        if COLLECT:
            # The order of the slots is left to chance; what is made of the values does not depend on it.
            slots = tl.atomic_add(counts_ptr + columns * 0, 1, mask=inside, sem="relaxed")
            tl.store(candidates_ptr + slots, values, mask=inside & (slots < MAX_CANDIDATES))
        else:
            bins = tl.where(inside, bin_of(values, low, low_key, bin_scale, shift, linear, NUM_BINS), 0)
            mass = (tl.where(inside, weights, 0.0).to(tl.float64) * unit).to(tl.int64)
            tl.atomic_add(counts_ptr + bins, 1, mask=inside, sem="relaxed")
            tl.atomic_add(masses_ptr + bins, mass, mask=inside, sem="relaxed")
    return above_count, above_mass


@triton.jit
def highest_reaching(bins, amounts, above, wanted, NUM_BINS: tl.constexpr):
    """Return the highest bin with which the amount from the top reaches `wanted`; 0 if none does."""
    best = tl.full((), 0, tl.int32)
    step = tl.full((), NUM_BINS // 2, tl.int32)
    while step > 0:
        amount = above + tl.sum(tl.where(bins >= best + step, amounts, 0.0), axis=0)
        best = tl.where(amount >= wanted, best + step, best)
        step = step // 2
    return best


@triton.jit
def bits_above(value, LIMIT: tl.constexpr):
    """Return by how much to shift an int64 right to bring it below a power of two."""
    shift = tl.full((), 0, tl.int64)
    while (value >> shift) >= LIMIT:
        shift += 1
    return shift


@triton.jit
def narrow(
    row_ptr, vocab, low, row_max, scale, wanted, by_mass, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return an interval low..high of values that holds the threshold, and whether it and all above it can be collected.

    The interval holds at most MAX_CANDIDATES values, or one value only. `low` is a guess from where to start.
    """
    counts_ptr, masses_ptr = scratch[0], scratch[1]
    bins = tl.arange(0, NUM_BINS)
    # A power of two: whole weights stay whole, and the sum of a row stays below 2**62.
    one = tl.full((), 1, tl.int64)
    unit = (one << (61 - bits_above(vocab.to(tl.int64), 1))).to(tl.float64)
    high = row_max
    linear = tl.full((), 0 if IS_PROBS else 1, tl.int32)
    complete = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching > 0:
        tl.store(counts_ptr + bins, tl.zeros((NUM_BINS,), tl.int32))
        tl.store(masses_ptr + bins, tl.zeros((NUM_BINS,), tl.int64))
        tl.debug_barrier()
        low_key = ordered_key(low).to(tl.int64)
        high_key = ordered_key(high).to(tl.int64)
        shift = bits_above(high_key - low_key, NUM_BINS)
        bin_scale = NUM_BINS / tl.maximum(high - low, 1e-30)
        linear = tl.where((high - low < float("inf")) & (high - low > 1e-30), linear, 0)
        above_count, above_mass = sweep(
            row_ptr, vocab, low, high, row_max, scale, scratch, unit, low_key, bin_scale, shift, linear,
            False, IS_PROBS, ALIGNED, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
        )  # fmt: skip
        tl.debug_barrier()
        counts = tl.load(counts_ptr + bins, cache_modifier=".cg")
        masses = tl.load(masses_ptr + bins, cache_modifier=".cg").to(tl.float64) / unit
        tl.debug_barrier()
        amounts = tl.where(by_mass > 0, masses, counts.to(tl.float64))
        base = tl.where(by_mass > 0, above_mass, above_count.to(tl.float64))
        reached = base + tl.sum(amounts, axis=0) >= wanted
        chosen = highest_reaching(bins, amounts, base, wanted, NUM_BINS)
        bottom_key = low_key + (chosen.to(tl.int64) << shift)
        bottom = key_value(bottom_key)
        top = key_value(tl.minimum(bottom_key + (one << shift) - 1, high_key))
        # Wide enough for every value of the bin; neighbours that slip in are counted with those of the next bins.
        width = 1.0 / bin_scale
        slack = (tl.abs(low) + tl.abs(high) + (high - low)) * 1e-6
        bottom = tl.where(linear > 0, tl.maximum(low + chosen.to(tl.float32) * width - slack, low), bottom)
        top = tl.where(linear > 0, tl.minimum(low + (chosen + 1).to(tl.float32) * width + slack, high), top)
        near = (bins >= chosen - 1) & (bins <= chosen + 1)
        few = tl.sum(tl.where(near, counts, 0), axis=0) <= MAX_CANDIDATES
        all_few = above_count + tl.sum(tl.where(bins >= chosen - 1, counts, 0), axis=0) <= MAX_CANDIDATES
        fits = (linear == 0) | (slack < width)
        complete = tl.where(fits & all_few & reached, 1, 0)
        searching = tl.where((fits & few) | (bottom == top), 0, 1)
        # The guess may have been too high: go on below it, down to where everything is kept.
        exhausted = low == float("-inf")
        searching = tl.where(reached, searching, tl.where(exhausted, 0, 1))
        high = tl.where(reached, top, tl.where(exhausted, low, key_value(low_key - 1)))
        low = tl.where(reached, bottom, float("-inf"))
        linear = linear * 0
    return low, high, complete


@triton.jit
def candidate_weights(values, row_max, temperature, IS_PROBS: tl.constexpr):
    """Return weights in units of 2**-51: their sums do not depend on the order of the candidates."""
    weights = weights_float64(values.to(tl.float64), row_max.to(tl.float64), temperature, IS_PROBS)
    return (tl.where(values == values, weights, 0.0) * 2251799813685248.0 + 0.5).to(tl.int64)


@triton.jit
def mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES: tl.constexpr):
    """Return the mass of all values above the candidates and of the candidates >= threshold."""
    mass = tl.sum(tl.where(values >= threshold, weights, 0), axis=0).to(tl.float64) / 2251799813685248.0
    # More than can be collected only where all are equal.
    return above_mass + tl.where(count > MAX_CANDIDATES, mass / MAX_CANDIDATES * count, mass)


@triton.jit
def smallest_kept(
    candidates_ptr, values, weights, count, above, wanted, by_mass, floor, next_above, row_max, temperature,
    IS_PROBS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the smallest candidate >= floor such that the amount of greater values is below `wanted`.

    `next_above` is the answer where no candidate is kept.
    """
    CHUNK: tl.constexpr = 8
    greater = tl.zeros((MAX_CANDIDATES,), tl.int64)
    for start in range(0, tl.minimum(count, MAX_CANDIDATES), CHUNK):
        slots = start + tl.arange(0, CHUNK)
        others = tl.load(candidates_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
        amounts = tl.full((CHUNK,), 1, tl.int64)
        if by_mass > 0:
            amounts = candidate_weights(others, row_max, temperature, IS_PROBS)
        greater += tl.sum(tl.where(others[None, :] > values[:, None], amounts[None, :], 0), axis=1)
    amount = greater.to(tl.float64)
    if by_mass > 0:
        amount = amount / 2251799813685248.0
    kept = (values >= floor) & (above + amount < wanted)
    smallest = tl.min(tl.where(kept, values, float("inf")), axis=0)
    return tl.where(smallest < float("inf"), smallest, next_above)


@triton.jit
def nucleus_floor(row_max, temperature, mass, top_p, vocab, IS_PROBS: tl.constexpr):
    """Return a value below the top-p threshold: all ids below it together weigh less than what top-p may drop."""
    share = (1.0 - top_p) * mass / vocab.to(tl.float64) * 0.9999
    if IS_PROBS:
        floor = row_max.to(tl.float64) * tl.exp(tl.log(share) * temperature)
    else:
        floor = row_max.to(tl.float64) + temperature * tl.log(share)
    return tl.minimum(floor.to(tl.float32), row_max)


@triton.jit
def min_p_floor(min_p, temperature, row_max, IS_PROBS: tl.constexpr):
    """Return the min-p threshold; -inf where it is off."""
    if IS_PROBS:
        floor = row_max.to(tl.float64) * tl.exp(temperature * tl.log(min_p))
    else:
        floor = row_max.to(tl.float64) + temperature * tl.log(min_p)
    return tl.where(min_p > 0.0, floor, float("-inf"))


@triton.jit
def filter_row(
    row_ptr, vocab, top_k, top_p, min_p, temperature, row_max, lowest_max, row_sum, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the float64 threshold of a row and the mass that it keeps."""
    counts_ptr, candidates_ptr = scratch[0], scratch[2]
    slots = tl.arange(0, MAX_CANDIDATES)
    scale = exponent_scale(temperature, IS_PROBS)
    threshold = tl.full((), float("-inf"), tl.float32)
    high = row_max
    kept_mass = row_sum
    # Whether the candidates in memory are all the ids that are kept so far.
    complete = tl.full((), 0, tl.int32)
    count = tl.full((), 0, tl.int32)
    above_count = tl.full((), 0, tl.int32)
    above_mass = tl.full((), 0.0, tl.float64)
    floor = min_p_floor(min_p, temperature, row_max, IS_PROBS)
    for phase in range(0, 3):
        limits = flag(top_p < 1.0)
        if phase == 0:
            limits = (top_k > 0) & (top_k < vocab)
        if phase == 2:
            limits = flag(floor > threshold.to(tl.float64))
        if limits:
            wanted = top_p * kept_mass
            if phase == 0:
                wanted = top_k.to(tl.float64)
            if complete == 0:
                low = tl.full((), float("-inf"), tl.float32)
                if phase == 2:
                    # Nothing lies between these bounds: the row is summed only.
                    low = tl.full((), float("inf"), tl.float32)
                    high = key_value(ordered_key(round_up(floor)).to(tl.int64) - 1)
                elif FITS:
                    complete = complete + 1
                else:
                    low = 2.0 * lowest_max - row_max
                    if phase == 1:
                        low = nucleus_floor(row_max, temperature, kept_mass, tl.maximum(top_p, 0.0), vocab, IS_PROBS)
                    low, high, complete = narrow(
                        row_ptr, vocab, tl.maximum(low, threshold), row_max, scale, wanted, phase, scratch,
                        IS_PROBS, ALIGNED, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
                    )  # fmt: skip
                    high = tl.where(complete > 0, row_max, high)
                tl.store(counts_ptr, 0)
                tl.debug_barrier()
                above_count, above_mass = sweep(
                    row_ptr, vocab, low, high, row_max, scale, scratch, 1.0, 0, 1.0, 0, 0,
                    True, IS_PROBS, ALIGNED, BLOCK_VOCAB, NUM_BINS, MAX_CANDIDATES,
                )  # fmt: skip
                tl.debug_barrier()
                count = tl.load(counts_ptr, volatile=True)
            values = tl.load(candidates_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
            weights = candidate_weights(values, row_max, temperature, IS_PROBS)
            if phase == 2:
                threshold = round_up(floor)
            else:
                above = above_mass
                if phase == 0:
                    above = above_count.to(tl.float64)
                elif FITS:
                    wanted = top_p * mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES)
                threshold = smallest_kept(
                    candidates_ptr, values, weights, count, above, wanted, phase, threshold,
                    key_value(ordered_key(high).to(tl.int64) + 1), row_max, temperature, IS_PROBS, MAX_CANDIDATES,
                )  # fmt: skip
            kept_mass = mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES)
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
    row_threshold_ptr, row_sum_ptr, buffers, scratch, entry, row_ptr, top_k, top_p, min_p, temperature, vocab, num_shards,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write threshold and kept mass of one row that samples; -inf at once where no filter is on or it is invalid."""
    threshold = tl.full((), float("-inf"), tl.float64)
    limits = ((top_k > 0) & (top_k < vocab)) | flag(top_p < 1.0) | flag(min_p > 0.0)
    if limits:
        maxima, masses, row_max = load_shards(buffers, entry.to(tl.int64), num_shards, temperature, IS_PROBS, BLOCK_SHARDS)
        row_sum = tl.sum(masses, axis=0)
        if row_sum > 0.0:
            finite = tl.where(maxima > float("-inf"), maxima, float("inf"))
            threshold, kept_mass = filter_row(
                row_ptr, vocab, top_k, top_p, min_p, temperature, row_max.to(tl.float32), tl.min(finite, axis=0),
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
    gamma, vocab, num_shards, rows_per_sequence, num_rows,
    ALIGNED: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr, BLOCK_SHARDS: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    FITS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): program i filters rows i, i + programs, and so on."""
    program = tl.program_id(0)
    buffers = (shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, None, None, None)
    bins = program.to(tl.int64) * NUM_BINS
    scratch = (counts_ptr + bins, masses_ptr + bins, candidates_ptr + program.to(tl.int64) * MAX_CANDIDATES)
    for turn in range(0, tl.cdiv(num_rows - program, tl.num_programs(0))):
        entry = program + turn * tl.num_programs(0)
        sequence = (entry // rows_per_sequence).to(tl.int64)
        row = (entry % rows_per_sequence).to(tl.int64)
        status, length, target_offset, draft_offset, temperature, draft_temperature = load_sequence(
            integers_ptr, temperatures_ptr, sequence
        )
        runs = ((status & contract.INVALID_ARGUMENT) == 0) & flag(temperature > 0.0)
        is_target = row <= gamma
        index = tl.where(is_target, row, row - gamma - 1)
        target_row_ptr = target_logits_ptr + (target_offset + index * stride_target_row)
        top_k = load_top_k(top_k_ptr, stride_top_k, sequence)
        top_p = load_real(top_p_ptr, stride_top_p, sequence, 1.0)
        min_p = load_real(min_p_ptr, stride_min_p, sequence, 0.0)
        wanted = runs & (row <= length)
        if draft_logits_ptr is not None:
            draft_row_ptr = draft_logits_ptr + (draft_offset + index * stride_draft_row)
            top_k = tl.where(is_target, top_k, load_top_k(draft_top_k_ptr, stride_draft_top_k, sequence))
            top_p = tl.where(is_target, top_p, load_real(draft_top_p_ptr, stride_draft_top_p, sequence, 1.0))
            min_p = tl.where(is_target, min_p, load_real(draft_min_p_ptr, stride_draft_min_p, sequence, 0.0))
            temperature = tl.where(is_target, temperature, draft_temperature)
            drafted = (row > gamma) & (index < length) & flag(draft_temperature > 0.0)
            wanted = runs & ((row <= length) | drafted)
            if SHARED:
                if row > gamma:
                    target_row_ptr = draft_row_ptr
            elif wanted & (row > gamma):
                filter_entry(
                    row_threshold_ptr, row_sum_ptr, buffers, scratch, entry, draft_row_ptr,
                    top_k, top_p, min_p, temperature, vocab, num_shards,
                    DRAFT_IS_PROBS, ALIGNED, FITS, BLOCK_VOCAB, BLOCK_SHARDS, NUM_BINS, MAX_CANDIDATES,
                )  # fmt: skip
                wanted = wanted & (row <= gamma)
        if wanted:
            filter_entry(
                row_threshold_ptr, row_sum_ptr, buffers, scratch, entry, target_row_ptr,
                top_k, top_p, min_p, temperature, vocab, num_shards,
                TARGET_IS_PROBS, ALIGNED, FITS, BLOCK_VOCAB, BLOCK_SHARDS, NUM_BINS, MAX_CANDIDATES,
            )  # fmt: skip
