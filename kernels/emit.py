"""The last kernel of a round: decide, draw one token by hierarchical inverse CDF, write every output.

One program a sequence. The emission uniform picks the shard by a float64 prefix over the shard masses, then the id by a
prefix inside that one shard, the only part of the row that is read again. What a rejected point mass leaves needs no
more: the shard sums of its row never held the draft token. Bytes per logit of the shard: its own size, and the draft's
where a residual is drawn.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .blocks import exponent_scale, flag, kernel, safe_shift, spread, weights_float64
from .decide import decide, load_sequence, merge_rows, row_filter, score
from .emission import draft_facts, emission_weights, load_shards, pick, round_up
from .rows import load_value, row_at, rows_of


@triton.jit
def times(left, right):
    """Combine two factors in a reduction."""
    return left * right


@triton.jit
def draw(
    buffers, sizes, residual_mass_ptr, kept_mass_ptr, target_row, draft_row, columns,
    sequence, index, wanted, excluded, emission, temperature, draft_temperature,
    HAS_DRAFT: tl.constexpr, HAS_RECEIPT: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    ALIGNED: tl.constexpr, SHARD: tl.constexpr, BLOCK_SHARDS: tl.constexpr,
):  # fmt: skip
    """Return the token drawn from a valid row that samples, and 1 if a residual was wanted but had no mass."""
    num_shards, rows_per_sequence = sizes[1], sizes[2]
    row = sequence * rows_per_sequence + index
    shards = tl.arange(0, BLOCK_SHARDS)
    inside = shards < num_shards
    maxima, masses, row_max = load_shards(
        buffers, row, excluded, num_shards, temperature, TARGET_IS_PROBS, BLOCK_SHARDS
    )
    weight_sum = tl.sum(masses, axis=0)
    one = tl.zeros((1,), tl.int64)
    thresholds, sums = row_filter(buffers, one + row, one == 0, weight_sum + one)
    threshold = tl.max(thresholds, axis=0)
    floor = round_up(threshold)
    scale = exponent_scale(temperature, TARGET_IS_PROBS)
    removed, draft_shift, draft_scale, draft_threshold, factor, only = draft_facts(
        buffers, sizes, sequence, index, wanted, draft_temperature, tl.max(sums, axis=0),
        HAS_DRAFT, HAS_RECEIPT, columns[0] is not None, DRAFT_IS_PROBS, BLOCK_SHARDS,
    )  # fmt: skip

    # The statistics hold sums in units of each shard's maximum; masses of the residual kernel have the row's.
    by_shard = flag(threshold == float("-inf"))
    if kept_mass_ptr is not None:
        kept = tl.load(
            kept_mass_ptr + sequence * num_shards + shards, mask=inside & ~spread(by_shard, shards), other=0.0
        )
        masses = tl.where(by_shard, masses, kept)
    residual = masses
    if residual_mass_ptr is not None:
        summed = tl.load(
            residual_mass_ptr + sequence * num_shards + shards, mask=inside & spread(wanted, shards), other=0.0
        )
        residual = tl.where(wanted, summed, masses)
    total = tl.sum(residual, axis=0)
    empty = wanted & ~((total > 0.0) & (total < float("inf")))
    subtracts = wanted & ~empty
    masses = tl.where(subtracts, residual, masses)
    if residual_mass_ptr is not None:
        by_shard = by_shard & ~subtracts
    # All that such a row holds is the token that its shard sums leave out.
    sole = tl.where(empty, removed, -1)
    removed = tl.where(subtracts, removed, -1)
    factor = tl.where(subtracts, factor, 0.0)

    target_mass = emission * tl.sum(masses, axis=0)
    shard = tl.maximum(pick(shards, masses, target_mass), 0)
    rest = target_mass - tl.sum(tl.where(shards < shard, masses, 0.0), axis=0)
    shard_max = tl.max(tl.where(shards == shard, maxima, float("-inf")), axis=0)
    unit = weights_float64(shard_max.to(tl.float64), row_max, temperature, TARGET_IS_PROBS)
    shift = tl.where(by_shard, shard_max, row_max.to(tl.float32))
    first = shard.to(tl.int64) * SHARD
    _, drawn = emission_weights(
        target_row, draft_row, columns, first, safe_shift(shift, TARGET_IS_PROBS), scale, floor,
        (removed, draft_shift, draft_scale, draft_threshold, factor, only),
        TARGET_IS_PROBS, DRAFT_IS_PROBS, HAS_DRAFT, ALIGNED, SHARD,
    )  # fmt: skip
    token = pick(first.to(tl.int32) + tl.arange(0, SHARD), drawn.to(tl.float64), tl.where(by_shard, rest / unit, rest))
    if excluded is not None:
        token = tl.where(sole >= 0, sole, token)
    return token, empty.to(tl.int32)


@triton.jit
def write_scores(
    logprobs_ptr, accept_probs_ptr, expected_ptr, buffers, sizes, draft_rows, columns,
    sequence, length, num_accepted, runs, temperature, draft_temperature,
    HAS_DRAFT: tl.constexpr, HAS_RECEIPT: tl.constexpr, EXCLUDES: tl.constexpr,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities of all positions but the emitted one, and the accept probabilities of all."""
    gamma = sizes[0]
    order = tl.arange(0, BLOCK_POSITIONS)
    expected = tl.full((), 0.0, tl.float64)
    running = tl.full((), 1.0, tl.float64)
    for chunk in range(0, gamma + 1, BLOCK_POSITIONS):
        positions = (chunk + order).to(tl.int64)
        _, _, chance, prob, _ = score(
            buffers, sizes, draft_rows, columns, sequence, positions, length, temperature, draft_temperature,
            HAS_DRAFT, HAS_RECEIPT, EXCLUDES, TARGET_IS_PROBS, DRAFT_IS_PROBS, BLOCK_SHARDS,
        )  # fmt: skip
        if logprobs_ptr is not None:
            accepted = positions < num_accepted
            logprob = tl.where(accepted, tl.log(tl.where(accepted, prob, 1.0)), 0.0)
            mask = (positions <= gamma) & (positions != num_accepted)
            tl.store(logprobs_ptr + sequence * (gamma + 1) + positions, logprob.to(tl.float32), mask=mask)
        if accept_probs_ptr is not None:
            chance = tl.where(runs, chance, float("nan"))
            tl.store(accept_probs_ptr + sequence * gamma + positions, chance.to(tl.float32), mask=positions < gamma)
            known = tl.where((chance == chance) & (positions < length), chance, 0.0)
            factors = tl.where(order[None, :] <= order[:, None], known[None, :], 1.0)
            products = running * tl.reduce(factors, 1, times)
            expected += tl.sum(products, axis=0)
            running = tl.min(products, axis=0)
    if accept_probs_ptr is not None:
        tl.store(expected_ptr + sequence, expected.to(tl.float32))


@triton.jit
def write_tokens(
    token_ids_ptr, num_accepted_ptr, num_emitted_ptr, status_ptr, records_ptr,
    sequence, gamma, num_accepted, emits, token, status, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Write the accepted tokens, the emitted one, -1 behind them, and the counts."""
    for chunk in range(0, gamma + 1, BLOCK_POSITIONS):
        positions = (chunk + tl.arange(0, BLOCK_POSITIONS)).to(tl.int64)
        accepted = positions < num_accepted
        records = records_ptr + (sequence * (gamma + 1) + positions) * contract.POSITION_FIELDS
        drafted = tl.load(records + contract.TOKEN_FIELD, mask=accepted, other=-1.0).to(tl.int64)
        row = tl.where((positions == num_accepted) & spread(emits, positions), token, drafted)
        tl.store(token_ids_ptr + sequence * (gamma + 1) + positions, row, mask=positions <= gamma)
    tl.store(status_ptr + sequence, status)
    if num_accepted_ptr is not None:
        tl.store(num_accepted_ptr + sequence, num_accepted)
        tl.store(num_emitted_ptr + sequence, num_accepted + emits.to(tl.int64))


@triton.jit
def write_receipt(receipt_ptr, sequence, emits, logit, row_max, threshold, weight_sum):
    """Write what verify needs of the row that a draft token was drawn from; NaN where none was."""
    nothing = float("nan")
    tl.store(receipt_ptr + sequence * 4, tl.where(emits, logit, nothing))
    tl.store(receipt_ptr + sequence * 4 + 1, tl.where(emits, row_max, nothing))
    tl.store(receipt_ptr + sequence * 4 + 2, tl.where(emits, threshold, nothing))
    tl.store(receipt_ptr + sequence * 4 + 3, tl.where(emits, weight_sum, nothing))


@kernel
def emit_tokens(
    token_ids_ptr,  # (batch, gamma + 1)
    num_accepted_ptr, num_emitted_ptr, status_ptr,  # (batch,)
    logprobs_ptr, accept_probs_ptr, expected_ptr,  # (batch, gamma + 1), (batch, gamma), (batch,)
    receipt_ptr,  # (batch, 4)
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
    gamma, vocab, num_shards, rows_per_sequence,
    HAS_RECEIPT: tl.constexpr, EXCLUDES: tl.constexpr, TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    ALIGNED: tl.constexpr, SHARD: tl.constexpr, BLOCK_SHARDS: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Grid (batch,)."""
    sequence = tl.program_id(0).to(tl.int64)
    HAS_DRAFT: tl.constexpr = draft_logits_ptr is not None
    buffers = (shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, row_threshold_ptr, row_sum_ptr, records_ptr)
    sizes = (gamma, num_shards, rows_per_sequence)
    status, length, num_rows, target_offset, draft_offset, front, start, temperature, draft_temperature = load_sequence(
        integers_ptr, temperatures_ptr, sequence
    )
    runs = (status & contract.INVALID_ARGUMENT) == 0
    length = tl.where(runs, length, 0)
    greedy = flag(temperature == 0.0)
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
    index, bits, wanted = decide(
        buffers, sizes, draft_rows, columns, sequence, length, temperature, draft_temperature,
        HAS_DRAFT, HAS_RECEIPT, EXCLUDES, TARGET_IS_PROBS, DRAFT_IS_PROBS, BLOCK_SHARDS, BLOCK_POSITIONS,
    )  # fmt: skip
    one = tl.zeros((1,), tl.int64)
    row = one + sequence * rows_per_sequence + index
    record_ptr = records_ptr + (sequence * (gamma + 1) + index) * contract.POSITION_FIELDS
    excluded = None
    exclusions = None
    if EXCLUDES:
        drafted = runs & ~greedy & flag(index < length)
        known = drafted & flag(tl.load(record_ptr + contract.TOKEN_FIELD, mask=drafted, other=-1.0) >= 0.0)
        excluded = tl.load(record_ptr + contract.TARGET_LOGIT_FIELD, mask=known, other=float("-inf"))
        exclusions = excluded + one.to(tl.float64)
    has_row = runs & flag(index < num_rows)
    row_maxima, sums, argmaxima = merge_rows(
        buffers, row, spread(has_row, one), exclusions, num_shards, temperature, TARGET_IS_PROBS, BLOCK_SHARDS
    )
    emits = has_row & flag(tl.max(sums, axis=0) > 0.0)
    bits |= tl.where(has_row & ~emits, contract.TARGET_INVALID, 0)
    thresholds, sums = row_filter(buffers, row, spread(emits & ~greedy, one), sums)
    row_max = tl.max(row_maxima, axis=0)
    weight_sum = tl.max(sums, axis=0)
    threshold = tl.max(thresholds, axis=0)
    token = tl.min(argmaxima, axis=0)
    target_row = row_at(target_rows, index)
    if emits & ~greedy:
        draft_row = target_row
        if HAS_DRAFT:
            draft_row = row_at(draft_rows, index)
        token, empty = draw(
            buffers, sizes, residual_mass_ptr, kept_mass_ptr, target_row, draft_row, columns,
            sequence, index, wanted, excluded, tl.load(record_ptr + contract.EMISSION_FIELD), temperature,
            draft_temperature,
            HAS_DRAFT, HAS_RECEIPT, TARGET_IS_PROBS, DRAFT_IS_PROBS, ALIGNED, SHARD, BLOCK_SHARDS,
        )  # fmt: skip
        bits |= tl.where(empty > 0, contract.RESIDUAL_EMPTY, 0)
    status |= tl.where(runs, bits, 0)
    write_tokens(
        token_ids_ptr, num_accepted_ptr, num_emitted_ptr, status_ptr, records_ptr,
        sequence, gamma, index, emits, token.to(tl.int64), status, BLOCK_POSITIONS,
    )  # fmt: skip
    logit = load_value(target_row, tl.maximum(token, 0), emits, TARGET_IS_PROBS)
    if logprobs_ptr is not None:
        weight = weights_float64(logit, row_max, tl.where(greedy, 1.0, temperature), TARGET_IS_PROBS)
        prob = tl.where(emits & ~greedy, weight / weight_sum, 1.0)
        tl.store(logprobs_ptr + sequence * (gamma + 1) + index, tl.log(prob).to(tl.float32))
    if logprobs_ptr is not None or accept_probs_ptr is not None:
        write_scores(
            logprobs_ptr, accept_probs_ptr, expected_ptr, buffers, sizes, draft_rows, columns,
            sequence, length, index, runs, temperature, draft_temperature,
            HAS_DRAFT, HAS_RECEIPT, EXCLUDES, TARGET_IS_PROBS, DRAFT_IS_PROBS, BLOCK_SHARDS, BLOCK_POSITIONS,
        )  # fmt: skip
    if receipt_ptr is not None:
        threshold = tl.where(greedy, row_max, threshold)
        weight_sum = tl.where(greedy, 1.0, weight_sum)
        write_receipt(receipt_ptr, sequence, emits, logit, row_max, threshold, weight_sum)
