"""Device functions of a tile: what a program reads in one trip, and the sums of its shards, without a barrier.

A tile is some shards behind one another, held as (parts, shards, ids): the compiler gives a warp whole
shards and a thread 8 neighbouring ids of every part, so that a shard is summed inside its warp. Terms are added in
one order, by id, whatever the dtype of the row and wherever it lies in memory:

    sums of 4 neighbours, of the 4 parts of a shard (16 terms in float32), then of the whole shard in float64

Rows that do not start at a multiple of 16 bytes are read by the aligned 128-bit words that hold them, and shifted in
registers, so that they cost arithmetic instead of narrow loads; the end of a row is read by whole words as well. Memory
is allocated in units of no less than such a word, so what lies beside a row in its first or last one can be read.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import lowest, safe_shift, shifted_weights
from .rows import biased

# Ids of a shard that 32 threads read at once, 8 each.
PART = tl.constexpr(256)


@triton.jit
def tile_offsets(SHARDS: tl.constexpr, SHARD: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of the ids of a tile as int64 (SHARD / WIDTH, SHARDS, WIDTH)."""
    parts = tl.arange(0, SHARD // WIDTH).to(tl.int64) * WIDTH
    shards = tl.arange(0, SHARDS).to(tl.int64) * SHARD
    return parts[:, None, None] + shards[None, :, None] + tl.arange(0, WIDTH).to(tl.int64)[None, None, :]


@triton.jit
def tile_ids(first, SHARDS: tl.constexpr, SHARD: tl.constexpr):
    """Return the int32 ids of a tile in the shape of its values."""
    return (first + tile_offsets(SHARDS, SHARD, (SHARD if SHARD < PART else PART))).to(tl.int32)


@triton.jit
def split_units(words):
    """Return the first, second, third and fourth 32-bit words of the units of 16 bytes of a tile."""
    pairs = tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2] // 4, 2, 2))
    even, odd = tl.split(pairs)
    word0, word2 = tl.split(even)
    word1, word3 = tl.split(odd)
    return word0, word1, word2, word3


@triton.jit
def shift_words(low, high, shift):
    """Return 32 bits of two words that lie behind one another, from bit `shift`, below 32, on."""
    # In two steps, as 32 bits are too many for one; the compiler knows it for a funnel shift: one instruction a word.
    upper = (high.to(tl.uint32, bitcast=True) << 1) << (shift ^ 31)
    return (upper + (low.to(tl.uint32, bitcast=True) >> shift)).to(tl.int32, bitcast=True)


@triton.jit
def shift_units(units, following, skew, SKEW: tl.constexpr, HALVES: tl.constexpr):
    """Return the 4 words from byte `skew` on of units and of those that follow them; HALVES: it may be in a word."""
    word0, word1, word2, word3 = units
    word4, word5, word6, word7 = following
    # By two words, by one word, by bytes.
    two = (skew & 8) > 0
    if SKEW is None:
        word0, word1, word2 = tl.where(two, word2, word0), tl.where(two, word3, word1), tl.where(two, word4, word2)
        word3, word4, word5 = tl.where(two, word5, word3), tl.where(two, word6, word4), tl.where(two, word7, word5)
        one = (skew & 4) > 0
        word0, word1, word2 = tl.where(one, word1, word0), tl.where(one, word2, word1), tl.where(one, word3, word2)
        word3, word4 = tl.where(one, word4, word3), tl.where(one, word5, word4)
    elif SKEW < 4:
        word0, word1, word2 = tl.where(two, word2, word0), tl.where(two, word3, word1), tl.where(two, word4, word2)
        word3, word4 = tl.where(two, word5, word3), tl.where(two, word6, word4)
    else:
        word0, word1, word2 = tl.where(two, word3, word1), tl.where(two, word4, word2), tl.where(two, word5, word3)
        word3, word4 = tl.where(two, word6, word4), tl.where(two, word7, word5)
    if HALVES:
        shift = ((skew & 3) * 8).to(tl.uint32)
        if SKEW is not None:
            shift = tl.full((), SKEW % 4 * 8, tl.uint32)
        word0, word1 = shift_words(word0, word1, shift), shift_words(word1, word2, shift)
        word2, word3 = shift_words(word2, word3, shift), shift_words(word3, word4, shift)
    return word0, word1, word2, word3


@triton.jit
def load_words(
    row_ptr, first, limit, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    SHARDS: tl.constexpr, SHARD: tl.constexpr, WIDTH: tl.constexpr, SKEW: tl.constexpr,
):  # fmt: skip
    """Return the float32 values of a tile, read by the aligned 128-bit words that hold them.

    MASKED loads no word that holds nothing of the row; what lies past its end in the last one is loaded with it.
    SKEW: bytes by which the row starts behind a multiple of 8, None where they are not known while compiling.
    """
    BITS: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth
    # Values in a 32-bit word, the unit that is shifted.
    VALUES: tl.constexpr = 32 // BITS
    words_ptr = (row_ptr + first).to(tl.pointer_type(tl.int32), bitcast=True)
    skew = first & 0
    if not ALIGNED:
        # That of the row is that of its tiles. Where it takes many registers, it is computed again in every trip.
        KEEPS: tl.constexpr = BITS == 32 or SKEW is not None
        skew = (row_ptr if KEEPS else row_ptr + first).to(tl.int64) & 15
        words_ptr = (row_ptr.to(tl.int64) - skew + first * (BITS // 8)).to(tl.pointer_type(tl.int32))
    words = tile_offsets(SHARDS, SHARD // VALUES, WIDTH // VALUES)
    # A unit, of 16 bytes, is read if it begins before the end of the row.
    last = ((limit * (BITS // 8) + skew + 15) // 16).to(tl.int32)
    near_ptrs = tl.multiple_of(words_ptr + words, (16, 16, 16))
    near = tl.load(near_ptrs, mask=(words // 4).to(tl.int32) < last, other=0) if MASKED else tl.load(near_ptrs)
    word0, word1, word2, word3 = split_units(near)
    if not ALIGNED:
        # Where the row is aligned after all, the words that follow are the same ones: nothing past them is read.
        following = words + tl.where(skew > 0, 4, 0)
        far_ptrs = tl.multiple_of(words_ptr + following, (16, 16, 16))
        far = tl.load(far_ptrs, mask=(following // 4).to(tl.int32) < last, other=0) if MASKED else tl.load(far_ptrs)
        units = (word0, word1, word2, word3)
        word0, word1, word2, word3 = shift_units(units, split_units(far), skew, SKEW, BITS < 32)
    values = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    if BITS == 32:
        values = values.to(tl.float32, bitcast=True)
    elif row_ptr.dtype.element_ty == tl.bfloat16:
        # The upper half of a float32: an instruction for each of the two, where the conversion takes three.
        values = tl.join(values << 16, values & -65536).to(tl.float32, bitcast=True)
    else:
        halves = tl.join(values.to(tl.uint16), (values.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16))
        values = halves.to(row_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    return tl.reshape(values, (SHARD // WIDTH, SHARDS, WIDTH))


@triton.jit
def biased_groups(groups, order, first, count, row, IS_PROBS: tl.constexpr):
    """Return groups of 8 neighbours, the `order`-th from id `first` on, with the biases of the next `count` ids."""
    begin, end, ids_ptr, values_ptr = row[2]
    place = tl.arange(0, 8)[None, None, None, :]
    for entry in range(begin, end):
        offset = tl.load(ids_ptr + entry) - first
        if (offset >= 0) & (offset < count):
            here = (order[:, :, :, None] == (offset // 8).to(tl.int32)) & (place == (offset % 8).to(tl.int32))
            groups = tl.where(here, biased(groups, values_ptr + entry, IS_PROBS), groups)
    return groups


@triton.jit
def adjusted_groups(groups, order, first, count, row, IS_PROBS: tl.constexpr):
    """Return groups of 8 neighbours, which a thread holds, with bias and mask applied; a group takes one word of it."""
    if len(row[2]) > 2:
        groups = biased_groups(groups, order, first, count, row, IS_PROBS)
    if len(row[3]) > 2:
        _, offset, allowed_ptr = row[3]
        # A tile starts at a multiple of 32 ids, so that the words of its groups need no 64 bits.
        inside = order < ((row[1] - first + 7) // 8).to(tl.int32)
        words = tl.load(allowed_ptr + (offset + first // 32) + (order >> 2), mask=inside, other=0) >> ((order & 3) << 3)
        bits = (words[:, :, :, None] >> tl.arange(0, 8)[None, None, None, :]) & 1
        groups = tl.where(bits == 1, groups, lowest(IS_PROBS))
    return groups


@triton.jit
def load_sample(row, IS_PROBS: tl.constexpr, SAMPLE: tl.constexpr):
    """Return so many float32 values of a row, in groups of 8 neighbours that lie at equal distances."""
    order = (tl.arange(0, SAMPLE // 8).to(tl.int64) * (row[1] // 8) // (SAMPLE // 8)).to(tl.int32)[None, None, :]
    ids = order.to(tl.int64)[:, :, :, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    groups = tl.load(row[0] + ids, mask=ids < row[1], other=lowest(IS_PROBS)).to(tl.float32)
    return adjusted_groups(groups, order, (row[1] & 0).to(tl.int64), row[1], row, IS_PROBS)


@triton.jit
def load_tile(
    row, first, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    SHARDS: tl.constexpr, SHARD: tl.constexpr, SKEW: tl.constexpr = None,
):  # fmt: skip
    """Return the float32 values of the tile that starts at id `first`; ids past the row, where MASKED, have no mass."""
    row_ptr = row[0]
    # As many ids as 32 threads read by 128 bits each.
    READ: tl.constexpr = 4096 // row_ptr.dtype.element_ty.primitive_bitwidth
    WIDTH: tl.constexpr = SHARD if SHARD < READ else READ
    # What is left of the row, or at least a tile.
    limit = tl.minimum(row[1] - first, SHARDS * SHARD)
    values = load_words(row_ptr, first, limit, ALIGNED, MASKED, SHARDS, SHARD, WIDTH, SKEW)
    if (SHARD if SHARD < PART else PART) > WIDTH:
        halves = tl.reshape(values, (SHARD // PART, 2, SHARDS, WIDTH))
        values = tl.reshape(tl.permute(halves, (0, 2, 1, 3)), (SHARD // PART, SHARDS, PART))
    if MASKED:
        offsets = tile_offsets(SHARDS, SHARD, (SHARD if SHARD < PART else PART)).to(tl.int32)
        values = tl.where(offsets < limit.to(tl.int32), values, lowest(IS_PROBS))
    if len(row[2]) > 2 or len(row[3]) > 2:
        # A thread holds 8 neighbours.
        groups = tl.reshape(values, (values.shape[0], SHARDS, values.shape[2] // 8, 8))
        order = tile_offsets(SHARDS, SHARD // 8, values.shape[2] // 8).to(tl.int32)
        groups = adjusted_groups(groups, order, first, SHARDS * SHARD, row, IS_PROBS)
        values = tl.reshape(groups, values.shape)
    return values


@triton.jit
def sum_shards(weights):
    """Return the float64 sums of the shards of a tile."""
    groups = tl.reshape(weights, (weights.shape[0], weights.shape[1], weights.shape[2] // 4, 4))
    return tl.sum(tl.sum(tl.sum(groups, axis=3), axis=0).to(tl.float64), axis=1)


@triton.jit
def max_shards(values):
    """Return the maxima of the shards of a tile."""
    return tl.max(tl.max(values, axis=0), axis=1)


@triton.jit
def sampled_shards(values, scale, IS_PROBS: tl.constexpr):
    """Return the maxima and the float64 sums of weights of the shards of a tile; an invalid one gives -inf and NaN."""
    # A NaN or +inf need not be looked for: whatever the maximum makes of it, its weight and so the sum becomes NaN.
    maxima = max_shards(values)
    sums = sum_shards(shifted_weights(values, safe_shift(maxima, IS_PROBS)[None, :, None], scale, IS_PROBS))
    usable = (sums == sums) & (maxima > lowest(IS_PROBS))
    return tl.where(usable, maxima, float("-inf")), sums


@triton.jit
def marks(chosen):
    """Return which ids of a tile are chosen, 32 of a shard to an int32 (SHARDS, ids / 8): bit part * 8 + id % 8."""
    PARTS: tl.constexpr = chosen.shape[0]
    groups = tl.reshape(chosen.to(tl.int32), (PARTS, chosen.shape[1], chosen.shape[2] // 8, 8))
    bits = tl.arange(0, PARTS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return tl.sum(tl.sum(groups << bits[:, None, None, :], axis=3), axis=0)


@triton.jit
def lowest_marked(marked, SHARD: tl.constexpr):
    """Return the offset in the tile of the lowest id of each int32 of marks; anything where it has none."""
    # A power of two has its number in the exponent of a float.
    single = (marked & -marked).to(tl.uint32, bitcast=True).to(tl.float32)
    bit = (single.to(tl.int32, bitcast=True) >> 23) - 127
    shards = tl.arange(0, marked.shape[0]).to(tl.int64) * SHARD
    groups = tl.arange(0, marked.shape[1]).to(tl.int64) * 8
    part = (bit >> 3).to(tl.int64) * (SHARD if SHARD < PART else PART)
    return shards[:, None] + groups[None, :] + part + (bit & 7)


@triton.jit
def store_shards(pointer, entry, first_shard, num_shards, values):
    """Store one number a shard of a tile; `entry` is where those of the row begin."""
    # A row of threads a shard, as they hold it, and one of them stores: no thread waits for another's number.
    column = tl.arange(0, 32)[None, :]
    shards = first_shard + tl.arange(0, values.shape[0])
    inside = (shards < num_shards)[:, None] & (column == 0)
    # The minimum changes no address that is stored to, and keeps the compiler from taking the addresses for a block.
    shards = tl.minimum(shards, num_shards - 1)
    tl.store(pointer + (entry + shards[:, None] + column * 0), values[:, None] + (column * 0).to(values.dtype), inside)
