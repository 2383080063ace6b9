"""Device functions that load rows, with bias and mask applied, and the columns of a reduced draft vocabulary.

The rows of one tensor that belong to a sequence are a tuple `(pointer, offset, stride, vocab, bias, mask)` with `bias`
= (begin, end, token_ids_ptr, values_ptr) and `mask` = (stride, offset, allowed_ptr); a single row is `(pointer, vocab,
bias, mask)`. Tuples of what was not given end before the pointers, and their code is not compiled.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import NO_ID, lowest, shifted_weights, weights_float64


@triton.jit
def rows_of(pointer, offset, stride, vocab, sequence, front, bias, allowed):
    """Return the rows of a sequence; `bias` is (offsets_ptr, ids_ptr, values_ptr), `allowed` (ptr, two strides)."""
    offsets_ptr, ids_ptr, values_ptr = bias
    allowed_ptr, stride_sequence, stride_row = allowed
    begin = sequence & 0
    end = sequence & 0
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + sequence)
        end = tl.load(offsets_ptr + sequence + 1)
    first = sequence * stride_sequence + front * stride_row
    entries = (begin, end) if ids_ptr is None else (begin, end, ids_ptr, values_ptr)
    mask = (stride_row, first) if allowed_ptr is None else (stride_row, first, allowed_ptr)
    return (pointer, offset, stride, vocab, entries, mask)


@triton.jit
def row_at(rows, index):
    """Return row `index` of a sequence, or a block of them."""
    pointer, offset, stride, vocab, bias, mask = rows
    first = mask[1] + index * mask[0]
    allowed = (mask[0], first, mask[2]) if len(mask) > 2 else (mask[0], first)
    return (pointer + (offset + index * stride), vocab, bias, allowed)


@triton.jit
def biased(values, bias_ptr, IS_PROBS: tl.constexpr):
    """Return values with a bias added to their logits."""
    bias = tl.load(bias_ptr)
    return values * tl.exp(bias.to(tl.float64)).to(tl.float32) if IS_PROBS else values + bias


@triton.jit
def adjusted(values, ids, row, IS_PROBS: tl.constexpr):
    """Return float32 values of some ids of a row with bias, one entry after another, and mask applied."""
    if len(row[2]) > 2:
        begin, end, ids_ptr, values_ptr = row[2]
        for entry in range(begin, end):
            values = tl.where(ids == tl.load(ids_ptr + entry), biased(values, values_ptr + entry, IS_PROBS), values)
    if len(row[3]) > 2:
        _, offset, allowed_ptr = row[3]
        words = tl.load(allowed_ptr + (offset + ids // 32), mask=ids < row[1], other=0)
        values = tl.where((words >> (ids % 32).to(tl.int32)) & 1 == 1, values, lowest(IS_PROBS))
    return values


@triton.jit
def load_shard(row, first, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, SHARD: tl.constexpr):
    """Return the tile of values of the shard that starts at id `first`, in float32; ids past the row have no mass."""
    row_ptr, vocab = row[0], row[1]
    offsets = tl.arange(0, SHARD)
    pointers = row_ptr + first + offsets
    if ALIGNED:
        # The hint sits on the last address computed: on an earlier one the compiler's folding would lose it.
        pointers = tl.multiple_of(pointers, 16)
    # All shards but the last need no mask and so keep their wide loads whatever the vocabulary.
    if first + SHARD <= vocab:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=offsets < (vocab - first).to(tl.int32), other=lowest(IS_PROBS))
    return adjusted(values.to(tl.float32), first + offsets, row, IS_PROBS)


@triton.jit
def load_value(row, column, mask, IS_PROBS: tl.constexpr):
    """Return the values of single ids of a row in float64."""
    values = tl.load(row[0] + column, mask=mask, other=lowest(IS_PROBS)).to(tl.float32)
    return adjusted(values, column, row, IS_PROBS).to(tl.float64)


@triton.jit
def first_entry(targets_ptr, count, ids):
    """Return how many of the ascending target ids are below each id."""
    low = ids * 0
    step = tl.full((), 1, tl.int32)
    while step + step <= count:
        step = step + step
    while step > 0:
        inside = low + step <= count
        below = tl.load(targets_ptr + (low + step - 1), mask=inside, other=NO_ID) < ids
        low = tl.where(inside & below, low + step, low)
        step = step // 2
    return low


@triton.jit
def column_weights(
    row, columns, ids, mask, shift, scale, threshold, only, IS_PROBS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the kept weights of the draft columns that stand for each id, added up.

    Where `only` is not -1 the draft is greedy and all its weight, 1, is on that column. WIDE weighs in float64, `scale`
    being the temperature.
    """
    columns_ptr, targets_ptr = columns
    count = row[1]
    entry = first_entry(targets_ptr, count, ids)
    inside = mask & (entry < count)
    active = inside & (tl.load(targets_ptr + entry, mask=inside, other=NO_ID) == ids)
    total = (ids * 0).to(tl.float64) if WIDE else (ids * 0).to(tl.float32)
    while tl.max(active.to(tl.int32), axis=0) > 0:
        column = tl.load(columns_ptr + entry, mask=active, other=0)
        values = tl.load(row[0] + column, mask=active, other=lowest(IS_PROBS)).to(tl.float32)
        values = adjusted(values, column, row, IS_PROBS)
        if WIDE:
            weights = weights_float64(values.to(tl.float64), shift, scale, IS_PROBS)
        else:
            weights = shifted_weights(values, shift, scale, IS_PROBS)
        weights = tl.where(values >= threshold, weights, 0.0)
        weights = tl.where(only >= 0, tl.where(column == only, 1.0, 0.0), weights)
        total += tl.where(active, weights, 0.0)
        entry += 1
        inside = active & (entry < count)
        active = inside & (tl.load(targets_ptr + entry, mask=inside, other=NO_ID) == ids)
    return total
