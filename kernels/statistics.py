"""Row statistics: the maximum and the sum of weights of every vocabulary shard of every row that may decide.

One program reads some shards of one target or draft row, once:

    shard_max = max(row[shard])    shard_sum = sum(exp((row[shard] - shard_max) / temperature))

Bytes per logit: its own size read, nothing written; 16 bytes written a shard. The programs of shard 0 also gather the
few numbers of their position (token, its logits, uniforms) and of their sequence (status, length, offsets,
temperatures), so that the kernels behind this one read small buffers only. Rows that cannot decide (past the length,
the draft rows of a greedy sequence) are not read, and their entries of the buffers stay unwritten and unread.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .arguments import draft_slot, is_greedy, load_real, locate, parameter_status, uniforms_status
from .blocks import exponent_scale, kernel, lowest, uniforms
from .greedy import greedy_shards
from .rows import load_value, row_at, rows_of
from .tiles import load_tile, sampled_shards, store_shards, tile_ids


@triton.jit
def write_tile(
    shard_max_ptr, shard_sum_ptr, entry, row, first_shard, removed, num_shards, scale,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, EXCLUDES: tl.constexpr, IS_PROBS: tl.constexpr,
    SHARDS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one tile of a row that samples, without the mass of the id `removed` where EXCLUDES."""
    first = first_shard * SHARD
    values = load_tile(row, first, IS_PROBS, ALIGNED, MASKED, SHARDS, SHARD)
    if EXCLUDES:
        values = tl.where(tile_ids(first, SHARDS, SHARD) == removed, lowest(IS_PROBS), values)
    maxima, sums = sampled_shards(values, scale, IS_PROBS)
    store_shards(shard_max_ptr, entry, first_shard, num_shards, maxima)
    store_shards(shard_sum_ptr, entry, first_shard, num_shards, sums)


@triton.jit
def write_greedy_tile(
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, row, first_shard, num_shards,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, IS_PROBS: tl.constexpr, SHARDS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write maximum, arg-max and health of one tile of a greedy row; no exponential."""
    first = first_shard * SHARD
    values = load_tile(row, first, IS_PROBS, ALIGNED, MASKED, SHARDS, SHARD)
    maxima, sums, ids = greedy_shards(values, first, IS_PROBS, SHARD, 128 // row[0].dtype.element_ty.primitive_bitwidth)
    store_shards(shard_max_ptr, entry, first_shard, num_shards, maxima)
    store_shards(shard_sum_ptr, entry, first_shard, num_shards, sums)
    store_shards(shard_argmax_ptr, entry, first_shard, num_shards, ids)


@triton.jit
def write_row(
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry,
    row, first_shard, end_shard, removed, num_shards, temperature, greedy,
    ALIGNED: tl.constexpr, EXCLUDES: tl.constexpr, IS_PROBS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write the statistics of some tiles of one row: whole tiles by a loop without masks, the rest behind it."""
    TILE: tl.constexpr = contract.TILE_SHARDS
    REST: tl.constexpr = contract.REST_SHARDS
    whole = tl.minimum(end_shard, row[1] // (TILE * SHARD) * TILE).to(tl.int64)
    scale = exponent_scale(tl.where(greedy, 1.0, temperature), IS_PROBS)
    if greedy:
        for shard in range(first_shard, whole, TILE):
            write_greedy_tile(
                shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, row, shard, num_shards,
                ALIGNED, False, IS_PROBS, TILE, SHARD,
            )  # fmt: skip
    elif EXCLUDES:
        # The tile that holds the removed id waits: looking for it would cost every other tile as much.
        home = removed // (TILE * SHARD) * TILE
        skips = (removed >= 0) & (home >= first_shard) & (home < whole)
        if skips:
            write_tile(
                shard_max_ptr, shard_sum_ptr, entry, row, home, removed, num_shards, scale,
                ALIGNED, False, True, IS_PROBS, TILE, SHARD,
            )  # fmt: skip
        for step in range(first_shard, whole - tl.where(skips, TILE, 0), TILE):
            write_tile(
                shard_max_ptr, shard_sum_ptr, entry, row, step + tl.where(skips & (step >= home), TILE, 0), removed,
                num_shards, scale, ALIGNED, False, False, IS_PROBS, TILE, SHARD,
            )  # fmt: skip
    else:
        for shard in range(first_shard, whole, TILE):
            write_tile(
                shard_max_ptr, shard_sum_ptr, entry, row, shard, removed, num_shards, scale,
                ALIGNED, False, False, IS_PROBS, TILE, SHARD,
            )  # fmt: skip
    # Shards past the end of a narrower row than the widest are written as well: they have no mass.
    rest = tl.maximum(first_shard, whole)
    if greedy:
        for shard in range(rest, end_shard, REST):
            write_greedy_tile(
                shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, row, shard, num_shards,
                ALIGNED, True, IS_PROBS, REST, SHARD,
            )  # fmt: skip
    else:
        for shard in range(rest, end_shard, REST):
            write_tile(
                shard_max_ptr, shard_sum_ptr, entry, row, shard, removed, num_shards, scale,
                ALIGNED, True, EXCLUDES, IS_PROBS, REST, SHARD,
            )  # fmt: skip


@triton.jit
def write_sequence(
    integers_ptr, temperatures_ptr, sequence, status, length, num_rows, target_offset, draft_offset, front, start,
    temperature, draft_temperature, greedy, draft_greedy,
):  # fmt: skip
    """Write what the later kernels need of a sequence; a greedy temperature becomes 0."""
    record_ptr = integers_ptr + sequence * contract.SEQUENCE_FIELDS
    tl.store(record_ptr + contract.STATUS_FIELD, status.to(tl.int64))
    tl.store(record_ptr + contract.LENGTH_FIELD, length)
    tl.store(record_ptr + contract.NUM_ROWS_FIELD, num_rows)
    tl.store(record_ptr + contract.TARGET_OFFSET_FIELD, target_offset)
    tl.store(record_ptr + contract.DRAFT_OFFSET_FIELD, draft_offset)
    tl.store(record_ptr + contract.FRONT_FIELD, front)
    tl.store(record_ptr + contract.START_FIELD, start)
    tl.store(temperatures_ptr + sequence * 2, tl.where(greedy, 0.0, temperature))
    tl.store(temperatures_ptr + sequence * 2 + 1, tl.where(draft_greedy, 0.0, draft_temperature))


@triton.jit
def write_draws(
    record_ptr, seed_ptr, stride_seed, position_ptr, stride_position,
    uniforms_ptr, uniforms_offset, stride_uniforms_kind, sequence, index, PURPOSE: tl.constexpr,
):  # fmt: skip
    """Write the accept and the emission uniform of a position, injected or generated."""
    if uniforms_ptr is None:
        seed = tl.load(seed_ptr + sequence * stride_seed)
        position = tl.load(position_ptr + sequence * stride_position) + index
        accept, emission = uniforms(seed, position, PURPOSE)
    else:
        accept = tl.load(uniforms_ptr + uniforms_offset)
        emission = tl.load(uniforms_ptr + uniforms_offset + stride_uniforms_kind)
    tl.store(record_ptr + contract.ACCEPT_FIELD, accept)
    tl.store(record_ptr + contract.EMISSION_FIELD, emission)


@triton.jit
def known_token(token, vocab):
    """Return a draft token; -1 for the placeholder, -2 for any other id out of range."""
    return tl.where((token >= 0) & (token < vocab), token, tl.where(token == -1, -1, -2))


@triton.jit
def write_token(
    record_ptr, token, target_rows, draft_rows, index, receipt_ptr, receipt_offset, stride_receipt_field, reads_draft,
    HAS_DRAFT: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
):  # fmt: skip
    """Write a draft token (-1 placeholder, -2 any other id out of range), its logits, and its receipt.

    A receipt that tells another logit than the draft row does belongs to another row or token: it becomes NaN.
    """
    known = known_token(token, target_rows[3])
    column = tl.maximum(known, 0)
    tl.store(record_ptr + contract.TOKEN_FIELD, known.to(tl.float64))
    target_logit = load_value(row_at(target_rows, index), column, column >= 0, TARGET_IS_PROBS)
    tl.store(record_ptr + contract.TARGET_LOGIT_FIELD, target_logit)
    if HAS_DRAFT:
        # Of a reduced vocabulary the columns are found where their weights are needed.
        known_column = reads_draft & (column < draft_rows[3])
        draft_logit = load_value(row_at(draft_rows, index), column, known_column, DRAFT_IS_PROBS)
        if receipt_ptr is None:
            tl.store(record_ptr + contract.DRAFT_LOGIT_FIELD, draft_logit)
        else:
            fields = tl.arange(0, 4).to(tl.int64)
            receipt = tl.load(receipt_ptr + receipt_offset + fields * stride_receipt_field)
            matches = draft_logit == tl.load(receipt_ptr + receipt_offset)
            tl.store(record_ptr + contract.DRAFT_LOGIT_FIELD + fields, tl.where(matches, receipt, float("nan")))


@kernel
def row_statistics(
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr,  # (batch, rows_per_sequence, num_shards)
    candidate_counts_ptr,  # (batch, rows_per_sequence)
    integers_ptr,  # (batch, SEQUENCE_FIELDS)
    temperatures_ptr,  # (batch, 2)
    records_ptr,  # (batch, gamma + 1, POSITION_FIELDS)
    token_ids_ptr, stride_token_sequence, stride_token_row,  # (batch, gamma) or (total,)
    target_logits_ptr, stride_target_sequence, stride_target_row,  # (batch, gamma + 1, vocab) or (rows, vocab)
    draft_logits_ptr, stride_draft_sequence, stride_draft_row,  # (slots, gamma, vocab) or (total, vocab)
    receipt_ptr, stride_receipt_sequence, stride_receipt_row, stride_receipt_field,  # (batch, gamma, 4) or (total, 4)
    lengths_ptr, stride_lengths,  # (batch,) lengths or (batch + 1,) prefix sums
    draft_index_ptr, stride_draft_index,  # (batch,)
    temperature_ptr, stride_temperature, top_p_ptr, stride_top_p, min_p_ptr, stride_min_p,  # (batch,) or (1,)
    draft_temperature_ptr, stride_draft_temperature, draft_top_p_ptr, stride_draft_top_p, draft_min_p_ptr,
    stride_draft_min_p, seed_ptr, stride_seed, position_ptr, stride_position,  # likewise
    uniforms_ptr, stride_uniforms_sequence, stride_uniforms_row, stride_uniforms_kind,  # (batch, gamma + 1, 2) or flat
    bias_offsets_ptr, bias_ids_ptr, bias_values_ptr,  # (batch + 1,), (entries,), likewise
    allowed_ptr, stride_allowed_sequence, stride_allowed_row,  # (batch, rows, words)
    draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr,
    draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row, draft_vocab,
    gamma, total, vocab, num_shards, rows_per_sequence, draft_slots, bonus_rows, shards_per_program,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    SAME_ROWS: tl.constexpr, EXCLUDES: tl.constexpr, PURPOSE: tl.constexpr,
    SHARD: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Grid (batch * rows_per_sequence, ceil(num_shards / shards_per_program)): target rows, then draft rows."""
    # 32-bit division, which the hardware has; 64 bits before anything is multiplied.
    sequence = (tl.program_id(0) // rows_per_sequence).to(tl.int64)
    row = (tl.program_id(0) % rows_per_sequence).to(tl.int64)
    first_shard = tl.program_id(1).to(tl.int64) * shards_per_program
    start, length, status = locate(lengths_ptr, stride_lengths, sequence, gamma, total, FLAT)
    temperature = load_real(temperature_ptr, stride_temperature, sequence, 1.0)
    top_p = load_real(top_p_ptr, stride_top_p, sequence, 1.0)
    greedy = is_greedy(temperature, top_p)
    draft_temperature = load_real(draft_temperature_ptr, stride_draft_temperature, sequence, 1.0)
    draft_top_p = load_real(draft_top_p_ptr, stride_draft_top_p, sequence, 1.0)
    draft_greedy = is_greedy(draft_temperature, draft_top_p)
    slot, slot_status = draft_slot(draft_index_ptr, stride_draft_index, sequence, draft_slots)
    num_rows = length + bonus_rows
    front = start + sequence * bonus_rows if FLAT else start
    target_offset = sequence * stride_target_sequence + front * stride_target_row
    draft_offset = slot * stride_draft_sequence
    if draft_index_ptr is None:
        draft_offset += start * stride_draft_row
    index = tl.where(row <= gamma, row, row - gamma - 1)
    target_rows = rows_of(
        target_logits_ptr, target_offset, stride_target_row, vocab, sequence, front,
        (bias_offsets_ptr, bias_ids_ptr, bias_values_ptr), (allowed_ptr, stride_allowed_sequence, stride_allowed_row),
    )  # fmt: skip
    draft_rows = rows_of(
        target_logits_ptr if draft_logits_ptr is None else draft_logits_ptr,
        draft_offset, stride_draft_row, draft_vocab, sequence, start,
        (draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr),
        (draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row),
    )  # fmt: skip
    uniforms_offset = sequence * stride_uniforms_sequence + front * stride_uniforms_row
    if (first_shard == 0) & (row == 0):
        status |= parameter_status(temperature, top_p, load_real(min_p_ptr, stride_min_p, sequence, 0.0))
        if draft_logits_ptr is not None:
            draft_min_p = load_real(draft_min_p_ptr, stride_draft_min_p, sequence, 0.0)
            status |= slot_status | parameter_status(draft_temperature, draft_top_p, draft_min_p)
        if uniforms_ptr is not None:
            status |= uniforms_status(
                uniforms_ptr, uniforms_offset, num_rows, stride_uniforms_row, stride_uniforms_kind, BLOCK_POSITIONS
            )
        write_sequence(
            integers_ptr, temperatures_ptr, sequence, status, length, num_rows, target_offset, draft_offset, front,
            start, temperature, draft_temperature, greedy, draft_greedy,
        )  # fmt: skip
    if (first_shard == 0) & (row < num_rows):
        record_ptr = records_ptr + (sequence * (gamma + 1) + row) * contract.POSITION_FIELDS
        write_draws(
            record_ptr, seed_ptr, stride_seed, position_ptr, stride_position,
            uniforms_ptr, uniforms_offset + row * stride_uniforms_row, stride_uniforms_kind, sequence, row, PURPOSE,
        )  # fmt: skip
        if row < length:
            token_offset = sequence * stride_token_sequence + (start + row) * stride_token_row
            receipt_offset = sequence * stride_receipt_sequence + (start + row) * stride_receipt_row
            write_token(
                record_ptr, tl.load(token_ids_ptr + token_offset).to(tl.int64), target_rows, draft_rows, row,
                receipt_ptr, receipt_offset, stride_receipt_field, ~greedy,
                draft_logits_ptr is not None, TARGET_IS_PROBS, DRAFT_IS_PROBS,
            )  # fmt: skip
    if candidate_counts_ptr is not None:  # noqa: SIM102 (decided while compiling)
        if first_shard == 0:
            tl.store(candidate_counts_ptr + sequence * rows_per_sequence + row, 0)
    entry = (sequence * rows_per_sequence + row) * num_shards
    end_shard = tl.minimum(first_shard + shards_per_program, num_shards)
    reads = row < num_rows
    # A receipt stands for the statistics of the draft row.
    STREAMS_DRAFT: tl.constexpr = draft_logits_ptr is not None and receipt_ptr is None
    target_row = row_at(target_rows, index)
    if STREAMS_DRAFT:
        reads_draft = (row > gamma) & (index < length) & ~greedy
        draft_row = row_at(draft_rows, index)
        if SAME_ROWS:
            # Neither has a bias or a mask here, so the rows differ by their address only.
            row_ptr = target_row[0]
            if row > gamma:
                row_ptr = draft_row[0]
                temperature = draft_temperature
                greedy = draft_greedy
            target_row = (row_ptr, vocab, target_row[2], target_row[3])
            reads = reads | reads_draft
        elif reads_draft:
            write_row(
                shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, draft_row,
                first_shard, end_shard, -1, num_shards, draft_temperature, draft_greedy,
                ALIGNED, False, DRAFT_IS_PROBS, SHARD,
            )  # fmt: skip
            return
    if reads:
        removed = tl.full((), -1, tl.int64)
        if EXCLUDES:  # noqa: SIM102 (decided while compiling)
            if row < length:
                token_offset = sequence * stride_token_sequence + (start + row) * stride_token_row
                removed = known_token(tl.load(token_ids_ptr + token_offset).to(tl.int64), vocab)
        write_row(
            shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, target_row,
            first_shard, end_shard, removed, num_shards, temperature, greedy, ALIGNED, EXCLUDES, TARGET_IS_PROBS, SHARD,
        )  # fmt: skip
