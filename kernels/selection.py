"""Device functions that find the value at which a row reaches a count or a mass, without sorting or copying the row.

The threshold is bracketed: from the key `low` on a row holds enough, from the key `high` on too little. One trip reads
the row and sums, in registers, what lies from each of two pivots on. The pivots are quantiles, a margin apart, of a
sample of the values that are still between the brackets, so that as a rule two trips leave fewer values than a list
takes; those are compared with one another.

A key is an integer that orders as the values do. DROPPED are the bits of it that values of a dtype never use.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import exponent_scale, lowest, shifted_weights, weights_float64
from .contract import SEARCH_SHARDS, TILE_SHARDS
from .tiles import load_sample, load_tile

UNIT = tl.constexpr(2251799813685248.0)
# More than twice the relative error of a sum of float32 weights, of which 5e-7 is the bound.
SUM_ERROR = tl.constexpr(1.2e-6)


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
def short_key(value, DROPPED: tl.constexpr):
    """Return the int64 key of a value without the bits that no value of its dtype uses."""
    return ordered_key(value).to(tl.int64) >> DROPPED


@triton.jit
def short_value(key, DROPPED: tl.constexpr):
    """Return the value of a short key."""
    return key_value((key << DROPPED) + tl.where(key < 0, (1 << DROPPED) - 1, 0))


@triton.jit
def short_key_up(value, DROPPED: tl.constexpr):
    """Return the short key of the smallest value of the dtype that is not below a float32."""
    key = short_key(value, DROPPED)
    return tl.where(short_value(key, DROPPED) < value, key + 1, key)


@triton.jit
def amounts_of(values, row_max, temperature, by_count, IS_PROBS: tl.constexpr, WIDE: tl.constexpr):
    """Return what each value with mass adds: 1 where values are counted, else its weight, in float64 where WIDE."""
    if WIDE:
        amounts = weights_float64(values.to(tl.float64), row_max.to(tl.float64), temperature, IS_PROBS)
    elif IS_PROBS:
        weights = shifted_weights(values, row_max, exponent_scale(temperature, IS_PROBS), IS_PROBS)
        amounts = tl.where(by_count > 0, 1.0, weights)
    else:
        # An exponential of 0 counts: choosing between the two would cost an instruction a logit.
        shift = tl.where(by_count > 0, 0.0, row_max)
        scale = tl.where(by_count > 0, 0.0, exponent_scale(temperature, IS_PROBS))
        amounts = shifted_weights(values, shift, scale, IS_PROBS)
    return amounts


@triton.jit
def split_pairs(values):
    """Return the first and the second neighbour of each pair of a tile."""
    return tl.split(tl.reshape(values, (values.shape[0], values.shape[1], values.shape[2] // 2, 2)))


@triton.jit
def sum_tile(
    row, first, low, high, row_max, temperature, by_count, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, SHARDS: tl.constexpr, SHARD: tl.constexpr, SKEW: tl.constexpr,
):  # fmt: skip
    """Return what the values >= low and those >= high of a tile add up to, by threads: each holds 8 neighbours."""
    values = load_tile(row, first, IS_PROBS, ALIGNED, MASKED, SHARDS, SHARD, SKEW)
    from_low = tl.zeros((values.shape[0], SHARDS, values.shape[2] // 8), tl.float64 if WIDE else tl.float32)
    from_high = from_low
    halves = split_pairs(values)
    # One neighbour after another: an addition that a comparison lets through is one instruction, a choice is another.
    for half in tl.static_range(2):
        quarters = split_pairs(halves[half])
        for quarter in tl.static_range(2):
            eighths = split_pairs(quarters[quarter])
            for eighth in tl.static_range(2):
                amounts = amounts_of(eighths[eighth], row_max, temperature, by_count, IS_PROBS, WIDE)
                from_low = tl.where(eighths[eighth] >= low, from_low + amounts, from_low)
                from_high = tl.where(eighths[eighth] >= high, from_high + amounts, from_high)
    return tl.sum(from_low, axis=0).to(tl.float64), tl.sum(from_high, axis=0).to(tl.float64)


@triton.jit
def sweep(
    row, low, high, row_max, temperature, by_count, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Read a row once; return the amount of its values >= low and of those >= high, in float64."""
    PART: tl.constexpr = SHARD if SHARD < 256 else 256
    more = tl.zeros((TILE_SHARDS, PART // 8), tl.float64)
    fewer = tl.zeros((TILE_SHARDS, PART // 8), tl.float64)
    low_sum = tl.sum(tl.sum(more, axis=1), axis=0)
    high_sum = low_sum
    first = row[1] & 0
    zero = first.to(tl.int64)
    # Every thread keeps its own sums: none waits for another before the end. Float64, a bias and a mask take registers.
    if not WIDE:
        PLAIN: tl.constexpr = len(row[2]) == 2 and len(row[3]) == 2
        SHARDS: tl.constexpr = SEARCH_SHARDS if PLAIN else TILE_SHARDS
        SIZE: tl.constexpr = SHARD * 16 // row[0].dtype.element_ty.primitive_bitwidth if PLAIN else SHARD
        TILE: tl.constexpr = SHARDS * SIZE
        first = row[1] - row[1] % TILE
        from_low = tl.zeros((SHARDS, PART // 8), tl.float64)
        from_high = tl.zeros((SHARDS, PART // 8), tl.float64)
        # A loop for each place in 8 bytes where a row may start: none of them has to choose words and shifts by it.
        skew = zero if ALIGNED else row[0].to(tl.int64) & 7
        for SKEW in tl.static_range(0, 1 if ALIGNED else 8, row[0].dtype.element_ty.primitive_bitwidth // 8):
            if skew == SKEW:
                for tile in range(0, first, TILE):
                    from_tile, from_tile_high = sum_tile(
                        row, zero + tile, low, high, row_max, temperature, by_count,
                        IS_PROBS, ALIGNED, False, WIDE, SHARDS, SIZE, SKEW,
                    )  # fmt: skip
                    from_low += from_tile
                    from_high += from_tile_high
        low_sum = tl.sum(tl.sum(from_low, axis=1), axis=0)
        high_sum = tl.sum(tl.sum(from_high, axis=1), axis=0)
    for tile in range(first, row[1], TILE_SHARDS * PART):
        from_tile, from_tile_high = sum_tile(
            row, zero + tile, low, high, row_max, temperature, by_count,
            IS_PROBS, ALIGNED, True, WIDE, TILE_SHARDS, PART, None,
        )  # fmt: skip
        more += from_tile
        fewer += from_tile_high
    return low_sum + tl.sum(tl.sum(more, axis=1), axis=0), high_sum + tl.sum(tl.sum(fewer, axis=1), axis=0)


@triton.jit
def sum_sample(amounts):
    """Return the sum of a sample."""
    return tl.sum(tl.sum(tl.sum(tl.sum(amounts, axis=3), axis=2), axis=1), axis=0)


@triton.jit
def quantile(keys, amounts, low, high, wanted):
    """Return the highest key of low..high from which on the amounts reach `wanted`; `low` if none does."""
    while high - low > 1:
        middle = (low + high) >> 1
        enough = sum_sample(tl.where(keys >= middle.to(tl.int32), amounts, 0.0)) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def pivots(
    row, low, high, below, above, wanted, row_max, temperature, by_count, trip,
    IS_PROBS: tl.constexpr, DROPPED: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Return two keys between low and high, of which the threshold is likely to lie between."""
    values = load_sample(row, IS_PROBS, SAMPLE)
    keys = ordered_key(values) >> DROPPED
    amounts = amounts_of(values, row_max, temperature, by_count, IS_PROBS, False)
    inside = (keys >= low.to(tl.int32)) & (keys < high.to(tl.int32)) & (values > lowest(IS_PROBS))
    amounts = tl.where(inside, amounts, 0.0)
    total = sum_sample(amounts)
    share = tl.minimum(tl.maximum((wanted - above) / (below - above), 0.0), 1.0).to(tl.float32)
    middle = quantile(keys, amounts, low, high, share * total)
    # Two standard deviations of the share that a sample of the values in between has from `middle` on.
    upper = sum_sample(tl.where(keys >= middle.to(tl.int32), amounts * amounts, 0.0))
    lower = sum_sample(tl.where(keys >= middle.to(tl.int32), 0.0, amounts * amounts))
    margin = 2.0 * tl.sqrt((1.0 - share) * (1.0 - share) * upper + share * share * lower)
    first = quantile(keys, amounts, low, high, share * total + margin)
    second = quantile(keys, amounts, low, high, share * total - margin) + 1
    # Thirds, which no row can fool, where the sample holds little and from time to time.
    sampled = (sum_sample((amounts > 0.0).to(tl.int32)) >= 8) & (trip % 4 != 3)
    third = (high - low) // 3
    first = tl.maximum(tl.where(sampled, first, low + third), low + 1)
    second = tl.where(sampled, second, high - third)
    return first, tl.maximum(tl.minimum(second, high - 1), first)


@triton.jit
def narrow(
    row, low, high, below, above, wanted, top_p, kept, sums, wide, covered, row_max, temperature, by_count,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, DROPPED: tl.constexpr,
    SHARD: tl.constexpr, SAMPLE: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Narrow low..high until few values lie between, or float32 weights cannot tell on which side of `wanted` one is.

    Where `sums` the first trip weighs all that is kept so far, of which top-p wants its share. `wide` weighs in
    float64; `covered`: no more than the first trip is needed. Returns (low, high, what the row holds from each on,
    wanted, whether few values are left).
    """
    trip = tl.full((), 0, tl.int32)
    few = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    while going > 0:
        first = kept
        second = high
        if sums == 0:
            first, second = pivots(
                row, low, high, below, above, wanted, row_max, temperature, by_count, trip, IS_PROBS, DROPPED, SAMPLE
            )
        from_value = short_value(first, DROPPED)
        to_value = short_value(second, DROPPED)
        if wide > 0:
            more, fewer = sweep(
                row, from_value, to_value, row_max, temperature, by_count, IS_PROBS, ALIGNED, True, SHARD
            )
        else:
            more, fewer = sweep(
                row, from_value, to_value, row_max, temperature, by_count, IS_PROBS, ALIGNED, False, SHARD
            )
        width = high - low
        if sums > 0:
            wanted = top_p * more
            below = more
            above = fewer
        slack = tl.where((by_count > 0) | (wide > 0), 0.0, wanted * SUM_ERROR)
        if sums == 0:
            below = tl.where(fewer >= wanted + slack, fewer, tl.where(more >= wanted + slack, more, below))
            low = tl.where(fewer >= wanted + slack, second, tl.where(more >= wanted + slack, first, low))
            above = tl.where(more < wanted - slack, more, tl.where(fewer < wanted - slack, fewer, above))
            high = tl.where(more < wanted - slack, first, tl.where(fewer < wanted - slack, second, high))
        # No value in between adds less than one at `low` would.
        least = amounts_of(short_value(low, DROPPED), row_max, temperature, by_count, IS_PROBS, False)
        few = tl.where(below - above + slack <= least.to(tl.float64) * MAX_CANDIDATES, 1, covered)
        stuck = (sums == 0) & (high - low == width)
        going = tl.where((few > 0) | stuck | (high - low <= 1), 0, 1)
        sums = sums * 0
        trip += 1
    return low, high, below, above, wanted, few


@triton.jit
def candidate_weights(values, row_max, temperature, IS_PROBS: tl.constexpr):
    """Return weights in units of 2**-51: their sums do not depend on the order of the candidates."""
    weights = weights_float64(values.to(tl.float64), row_max.to(tl.float64), temperature, IS_PROBS)
    return (tl.where(values == values, weights, 0.0) * UNIT + 0.5).to(tl.int64)


@triton.jit
def total_from(values, amounts, threshold):
    """Return what the candidates >= threshold add up to, in float64."""
    return tl.sum(tl.where(values >= threshold, amounts, 0), axis=0).to(tl.float64) / UNIT


@triton.jit
def smallest_kept(values, amounts, above, wanted, low, high):
    """Return the smallest candidate with less than `wanted` above it, +inf if none has.

    The candidates lie in low..high, int64 keys of float32 values, and `above` is the amount of all greater values.
    """
    keys = ordered_key(values)
    while low < high:
        middle = (low + high) >> 1
        greater = tl.sum(tl.where(keys > middle.to(tl.int32), amounts, 0), axis=0).to(tl.float64) / UNIT
        little = above + greater < wanted
        high = tl.where(little, middle, high)
        low = tl.where(little, low, middle + 1)
    return tl.min(tl.where(keys >= low.to(tl.int32), values, float("inf")), axis=0)


@triton.jit
def nucleus_floor(row_max, temperature, mass, top_p, vocab, IS_PROBS: tl.constexpr):
    """Return a value below the top-p threshold: all ids below it together weigh less than what top-p may drop."""
    share = (1.0 - top_p) * mass / vocab.to(tl.float64) * 0.9999
    if IS_PROBS:
        floor = row_max.to(tl.float64) * tl.exp(tl.log(share) * temperature)
    else:
        floor = row_max.to(tl.float64) + temperature * tl.log(share)
    return tl.minimum(floor.to(tl.float32), row_max)
