"""Device functions that find the arg-max of the shards of a tile (parts, shards, ids), ties to the lowest id.

A thread holds a group of neighbours, 8 or 4, of every part of a shard. They are never all compared with the maximum.
The groups are compared by their maxima, and the values of the one that wins are kept.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import NO_ID, lowest


@triton.jit
def either(conditions):
    """Return whether a condition holds for one or the other of each pair of neighbours."""
    shape: tl.constexpr = conditions.shape
    first, second = tl.split(tl.reshape(conditions, (shape[0], shape[1], shape[2], shape[3] // 2, 2)))
    return first | second


@triton.jit
def split_parts(values):
    """Return the even and the odd parts of a tile in groups (parts, shards, groups, ids)."""
    shape: tl.constexpr = values.shape
    last = tl.permute(values, (1, 2, 3, 0))
    even, odd = tl.split(tl.reshape(last, (shape[1], shape[2], shape[3], shape[0] // 2, 2)))
    return tl.permute(even, (3, 0, 1, 2)), tl.permute(odd, (3, 0, 1, 2))


@triton.jit
def greedy_shards(values, first, IS_PROBS: tl.constexpr, SHARD: tl.constexpr, GROUP: tl.constexpr):
    """Return maxima, 1.0 (0.0 without mass, NaN if invalid) and lowest ids of the maxima of the shards of a tile.

    GROUP: neighbours that a thread holds, 8 or 4.
    """
    SHARDS: tl.constexpr = values.shape[1]
    WIDTH: tl.constexpr = 32 * GROUP if values.shape[2] > 32 * GROUP else values.shape[2]
    SPLITS: tl.constexpr = values.shape[2] // WIDTH
    PARTS: tl.constexpr = SPLITS * values.shape[0]
    GROUPS: tl.constexpr = WIDTH // GROUP
    values = tl.permute(tl.reshape(values, (values.shape[0], SHARDS, SPLITS, WIDTH)), (0, 2, 1, 3))
    values = tl.reshape(values, (PARTS, SHARDS, GROUPS, GROUP))
    # Two comparisons that are joined become one instruction, and none of them becomes a number.
    wrong = either(either(~(values >= 0.0) if IS_PROBS else values != values))
    if GROUP == 8:
        wrong = either(wrong)
    # Whatever the maximum makes of a NaN: its group counts as infinite, which is invalid as well.
    best = tl.where(wrong, float("inf"), tl.max(values, axis=3, keep_dims=True))
    part = tl.arange(0, PARTS)[:, None, None, None] + tl.zeros(best.shape, tl.int32)
    for _ in tl.static_range((PARTS > 1) + (PARTS > 2) + (PARTS > 4)):
        best_even, best_odd = split_parts(best)
        part_even, part_odd = split_parts(part)
        values_even, values_odd = split_parts(values)
        later = best_odd > best_even
        best = tl.where(later, best_odd, best_even)
        part = tl.where(later, part_odd, part_even)
        values = tl.where(later, values_odd, values_even)
    maxima = tl.max(tl.max(tl.max(best, axis=3), axis=0), axis=1)
    here = values == maxima[None, :, None, None]
    place = tl.min(tl.where(here, tl.arange(0, GROUP)[None, None, None, :], NO_ID), axis=3, keep_dims=True)
    offsets = tl.arange(0, SHARDS)[None, :, None, None] * SHARD + tl.arange(0, GROUPS)[None, None, :, None] * GROUP
    ids = tl.where(place < GROUP, first.to(tl.int32) + offsets + part * WIDTH + place, NO_ID)
    has_mass = maxima > lowest(IS_PROBS)
    usable = maxima < float("inf")
    sums = tl.where(usable, tl.where(has_mass, 1.0, 0.0), float("nan")).to(tl.float64)
    ids = tl.min(tl.min(tl.min(ids, axis=3), axis=0), axis=1)
    return tl.where(has_mass & usable, maxima, float("-inf")), sums, ids
