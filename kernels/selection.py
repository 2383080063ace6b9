"""Device functions that find the value at which a row reaches a count or a mass, without sorting the row.

A histogram of the values near the threshold holds counts, and masses in fixed point, whose sums do not depend on the
order of the atomic additions. It finds the bin that holds the threshold; the values of that bin are collected and
compared with one another, in float64 or in wider fixed point. `scratch` is (counts_ptr, masses_ptr, candidates_ptr) of
one program.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import exponent_scale, lowest, shifted_weights, weights_float64
from .contract import REST_SHARDS, TILE_SHARDS
from .tiles import load_tile, tile_ids

UNIT = tl.constexpr(2251799813685248.0)


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
def value_above(value):
    """Return the next greater float32."""
    return key_value(ordered_key(value).to(tl.int64) + 1)


@triton.jit
def value_below(value):
    """Return the next smaller float32; -inf below -inf."""
    return key_value(ordered_key(tl.maximum(value, -3.4028234663852886e38)).to(tl.int64) - 1)


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
def neighbours(values):
    """Return a tile as (1, shards, ids / 8, 8): a thread holds 8 neighbours."""
    return tl.reshape(values, (1, values.shape[1], values.shape[2] // 8, 8))


@triton.jit
def sweep_tile(
    row, first, low, high, row_max, scale, scratch, unit, low_key, bin_scale, shift, linear,
    COLLECT: tl.constexpr, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    SHARDS: tl.constexpr, FILTER_SHARD: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Bin or collect the values of a tile in low..high; return which are above `high`, and their weights."""
    counts_ptr, masses_ptr, candidates_ptr = scratch
    values = load_tile(row, first, IS_PROBS, ALIGNED, MASKED, SHARDS, FILTER_SHARD)
    inside = (values >= low) & (values <= high)
    above = values > high
    if MASKED:
        exists = tile_ids(first, SHARDS, FILTER_SHARD) < row[1]
        inside = inside & exists
        above = above & exists
    weights = shifted_weights(values, row_max, scale, IS_PROBS)
    if COLLECT:
        # The order of the slots is left to chance; what is made of the values does not depend on it.
        slots = tl.atomic_add(counts_ptr + tl.zeros(values.shape, tl.int32), 1, mask=inside, sem="relaxed")
        tl.store(candidates_ptr + slots, values, mask=inside & (slots < MAX_CANDIDATES))
    else:
        bins = tl.where(inside, bin_of(values, low, low_key, bin_scale, shift, linear, NUM_BINS), 0)
        mass = (tl.where(inside, weights, 0.0).to(tl.float64) * unit).to(tl.int64)
        tl.atomic_add(counts_ptr + bins, 1, mask=inside, sem="relaxed")
        tl.atomic_add(masses_ptr + bins, mass, mask=inside, sem="relaxed")
    count = tl.sum(neighbours(above.to(tl.int32)), axis=3)
    return count, tl.sum(neighbours(tl.where(above, weights, 0.0)), axis=3).to(tl.float64)


@triton.jit
def sweep(
    row, low, high, row_max, temperature, scratch, unit, low_key, bin_scale, shift, linear,
    COLLECT: tl.constexpr, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr,
    FILTER_SHARD: tl.constexpr, NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Read a row: count and weigh the values above `high`, bin or collect those in low..high."""
    # Half as many where a thread would run out of registers.
    PLAIN: tl.constexpr = len(row[2]) == 2 and len(row[3]) == 2
    WHOLE: tl.constexpr = PLAIN and ALIGNED and row[0].dtype.element_ty.primitive_bitwidth == 16
    SHARDS: tl.constexpr = TILE_SHARDS if WHOLE else REST_SHARDS
    TILE: tl.constexpr = SHARDS * FILTER_SHARD
    whole = (row[1] // TILE).to(tl.int64)
    zero = whole & 0
    scale = exponent_scale(temperature, IS_PROBS)
    # Every thread keeps its own sums, in float64: no thread waits for another before the end.
    counts = tl.zeros((1, SHARDS, FILTER_SHARD // 8), tl.int32)
    masses = tl.zeros((1, SHARDS, FILTER_SHARD // 8), tl.float64)
    for tile in range(whole):
        count, mass = sweep_tile(
            row, zero + tile * TILE, low, high, row_max, scale, scratch,
            unit, low_key, bin_scale, shift, linear,
            COLLECT, IS_PROBS, ALIGNED, False, SHARDS, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
        )  # fmt: skip
        counts += count
        masses += mass
    if whole * TILE < row[1]:
        count, mass = sweep_tile(
            row, whole * TILE, low, high, row_max, scale, scratch,
            unit, low_key, bin_scale, shift, linear,
            COLLECT, IS_PROBS, ALIGNED, True, SHARDS, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
        )  # fmt: skip
        counts += count
        masses += mass
    above_count = tl.sum(tl.sum(tl.sum(counts, axis=0), axis=1), axis=0)
    return above_count, tl.sum(tl.sum(tl.sum(masses, axis=0), axis=1), axis=0)


@triton.jit
def mass_of_tile(
    row, first, bound, row_max, temperature, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    FILTER_SHARD: tl.constexpr,
):  # fmt: skip
    """Return the float64 weights of the values >= bound of a tile, 0 for the others."""
    values = load_tile(row, first, IS_PROBS, ALIGNED, MASKED, REST_SHARDS, FILTER_SHARD)
    weights = weights_float64(values.to(tl.float64), row_max.to(tl.float64), temperature, IS_PROBS)
    return tl.sum(neighbours(tl.where((values >= bound) & (values > lowest(IS_PROBS)), weights, 0.0)), axis=3)


@triton.jit
def mass_of(
    row, bound, row_max, temperature, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FILTER_SHARD: tl.constexpr
):  # fmt: skip
    """Read a row: return the mass of all values >= bound, in float64 throughout."""
    SHARDS: tl.constexpr = REST_SHARDS
    TILE: tl.constexpr = SHARDS * FILTER_SHARD
    whole = (row[1] // TILE).to(tl.int64)
    masses = tl.zeros((1, SHARDS, FILTER_SHARD // 8), tl.float64)
    for tile in range(whole):
        masses += mass_of_tile(row, tile * TILE, bound, row_max, temperature, IS_PROBS, ALIGNED, False, FILTER_SHARD)
    if whole * TILE < row[1]:
        masses += mass_of_tile(row, whole * TILE, bound, row_max, temperature, IS_PROBS, ALIGNED, True, FILTER_SHARD)
    return tl.sum(tl.sum(tl.sum(masses, axis=0), axis=1), axis=0)


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
    row, low, row_max, temperature, row_sum, wanted, by_mass, scratch,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FILTER_SHARD: tl.constexpr,
    NUM_BINS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return an interval low..high that holds the threshold, and whether it and all above it can be collected.

    The interval holds at most MAX_CANDIDATES values, or one value only. `low` is a guess from where to start.
    """
    counts_ptr, masses_ptr = scratch[0], scratch[1]
    bins = tl.arange(0, NUM_BINS)
    # A power of two: whole weights stay whole, and their sum stays below 2**62.
    one = tl.full((), 1, tl.int64)
    unit = (one << (61 - bits_above(row_sum.to(tl.int64) + 1, 1))).to(tl.float64)
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
            row, low, high, row_max, temperature, scratch,
            unit, low_key, bin_scale, shift, linear,
            False, IS_PROBS, ALIGNED, FILTER_SHARD, NUM_BINS, MAX_CANDIDATES,
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
    return (tl.where(values == values, weights, 0.0) * UNIT + 0.5).to(tl.int64)


@triton.jit
def mass_from(values, weights, threshold, count, above_mass, MAX_CANDIDATES: tl.constexpr):
    """Return the mass of all values above the candidates and of the candidates >= threshold."""
    mass = tl.sum(tl.where(values >= threshold, weights, 0), axis=0).to(tl.float64) / UNIT
    # More than can be collected only where all are equal.
    return above_mass + tl.where(count > MAX_CANDIDATES, mass / MAX_CANDIDATES * count, mass)


@triton.jit
def smallest_kept(
    values, amounts, above, wanted, unit, floor, next_above, low, high
):  # fmt: skip
    """Return the smallest candidate >= floor such that the amount of greater values is below `wanted`.

    `amounts` are integers in units of 1 / unit; the candidates lie in low..high; `next_above` is the answer where no
    candidate is kept.
    """
    keys = ordered_key(values)
    last = ordered_key(high).to(tl.int64) + 1
    first = ordered_key(tl.maximum(low, floor)).to(tl.int64)
    # The amount of greater values falls with the key: halve the keys down to the first with little enough above it.
    while first < last:
        middle = (first + last) >> 1
        greater = tl.sum(tl.where(keys > middle.to(tl.int32), amounts, 0), axis=0).to(tl.float64) / unit
        little = above + greater < wanted
        last = tl.where(little, middle, last)
        first = tl.where(little, first, middle + 1)
    kept = (values >= floor) & (keys >= first.to(tl.int32))
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
