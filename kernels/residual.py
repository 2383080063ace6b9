"""Residual masses: of every vocabulary shard of the rows that emit, where the statistics cannot tell them.

One program reads some shards of one target row and, where a residual is wanted, of its draft row, once:

    residual_mass = sum(max(target_weight - draft_weight * (W_target / W_draft), 0))

and, for the same price, `kept_mass`, the sum of the target weights that the filters keep. Bytes per logit: the target's
size and the draft's, nothing written; 8 or 16 bytes written a shard. Sequences that draw from an unfiltered target row
(all accepted, greedy, nothing to subtract) return at once: their shard sums are known.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .blocks import exponent_scale, kernel
from .decide import decide, load_sequence, row_filter
from .emission import draft_facts, emission_weights, load_shards, round_up, tile_weights
from .rows import row_at, rows_of
from .tiles import store_shards, sum_shards, tile_ids


@triton.jit
def write_masses(
    residual_mass_ptr, kept_mass_ptr, entry, first_shard, target_row, draft_row, shift, scale, floor, draft, num_shards,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr, SUBTRACTS: tl.constexpr, REMOVES: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, SHARDS: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write the masses of one tile; REMOVES leaves out the removed id, which need not be looked for elsewhere."""
    first = first_shard * SHARD
    kept, drawn = tile_weights(
        target_row, draft_row, first, shift, scale, floor, draft,
        TARGET_IS_PROBS, DRAFT_IS_PROBS, SUBTRACTS, ALIGNED, MASKED, SHARDS, SHARD,
    )  # fmt: skip
    if REMOVES:
        drawn = tl.where(tile_ids(first, SHARDS, SHARD) == draft[0], 0.0, drawn)
    kept_mass = sum_shards(kept)
    mass = sum_shards(drawn) if SUBTRACTS or REMOVES else kept_mass
    store_shards(residual_mass_ptr, entry, first_shard, num_shards, mass)
    if kept_mass_ptr is not None:
        store_shards(kept_mass_ptr, entry, first_shard, num_shards, kept_mass)


@triton.jit
def write_tiles(
    residual_mass_ptr, kept_mass_ptr, entry, first_shard, end_shard, target_row, draft_row, shift, scale, floor, draft,
    num_shards,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr, SUBTRACTS: tl.constexpr,
    ALIGNED: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write the masses of some tiles: whole tiles by a loop without masks, the rest behind it."""
    TILE: tl.constexpr = contract.TILE_SHARDS
    REST: tl.constexpr = contract.REST_SHARDS
    whole = tl.minimum(end_shard, target_row[1] // (TILE * SHARD) * TILE).to(tl.int64)
    for shard in range(first_shard, whole, TILE):
        write_masses(
            residual_mass_ptr, kept_mass_ptr, entry, shard, target_row, draft_row, shift, scale, floor, draft,
            num_shards, TARGET_IS_PROBS, DRAFT_IS_PROBS, SUBTRACTS, False, ALIGNED, False, TILE, SHARD,
        )  # fmt: skip
    # What is left: the shards that the row ends in and those behind it, and again those beside a removed id.
    rest = tl.maximum(first_shard, whole)
    home = draft[0].to(tl.int64) // (REST * SHARD) * REST
    again = (not SUBTRACTS) & (draft[0] >= 0) & (home >= first_shard) & (home < whole)
    for step in range(rest - tl.where(again, REST, 0), end_shard, REST):
        write_masses(
            residual_mass_ptr, kept_mass_ptr, entry, tl.where(step < rest, home, step), target_row, draft_row, shift,
            scale, floor, draft, num_shards,
            TARGET_IS_PROBS, DRAFT_IS_PROBS, SUBTRACTS, not SUBTRACTS, ALIGNED, True, REST, SHARD,
        )  # fmt: skip


@triton.jit
def write_mapped(
    residual_mass_ptr, kept_mass_ptr, entry, first_shard, end_shard, target_row, draft_row, columns, shift,
    scale, floor, draft,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr, ALIGNED: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """Write the masses of some shards where the draft's columns have to be looked up id by id."""
    for shard in range(first_shard, end_shard):
        kept, drawn = emission_weights(
            target_row, draft_row, columns, (entry & 0) + shard * SHARD, shift, scale, floor, draft,
            TARGET_IS_PROBS, DRAFT_IS_PROBS, True, ALIGNED, SHARD,
        )  # fmt: skip
        tl.store(residual_mass_ptr + entry + shard, tl.sum(drawn.to(tl.float64), axis=0))
        if kept_mass_ptr is not None:
            tl.store(kept_mass_ptr + entry + shard, tl.sum(kept.to(tl.float64), axis=0))


@kernel
def residual_mass(
    residual_mass_ptr, kept_mass_ptr,  # (batch, num_shards)
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr,  # (batch, rows_per_sequence, num_shards)
    row_threshold_ptr, row_sum_ptr,  # (batch, rows_per_sequence)
    records_ptr, integers_ptr, temperatures_ptr,
    target_logits_ptr, stride_target_row, draft_logits_ptr, stride_draft_row,
    bias_offsets_ptr, bias_ids_ptr, bias_values_ptr,  # (batch + 1,), (entries,), likewise
    allowed_ptr, stride_allowed_sequence, stride_allowed_row,  # (batch, rows, words)
    draft_bias_offsets_ptr, draft_bias_ids_ptr, draft_bias_values_ptr,
    draft_allowed_ptr, stride_draft_allowed_sequence, stride_draft_allowed_row, draft_vocab,
    columns_ptr, column_targets_ptr,  # (draft_vocab,), likewise
    gamma, vocab, num_shards, rows_per_sequence, shards_per_program,
    ALIGNED: tl.constexpr, HAS_RECEIPT: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    SHARD: tl.constexpr, BLOCK_SHARDS: tl.constexpr, FEW_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Grid (batch, ceil(num_shards / shards_per_program))."""
    sequence = tl.program_id(0).to(tl.int64)
    first_shard = tl.program_id(1).to(tl.int64) * shards_per_program
    HAS_DRAFT: tl.constexpr = draft_logits_ptr is not None
    buffers = (shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, row_threshold_ptr, row_sum_ptr, records_ptr)
    sizes = (gamma, num_shards, rows_per_sequence)
    status, length, num_rows, target_offset, draft_offset, front, start, temperature, draft_temperature = load_sequence(
        integers_ptr, temperatures_ptr, sequence
    )
    if ((status & contract.INVALID_ARGUMENT) != 0) | (temperature == 0.0):
        return
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
    columns = (columns_ptr, column_targets_ptr)
    index, _, wanted = decide(
        buffers, sizes, draft_rows, columns, sequence, length, temperature, draft_temperature,
        HAS_DRAFT, HAS_RECEIPT, False, TARGET_IS_PROBS, DRAFT_IS_PROBS, BLOCK_SHARDS, FEW_POSITIONS,
    )  # fmt: skip
    if row_threshold_ptr is not None:  # noqa: SIM102 (decided while compiling)
        # Without a bonus row there is nothing to draw from, nor a threshold.
        if index >= num_rows:
            return
    row = sequence * rows_per_sequence + index
    _, masses, row_max = load_shards(buffers, row, None, num_shards, temperature, TARGET_IS_PROBS, BLOCK_SHARDS)
    weight_sum = tl.sum(masses, axis=0)
    if not (weight_sum > 0.0):
        return
    one = tl.zeros((1,), tl.int64)
    thresholds, sums = row_filter(buffers, one + row, one == 0, weight_sum + one)
    threshold = tl.max(thresholds, axis=0)
    if (not wanted) & (threshold == float("-inf")):
        return
    draft = draft_facts(
        buffers, sizes, sequence, index, wanted, draft_temperature, tl.max(sums, axis=0),
        HAS_DRAFT, HAS_RECEIPT, columns_ptr is not None, DRAFT_IS_PROBS, BLOCK_SHARDS,
    )  # fmt: skip
    target_row = row_at(target_rows, index)
    draft_row = target_row
    if HAS_DRAFT:
        draft_row = row_at(draft_rows, index)
    scale = exponent_scale(temperature, TARGET_IS_PROBS)
    shift = row_max.to(tl.float32)
    floor = round_up(threshold)
    entry = sequence * num_shards
    end_shard = tl.minimum(first_shard + shards_per_program, num_shards)
    if columns_ptr is not None:
        write_mapped(
            residual_mass_ptr, kept_mass_ptr, entry, first_shard, end_shard, target_row, draft_row, columns, shift,
            scale, floor, draft, TARGET_IS_PROBS, DRAFT_IS_PROBS, ALIGNED, SHARD,
        )  # fmt: skip
        return
    if HAS_DRAFT:  # noqa: SIM102 (decided while compiling)
        if draft[4] > 0.0:
            write_tiles(
                residual_mass_ptr, kept_mass_ptr, entry, first_shard, end_shard, target_row, draft_row, shift, scale,
                floor, draft, num_shards, TARGET_IS_PROBS, DRAFT_IS_PROBS, True, ALIGNED, SHARD,
            )  # fmt: skip
            return
    write_tiles(
        residual_mass_ptr, kept_mass_ptr, entry, first_shard, end_shard, target_row, draft_row, shift, scale,
        floor, draft, num_shards, TARGET_IS_PROBS, DRAFT_IS_PROBS, False, ALIGNED, SHARD,
    )  # fmt: skip
