"""Filter thresholds: top-k, then top-p, then min-p, of every row that may decide; no sort, no copy of the row.

A filter keeps {id : value >= threshold}, where a value is kept iff

    top-k    fewer than k values are greater
    top-p    the mass of the greater values is < top_p * (mass that top-k keeps)
    min-p    value >= row_max + temperature * log(min_p)

so tied values are all kept or all dropped. One program settles one row. As a rule the candidates that
`filter_candidates` has listed do, and nothing of the row is read here. Where they do not (too many, too few, or too
little mass), the row is read some times, as a rule three, to sum what lies above two pivots, until few values are left
between enough and too little, and once more to list those. Where the boundary of top-p is too close for float32
weights, what is kept and what lies above the list is weighed again in float64. Bytes per logit: its own size each time.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .blocks import flag, kernel, lowest
from .candidates import append_shard
from .emission import load_shards, round_up
from .limits import load_limits, min_p_floor, row_of
from .selection import (
    SUM_ERROR,
    UNIT,
    candidate_weights,
    narrow,
    nucleus_floor,
    ordered_key,
    short_key,
    short_key_up,
    short_value,
    smallest_kept,
    total_from,
)

# The filters in their order.
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)


@triton.jit
def collect(
    count_ptr, list_ptr, row, low, high,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, SHARD: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """List the values in low..high, `high` itself not, in place of what was listed before; return how many they are."""
    REST: tl.constexpr = contract.TILE_SHARDS
    PART: tl.constexpr = SHARD if SHARD < 256 else 256
    first = row[1] & 0
    zero = first.to(tl.int64)
    tl.debug_barrier()
    tl.store(count_ptr, 0)
    tl.debug_barrier()
    if len(row[2]) == 2 and len(row[3]) == 2:
        SHARDS: tl.constexpr = contract.SEARCH_SHARDS
        SIZE: tl.constexpr = SHARD * 16 // row[0].dtype.element_ty.primitive_bitwidth
        TILE: tl.constexpr = SHARDS * SIZE
        first = row[1] - row[1] % TILE
        for tile in range(0, first, TILE):
            append_shard(
                count_ptr, list_ptr, row, zero + tile, low, high,
                IS_PROBS, ALIGNED, False, False, SHARDS, SIZE, MAX_CANDIDATES,
            )  # fmt: skip
    for tile in range(first, row[1], REST * PART):
        append_shard(
            count_ptr, list_ptr, row, zero + tile, low, high,
            IS_PROBS, ALIGNED, True, False, REST, PART, MAX_CANDIDATES,
        )  # fmt: skip
    tl.debug_barrier()
    return tl.load(count_ptr, volatile=True)


@triton.jit
def load_list(list_ptr, count, row_max, temperature, by_count, IS_PROBS: tl.constexpr, MAX_CANDIDATES: tl.constexpr):
    """Return the values listed, NaN behind them, and what each adds."""
    slots = tl.arange(0, MAX_CANDIDATES)
    values = tl.load(list_ptr + slots, mask=slots < count, other=float("nan"), cache_modifier=".cg")
    weights = candidate_weights(values, row_max, temperature, IS_PROBS)
    one = tl.where(slots < count, UNIT, 0.0).to(tl.int64)
    return values, tl.where(by_count > 0, one, weights)


@triton.jit
def bracket(
    row, threshold, kept_mass, unsummed, listed, count, held, wanted, slack, limits, row_max, by_count,
    IS_PROBS: tl.constexpr, DROPPED: tl.constexpr,
):  # fmt: skip
    """Return (low, high, below, above): keys that surely enclose the threshold, and what the row holds from each on."""
    _, top_p, _, temperature, bound = limits
    low = short_key_up(threshold, DROPPED)
    high = short_key(row_max, DROPPED) + 1
    bound_key = short_key_up(bound, DROPPED)
    below = kept_mass
    above = kept_mass * 0.0
    if by_count > 0:
        below = row[1].to(tl.float64)
        if (listed == 0) & (count >= wanted):
            low = bound_key
            below = count.to(tl.float64)
    elif unsummed == 0:
        least = nucleus_floor(row_max, temperature, kept_mass, tl.maximum(top_p, 0.0), row[1], IS_PROBS)
        # Below what may be the threshold, so that the mass from there on is summed before it is taken for one.
        low = tl.maximum(low, short_key(least, DROPPED) - 1)
    if (listed > 0) & (held < wanted - slack):
        high = bound_key
        above = held
    return tl.minimum(low, high - 1), high, below, above


@triton.jit
def settle(
    list_ptr, count, span, wanted, row_max, temperature, by_count,
    IS_PROBS: tl.constexpr, DROPPED: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the threshold that lies in a span that the list covers, and the amounts above it and from it on."""
    low, high, _, above = span
    lowest_value = short_value(low, DROPPED)
    values, amounts = load_list(list_ptr, count, row_max, temperature, by_count, IS_PROBS, MAX_CANDIDATES)
    nearest = smallest_kept(
        values, amounts, above, wanted, ordered_key(lowest_value).to(tl.int64),
        ordered_key(short_value(high, DROPPED)).to(tl.int64),
    )  # fmt: skip
    nearest = tl.where(nearest < float("inf"), nearest, lowest_value)
    kept = above + total_from(values, amounts, nearest)
    return nearest, kept - total_from(values, tl.where(values == nearest, amounts, 0), nearest), kept


@triton.jit
def search(
    row, count_ptr, list_ptr, threshold, kept_mass, unsummed, listed, raised, limits, row_max, by_count, only_sums,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, DROPPED: tl.constexpr,
    SHARD: tl.constexpr, SAMPLE: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the threshold of top-k or top-p, the mass that it keeps (top-k: the count), and whether the list served.

    `threshold` and `kept_mass` are those of the filter before; `unsummed`: the mass is not known yet; `listed`: the
    list holds all values that are not below the row's bound; `raised`: nothing below it matters; `only_sums`: the mass
    from the threshold on is all that is wanted.
    """
    top_k, top_p, _, temperature, _ = limits
    count = tl.load(count_ptr, volatile=True)
    values, amounts = load_list(list_ptr, count, row_max, temperature, by_count, IS_PROBS, MAX_CANDIDATES)
    held = total_from(values, amounts, threshold)
    # What the list holds is weighed in float64; sums of float32 weights leave a doubt.
    exact = (listed > 0) & ((unsummed > 0) | (tl.where(FITS, 1, 0) > 0))
    kept_mass = tl.where(exact, held, kept_mass)
    error = tl.where(exact | (by_count > 0), 0.0, SUM_ERROR)
    wanted = tl.where(by_count > 0, top_k.to(tl.float64), top_p * kept_mass)
    enough = flag(held >= wanted + wanted * error)
    serves = (listed > 0) & (enough | (raised & flag(held < wanted - wanted * error)) | (only_sums > 0))
    covered = tl.where(serves, 1, 0)
    low, high, below, above = bracket(
        row, threshold, kept_mass, unsummed, listed, count, held, wanted, wanted * error, limits, row_max, by_count,
        IS_PROBS, DROPPED,
    )  # fmt: skip
    low = tl.where(only_sums > 0, high, low)
    start = short_key_up(threshold, DROPPED)
    kept = held
    few = covered
    turn = tl.where(serves & (~enough | (only_sums > 0)), 2, 0)
    while turn < 2:
        if not FITS:
            # By sums of float32 weights, then, where they leave a doubt, of float64 weights.
            if (covered == 0) | (turn > 0):
                low, high, below, above, wanted, few = narrow(
                    row, low, high, below, above, wanted, top_p, start, unsummed | only_sums | turn, turn, covered,
                    row_max, temperature, by_count, IS_PROBS, ALIGNED, DROPPED, SHARD, SAMPLE, MAX_CANDIDATES,
                )  # fmt: skip
            if (covered == 0) & (few > 0) & (only_sums == 0):
                count = collect(
                    count_ptr, list_ptr, row, short_value(low, DROPPED), short_value(high, DROPPED),
                    IS_PROBS, ALIGNED, SHARD, MAX_CANDIDATES,
                )  # fmt: skip
                covered = few
        # Where nothing is listed, all that lies between the keys is equal.
        nearest, without, kept = tl.where(only_sums > 0, threshold, short_value(low, DROPPED)), above, below
        if covered > 0:
            nearest, without, kept = settle(
                list_ptr, count, (low, high, below, above), wanted, row_max, temperature, by_count,
                IS_PROBS, DROPPED, MAX_CANDIDATES,
            )  # fmt: skip
        doubt = flag(tl.minimum(wanted - without, kept - wanted) < wanted * error)
        doubt = (doubt | ((covered == 0) & (high - low > 1))) & (turn == 0) & (error > 0.0) & (only_sums == 0)
        threshold = nearest
        turn = tl.where(doubt, 1, 2)
    return threshold, kept, tl.where(serves, listed, 0)


@triton.jit
def filter_row(
    row, count_ptr, list_ptr, limits_ptr, entry, row_max, row_sum,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr,
    SHARD: tl.constexpr, SAMPLE: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the float64 threshold of a row and the mass that it keeps."""
    PLAIN: tl.constexpr = len(row[2]) == 2 and len(row[3]) == 2
    BITS: tl.constexpr = row[0].dtype.element_ty.primitive_bitwidth
    # Half of a key where values are bfloat16; float16 leaves 13 bits of a float32.
    DROPPED: tl.constexpr = 0 if BITS == 32 or not PLAIN else (16 if row[0].dtype.element_ty == tl.bfloat16 else 13)
    threshold = tl.full((), lowest(IS_PROBS), tl.float32)
    kept_mass = row_sum
    listed = tl.where(tl.load(count_ptr) <= MAX_CANDIDATES, 1, 0)
    unsummed = tl.full((), 0, tl.int32)
    for phase in range(TOP_K, MIN_P + 1):
        # Loaded again rather than kept: the search needs the registers.
        limits = load_limits(limits_ptr, entry)
        top_k, top_p, min_p, temperature, bound = limits
        floor = min_p_floor(min_p, temperature, row_max, IS_PROBS)
        # Whether nothing below the bound can be kept, whatever the other filters say.
        raised = (tl.where(FITS, 1, 0) == 0) & flag(min_p > 0.0) & flag(bound == round_up(floor))
        by_count = tl.where(phase == TOP_K, 1, 0)
        narrows = tl.where(phase == TOP_K, flag(top_k > 0), (phase == TOP_P) & flag(top_p < 1.0))
        drops = (phase == MIN_P) & flag(floor > threshold.to(tl.float64))
        threshold = tl.where(drops, round_up(floor), threshold)
        if narrows | drops | ((phase == TOP_P) & (unsummed > 0)):
            threshold, kept, listed = search(
                row, count_ptr, list_ptr, threshold, kept_mass, unsummed, listed, raised, limits, row_max, by_count,
                tl.where(narrows, 0, 1),
                IS_PROBS, ALIGNED, FITS, DROPPED, SHARD, SAMPLE, MAX_CANDIDATES,
            )  # fmt: skip
            kept_mass = tl.where(by_count > 0, kept_mass, kept)
            unsummed = by_count
    _, _, min_p, temperature, _ = load_limits(limits_ptr, entry)
    floor = min_p_floor(min_p, temperature, row_max, IS_PROBS)
    # Where min-p decides, its float64 value is the threshold, not the float32 above it.
    return tl.where(threshold == round_up(floor), floor, threshold.to(tl.float64)), kept_mass


@triton.jit
def filter_entry(
    row_threshold_ptr, row_sum_ptr, buffers, lists, entry, row, temperature, num_shards,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, SHARD: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, SAMPLE: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write threshold and kept mass of one row that samples; -inf where it is invalid."""
    threshold = tl.full((), float("-inf"), tl.float64)
    _, masses, row_max = load_shards(buffers, entry, None, num_shards, temperature, IS_PROBS, BLOCK_SHARDS)
    row_sum = tl.sum(masses, axis=0)
    if row_sum > 0.0:
        threshold, kept_mass = filter_row(
            row, lists[0] + entry, lists[1] + entry * MAX_CANDIDATES, lists[2], entry, row_max.to(tl.float32), row_sum,
            IS_PROBS, ALIGNED, FITS, SHARD, SAMPLE, MAX_CANDIDATES,
        )  # fmt: skip
        tl.store(row_sum_ptr + entry, kept_mass)
    tl.store(row_threshold_ptr + entry, threshold)


@kernel
def filter_thresholds(
    row_threshold_ptr, row_sum_ptr,  # (batch, rows_per_sequence)
    candidate_counts_ptr, candidates_ptr,  # (batch, rows_per_sequence), (batch, rows_per_sequence, MAX_CANDIDATES)
    limits_ptr,  # (batch, rows_per_sequence, LIMIT_FIELDS)
    shard_max_ptr, shard_sum_ptr,  # (batch, rows_per_sequence, num_shards)
    integers_ptr,
    target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
    bias_offsets_ptr, bias_ids_ptr, bias_values_ptr,  # (batch + 1,), (entries,), likewise
    allowed_ptr, stride_allowed_sequence, stride_allowed_row,  # (batch, rows, words)
    draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr,
    draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row, draft_vocab,
    gamma, vocab, num_shards, rows_per_sequence,
    ALIGNED: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    SHARD: tl.constexpr, BLOCK_SHARDS: tl.constexpr, SAMPLE: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, FITS: tl.constexpr, SAME_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (batch * rows_per_sequence,)."""
    turn = tl.program_id(0)
    entry = turn.to(tl.int64)
    _, _, _, temperature, _ = load_limits(limits_ptr, entry)
    if temperature == 0.0:
        tl.store(row_threshold_ptr + entry, float("-inf"))
        return
    is_draft, target_row, draft_row = row_of(
        turn, rows_per_sequence, gamma, vocab, draft_vocab, integers_ptr,
        target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
        (bias_offsets_ptr, bias_ids_ptr, bias_values_ptr), (allowed_ptr, stride_allowed_sequence, stride_allowed_row),
        (draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr),
        (draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row), SAME_ROWS,
    )  # fmt: skip
    buffers = (shard_max_ptr, shard_sum_ptr)
    lists = (candidate_counts_ptr, candidates_ptr, limits_ptr)
    if draft_logits_ptr is not None and not SAME_ROWS:  # noqa: SIM102 (decided while compiling)
        if is_draft:
            filter_entry(
                row_threshold_ptr, row_sum_ptr, buffers, lists, entry, draft_row, temperature, num_shards,
                DRAFT_IS_PROBS, ALIGNED, FITS, SHARD, BLOCK_SHARDS, SAMPLE, MAX_CANDIDATES,
            )  # fmt: skip
            return
    filter_entry(
        row_threshold_ptr, row_sum_ptr, buffers, lists, entry, target_row, temperature, num_shards,
        TARGET_IS_PROBS, ALIGNED, FITS, SHARD, BLOCK_SHARDS, SAMPLE, MAX_CANDIDATES,
    )  # fmt: skip
