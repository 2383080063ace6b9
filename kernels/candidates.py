"""Filter candidates: the largest values of every row that is filtered, collected by many programs a row.

One program reads some tiles of one row, once: values >= the row's bound (see `limits`) go to the row's list, in any
order, as long as there is room, and are counted. Bytes per logit: its own size read, 4 bytes written a candidate.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .arguments import load_real
from .blocks import flag, kernel
from .limits import candidate_bound, load_top_k, row_of, write_limits
from .rows import load_value
from .tiles import load_tile, lowest_marked, marks, tile_ids


@triton.jit
def count_bits(masks):
    """Return the number of bits set in int32 masks."""
    bits = masks.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return ((bits + (bits >> 16)) & 63).to(tl.int32)


@triton.jit
def append_shard(
    count_ptr, list_ptr, row, first, bound, end, IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    FITS: tl.constexpr, SHARDS: tl.constexpr, SHARD: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Append the values >= bound, and < end where there is one, of a tile to the list of its row."""
    values = load_tile(row, first, IS_PROBS, ALIGNED, MASKED, SHARDS, SHARD)
    hits = values >= bound
    if end is not None:
        hits = hits & (values < end)
    if MASKED:
        hits = hits & (tile_ids(first, SHARDS, SHARD) < row[1])
    if FITS:
        # Every value is a candidate and has a place.
        tl.store(list_ptr + tile_ids(first, SHARDS, SHARD), values, mask=hits)
        tl.store(count_ptr, row[1])
    else:
        # Hits are rare: every thread appends one of each of its groups at a time, until none is left.
        marked = marks(hits)
        for _ in range(tl.max(tl.max(count_bits(marked), axis=1), axis=0)):
            hit = marked != 0
            ids = first + lowest_marked(marked, SHARD)
            slots = tl.atomic_add(count_ptr + marked * 0, 1, mask=hit, sem="relaxed")
            inside = hit & (slots < MAX_CANDIDATES)
            tl.store(list_ptr + slots, load_value(row, ids, inside, IS_PROBS).to(tl.float32), mask=inside)
            # Without room for this one there is none for the next.
            marked = tl.where(inside, marked & (marked - 1), 0)


@triton.jit
def append_row(
    buffers, entry, row, parameters, first_shard, end_shard, num_shards,
    IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, FITS: tl.constexpr, SHARD: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Append the values >= bound of some tiles of a row: whole tiles by a loop without masks, the rest behind it."""
    counts_ptr, candidates_ptr, limits_ptr, shard_max_ptr = buffers
    shards = tl.arange(0, BLOCK_SHARDS)
    maxima = tl.load(shard_max_ptr + entry * num_shards + shards, mask=shards < num_shards, other=float("-inf"))
    bound = candidate_bound(maxima, parameters, IS_PROBS, FITS)
    if first_shard == 0:
        write_limits(limits_ptr, entry, parameters, bound)
    count_ptr = counts_ptr + entry
    list_ptr = candidates_ptr + entry * MAX_CANDIDATES
    # A bias or a mask takes registers too.
    PLAIN: tl.constexpr = len(row[2]) == 2 and len(row[3]) == 2
    TILE: tl.constexpr = contract.TILE_SHARDS if PLAIN else contract.REST_SHARDS
    REST: tl.constexpr = contract.REST_SHARDS
    whole = tl.minimum(end_shard, row[1] // (TILE * SHARD) * TILE).to(tl.int64)
    for shard in range(first_shard, whole, TILE):
        append_shard(
            count_ptr, list_ptr, row, shard * SHARD, bound, None,
            IS_PROBS, ALIGNED, False, FITS, TILE, SHARD, MAX_CANDIDATES,
        )  # fmt: skip
    for shard in range(tl.maximum(first_shard, whole), tl.minimum(end_shard, tl.cdiv(row[1], SHARD)), REST):
        append_shard(
            count_ptr, list_ptr, row, shard * SHARD, bound, None,
            IS_PROBS, ALIGNED, True, FITS, REST, SHARD, MAX_CANDIDATES,
        )  # fmt: skip


@triton.jit
def parameters_of(
    sequence, row, gamma, vocab, draft_vocab, integers_ptr, temperatures_ptr, target, draft, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Return (top_k, top_p, min_p, temperature) of a row, the temperature 0 where there is nothing to filter.

    `target` and `draft` hold pointer and stride of each filter.
    """
    record_ptr = integers_ptr + sequence * contract.SEQUENCE_FIELDS
    runs = (tl.load(record_ptr + contract.STATUS_FIELD).to(tl.int32) & contract.INVALID_ARGUMENT) == 0
    length = tl.load(record_ptr + contract.LENGTH_FIELD)
    temperature = tl.load(temperatures_ptr + sequence * 2)
    runs = runs & flag(temperature > 0.0)
    top_k = load_top_k(target[0], target[1], sequence)
    top_p = load_real(target[2], target[3], sequence, 1.0)
    min_p = load_real(target[4], target[5], sequence, 0.0)
    decides = row < tl.load(record_ptr + contract.NUM_ROWS_FIELD)
    width = vocab
    if HAS_DRAFT:
        is_draft = row > gamma
        top_k = tl.where(is_draft, load_top_k(draft[0], draft[1], sequence), top_k)
        top_p = tl.where(is_draft, load_real(draft[2], draft[3], sequence, 1.0), top_p)
        min_p = tl.where(is_draft, load_real(draft[4], draft[5], sequence, 0.0), min_p)
        temperature = tl.where(is_draft, tl.load(temperatures_ptr + sequence * 2 + 1), temperature)
        decides = decides | (is_draft & (row - gamma - 1 < length))
        width = tl.where(is_draft, draft_vocab, vocab)
    top_k = tl.where(top_k < width, top_k, 0)
    filters = (top_k > 0) | flag(top_p < 1.0) | flag(min_p > 0.0)
    return top_k, top_p, min_p, tl.where(runs & decides & filters, temperature, 0.0)


@kernel
def filter_candidates(
    candidate_counts_ptr, candidates_ptr,  # (batch, rows_per_sequence), (batch, rows_per_sequence, MAX_CANDIDATES)
    limits_ptr,  # (batch, rows_per_sequence, LIMIT_FIELDS)
    shard_max_ptr,  # (batch, rows_per_sequence, num_shards)
    integers_ptr, temperatures_ptr,
    target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
    top_k_ptr, stride_top_k, top_p_ptr, stride_top_p, min_p_ptr, stride_min_p,
    draft_top_k_ptr, stride_draft_top_k, draft_top_p_ptr, stride_draft_top_p, draft_min_p_ptr, stride_draft_min_p,
    bias_offsets_ptr, bias_ids_ptr, bias_values_ptr,  # (batch + 1,), (entries,), likewise
    allowed_ptr, stride_allowed_sequence, stride_allowed_row,  # (batch, rows, words)
    draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr,
    draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row, draft_vocab,
    gamma, vocab, num_shards, rows_per_sequence, shards_per_program,
    ALIGNED: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    SHARD: tl.constexpr, BLOCK_SHARDS: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    FITS: tl.constexpr, SAME_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (batch * rows_per_sequence, ceil(num_shards / shards_per_program))."""
    turn = tl.program_id(0)
    entry = turn.to(tl.int64)
    first_shard = tl.program_id(1).to(tl.int64) * shards_per_program
    end_shard = tl.minimum(first_shard + shards_per_program, num_shards)
    is_draft, target_row, draft_row = row_of(
        turn, rows_per_sequence, gamma, vocab, draft_vocab, integers_ptr,
        target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
        (bias_offsets_ptr, bias_ids_ptr, bias_values_ptr), (allowed_ptr, stride_allowed_sequence, stride_allowed_row),
        (draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr),
        (draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row), SAME_ROWS,
    )  # fmt: skip
    parameters = parameters_of(
        (turn // rows_per_sequence).to(tl.int64), turn % rows_per_sequence, gamma, vocab, draft_vocab,
        integers_ptr, temperatures_ptr,
        (top_k_ptr, stride_top_k, top_p_ptr, stride_top_p, min_p_ptr, stride_min_p),
        (draft_top_k_ptr, stride_draft_top_k, draft_top_p_ptr, stride_draft_top_p, draft_min_p_ptr, stride_draft_min_p),
        draft_logits_ptr is not None,
    )  # fmt: skip
    if parameters[3] == 0.0:
        if first_shard == 0:
            write_limits(limits_ptr, entry, parameters, parameters[3])
        return
    buffers = (candidate_counts_ptr, candidates_ptr, limits_ptr, shard_max_ptr)
    if draft_logits_ptr is not None and not SAME_ROWS:  # noqa: SIM102 (decided while compiling)
        if is_draft:
            append_row(
                buffers, entry, draft_row, parameters, first_shard, end_shard, num_shards,
                DRAFT_IS_PROBS, ALIGNED, FITS, SHARD, BLOCK_SHARDS, MAX_CANDIDATES,
            )  # fmt: skip
            return
    append_row(
        buffers, entry, target_row, parameters, first_shard, end_shard, num_shards,
        TARGET_IS_PROBS, ALIGNED, FITS, SHARD, BLOCK_SHARDS, MAX_CANDIDATES,
    )  # fmt: skip
