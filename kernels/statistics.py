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
from .arguments import (
    draft_slot,
    is_greedy,
    load_real,
    locate,
    parameter_status,
    uniforms_status,
)
from .blocks import exponent_scale, greedy_shard, kernel, sampled_shard, uniforms
from .rows import load_shard, load_value, row_at, rows_of


@triton.jit
def write_row(
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry,
    row, first_shard, end_shard, temperature, greedy,
    ALIGNED: tl.constexpr, IS_PROBS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write the statistics of some shards of one row; of a greedy row the arg-max, and no exponential."""
    scale = exponent_scale(tl.where(greedy, 1.0, temperature), IS_PROBS)
    for step in range(end_shard - first_shard):
        shard = first_shard + step
        first = shard * SHARD
        values = load_shard(row, first, IS_PROBS, ALIGNED, SHARD)
        if greedy:
            shard_max, shard_sum, argmax = greedy_shard(values, first, IS_PROBS)
            tl.store(shard_argmax_ptr + entry + shard, argmax)
            tl.store(shard_max_ptr + entry + shard, shard_max)
            tl.store(shard_sum_ptr + entry + shard, shard_sum)
        else:
            shard_max, shard_sum = sampled_shard(values, scale, IS_PROBS)
            tl.store(shard_max_ptr + entry + shard, shard_max)
            tl.store(shard_sum_ptr + entry + shard, shard_sum)


@triton.jit
def write_sequence(
    integers_ptr, temperatures_ptr, sequence, status, length, target_offset, draft_offset, front, start,
    temperature, draft_temperature, greedy, draft_greedy,
):  # fmt: skip
    """Write what the later kernels need of a sequence; a greedy temperature becomes 0."""
    record_ptr = integers_ptr + sequence * contract.SEQUENCE_FIELDS
    tl.store(record_ptr + contract.STATUS_FIELD, status.to(tl.int64))
    tl.store(record_ptr + contract.LENGTH_FIELD, length)
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
def write_token(
    record_ptr, token, target_rows, draft_rows, index, receipt_ptr, receipt_offset, stride_receipt_field, reads_draft,
    HAS_DRAFT: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
):  # fmt: skip
    """Write a draft token (-1 placeholder, -2 any other id out of range), its logits, and its receipt.

    A receipt that tells another logit than the draft row does belongs to another row or token: it becomes NaN.
    """
    in_range = (token >= 0) & (token < target_rows[3])
    column = tl.where(in_range, token, 0)
    known = tl.where(in_range, token, tl.where(token == -1, -1, -2))
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
    integers_ptr,  # (batch, SEQUENCE_FIELDS)
    temperatures_ptr,  # (batch, 2)
    records_ptr,  # (batch, gamma + 1, POSITION_FIELDS)
    token_ids_ptr, stride_token_sequence, stride_token_row,  # (batch, gamma) or (total,)
    target_logits_ptr, stride_target_sequence, stride_target_row,  # (batch, gamma + 1, vocab) or (total + batch, vocab)
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
    gamma, total, vocab, num_shards, rows_per_sequence, draft_slots, shards_per_program,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    PURPOSE: tl.constexpr, SHARD: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
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
    front = start + sequence if FLAT else start
    target_offset = sequence * stride_target_sequence + front * stride_target_row
    draft_offset = slot * stride_draft_sequence + start * stride_draft_row
    index = tl.where(row <= gamma, row, row - gamma - 1)
    target_rows = rows_of(
        target_logits_ptr, target_offset, stride_target_row, vocab, sequence, front,
        (bias_offsets_ptr, bias_ids_ptr, bias_values_ptr), (allowed_ptr, stride_allowed_sequence, stride_allowed_row),
    )  # fmt: skip
    draft_rows = rows_of(
        draft_logits_ptr, draft_offset, stride_draft_row, draft_vocab, sequence, start,
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
                uniforms_ptr, uniforms_offset, length, stride_uniforms_row, stride_uniforms_kind, BLOCK_POSITIONS
            )
        write_sequence(
            integers_ptr, temperatures_ptr, sequence, status, length, target_offset, draft_offset, front, start,
            temperature, draft_temperature, greedy, draft_greedy,
        )  # fmt: skip
    if (first_shard == 0) & (row <= length):
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
    entry = (sequence * rows_per_sequence + row) * num_shards
    end_shard = tl.minimum(first_shard + shards_per_program, num_shards)
    if row <= length:
        write_row(
            shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, row_at(target_rows, index),
            first_shard, end_shard, temperature, greedy, ALIGNED, TARGET_IS_PROBS, SHARD,
        )  # fmt: skip
    # A receipt stands for the statistics of the draft row.
    if draft_logits_ptr is not None and receipt_ptr is None:  # noqa: SIM102 (decided while compiling)
        if (row > gamma) & (index < length) & ~greedy:
            write_row(
                shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, entry, row_at(draft_rows, index),
                first_shard, end_shard, draft_temperature, draft_greedy, ALIGNED, DRAFT_IS_PROBS, SHARD,
            )  # fmt: skip
