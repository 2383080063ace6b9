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

from .blocks import NO_ID, lowest, safe_shift, shifted_weights
from .rows import adjusted

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
    return (first + tile_offsets(SHARDS, SHARD, min(SHARD, PART))).to(tl.int32)


@triton.jit
def load_words(
    row_ptr, first, limit, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    SHARDS: tl.constexpr, SHARD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the values of a tile, read by the aligned 128-bit words that hold them.

    MASKED loads no word that holds nothing of the row; what lies past its end in the last one is loaded with it.
    """
    BITS: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth
    # Values in a 64-bit word, the unit that is shifted.
    VALUES: tl.constexpr = 64 // BITS
    address = (row_ptr + first).to(tl.int64)
    skew = address & 15
    words_ptr = (address - skew).to(tl.pointer_type(tl.int64))
    words = tile_offsets(SHARDS, SHARD // VALUES, WIDTH // VALUES)
    PAIRS: tl.constexpr = (SHARD // WIDTH, SHARDS, WIDTH // VALUES // 2, 2)
    near_ptrs = tl.multiple_of(words_ptr + words, (16, 16, 16))
    # A word, of 16 bytes here, is read if it begins before the end of the row.
    last = ((limit * (BITS // 8) + skew + 15) // 16).to(tl.int32)
    near = tl.load(near_ptrs, mask=(words // 2).to(tl.int32) < last, other=0) if MASKED else tl.load(near_ptrs)
    word0, word1 = tl.split(tl.reshape(near, PAIRS))
    if not ALIGNED:
        # Where the row is aligned after all, the words that follow are the same ones: nothing past them is read.
        following = words + tl.where(skew > 0, 2, 0)
        far_ptrs = tl.multiple_of(words_ptr + following, (16, 16, 16))
        far = tl.load(far_ptrs, mask=(following // 2).to(tl.int32) < last, other=0) if MASKED else tl.load(far_ptrs)
        word2, word3 = tl.split(tl.reshape(far, PAIRS))
        over = skew >= 8
        low = tl.where(over, word1, word0).to(tl.uint64)
        middle = tl.where(over, word2, word1).to(tl.uint64)
        high = tl.where(over, word3, word2).to(tl.uint64)
        shift = ((skew & 7) * 8).to(tl.uint64)
        rest = 63 - shift
        word0 = (low >> shift) | ((middle << 1) << rest)
        word1 = (middle >> shift) | ((high << 1) << rest)
    pair = tl.join(word0, word1).to(tl.uint64)
    values = tl.join(pair.to(tl.uint32), (pair >> 32).to(tl.uint32))
    if BITS == 16:
        values = tl.join(values.to(tl.uint16), (values >> 16).to(tl.uint16))
    return tl.reshape(values.to(row_ptr.dtype.element_ty, bitcast=True), (SHARD // WIDTH, SHARDS, WIDTH))


@triton.jit
def load_tile(
    row, first, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    SHARDS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Return the float32 values of the tile that starts at id `first`; ids past the row, where MASKED, have no mass."""
    row_ptr = row[0]
    # As many ids as 32 threads read by 128 bits each.
    WIDTH: tl.constexpr = min(SHARD, 4096 // row_ptr.dtype.element_ty.primitive_bitwidth)
    # What is left of the row, or at least a tile.
    limit = tl.minimum(row[1] - first, SHARDS * SHARD)
    if ALIGNED and not MASKED:
        # The hint sits on the last address computed: on an earlier one the compiler's folding would lose it.
        values = tl.load(tl.multiple_of(row_ptr + first + tile_offsets(SHARDS, SHARD, WIDTH), (16, 16, 16)))
    else:
        values = load_words(row_ptr, first, limit, ALIGNED, MASKED, SHARDS, SHARD, WIDTH)
    values = values.to(tl.float32)
    if min(SHARD, PART) > WIDTH:
        halves = tl.reshape(values, (SHARD // PART, 2, SHARDS, WIDTH))
        values = tl.reshape(tl.permute(halves, (0, 2, 1, 3)), (SHARD // PART, SHARDS, PART))
    if MASKED:
        offsets = tile_offsets(SHARDS, SHARD, min(SHARD, PART)).to(tl.int32)
        values = tl.where(offsets < limit.to(tl.int32), values, lowest(IS_PROBS))
    if len(row[2]) > 2 or len(row[3]) > 2:
        values = adjusted(values, tile_ids(first, SHARDS, SHARD), row, IS_PROBS)
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
    part = (bit >> 3).to(tl.int64) * min(SHARD, PART)
    return shards[:, None] + groups[None, :] + part + (bit & 7)


@triton.jit
def greedy_shards(values, first, IS_PROBS: tl.constexpr, SHARD: tl.constexpr):
    """Return maxima, 1.0 (0.0 without mass, NaN if invalid) and lowest ids of the maxima of the shards of a tile."""
    healthy = values < float("inf")
    if IS_PROBS:
        healthy = healthy & (values >= 0.0)
    invalid = tl.max((marks(~healthy) != 0).to(tl.int32), axis=1) > 0
    # What the maximum makes of a NaN does not matter: the shard is invalid.
    maxima = max_shards(values)
    marked = marks(values == maxima[None, :, None])
    ids = tl.where(marked != 0, (first + lowest_marked(marked, SHARD)).to(tl.int32), NO_ID)
    has_mass = maxima > lowest(IS_PROBS)
    sums = tl.where(invalid, float("nan"), tl.where(has_mass, 1.0, 0.0)).to(tl.float64)
    return tl.where(has_mass & ~invalid, maxima, float("-inf")), sums, tl.min(ids, axis=1)


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
