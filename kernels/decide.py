"""Device functions that decide a round from the small buffers: accepted tokens, status, and the row to draw from.

Scalars only, in float64. The kernels behind the statistics call these rather than wait for one another. `buffers`
is (shard_max_ptr, shard_sum_ptr, shard_argmax_ptr, row_threshold_ptr or None, row_sum_ptr or None, records_ptr), the
first three `(batch, rows_per_sequence, num_shards)`, the next two `(batch, rows_per_sequence)`; `sizes` is (gamma,
num_shards, rows_per_sequence).
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import triton
import triton.language as tl

from . import contract
from .blocks import NO_ID, flag, lowest, spread, weights_float64
from .rows import column_weights, row_at


@triton.jit
def bit_or(left, right):
    """Combine two status masks in a reduction."""
    return left | right


@triton.jit
def load_sequence(integers_ptr, temperatures_ptr, sequence):
    """Return status, length, target rows, row offsets, first rows and temperatures (0: greedy) of a sequence."""
    record_ptr = integers_ptr + sequence * contract.SEQUENCE_FIELDS
    status = tl.load(record_ptr + contract.STATUS_FIELD).to(tl.int32)
    length = tl.load(record_ptr + contract.LENGTH_FIELD)
    num_rows = tl.load(record_ptr + contract.NUM_ROWS_FIELD)
    target_offset = tl.load(record_ptr + contract.TARGET_OFFSET_FIELD)
    draft_offset = tl.load(record_ptr + contract.DRAFT_OFFSET_FIELD)
    front = tl.load(record_ptr + contract.FRONT_FIELD)
    start = tl.load(record_ptr + contract.START_FIELD)
    temperature = tl.load(temperatures_ptr + sequence * 2)
    draft_temperature = tl.load(temperatures_ptr + sequence * 2 + 1)
    return status, length, num_rows, target_offset, draft_offset, front, start, temperature, draft_temperature


@triton.jit
def merge_excluded(row_max, excluded, IS_PROBS: tl.constexpr):
    """Return the maximum of a row with the logit of a token that its shard sums leave out; -inf where none is."""
    return tl.maximum(row_max, tl.where((excluded > lowest(IS_PROBS)) & (excluded < float("inf")), excluded, row_max))


@triton.jit
def excluded_weight(excluded, row_max, temperature, IS_PROBS: tl.constexpr):
    """Return the weight of a token that the shard sums of its row leave out; 0 where none is, NaN if it is invalid."""
    weight = weights_float64(excluded, row_max, temperature, IS_PROBS)
    weight = tl.where((excluded > lowest(IS_PROBS)) & (excluded < float("inf")), weight, 0.0)
    healthy = (excluded < float("inf")) & ((excluded == float("-inf")) | (excluded >= lowest(IS_PROBS)))
    return tl.where(healthy, weight, float("nan"))


@triton.jit
def merge_rows(
    buffers, rows, mask, excluded, num_shards, temperature, IS_PROBS: tl.constexpr, BLOCK_SHARDS: tl.constexpr
):
    """Return row maximum, weight sum (not > 0 if invalid) and arg-max (of greedy rows) of a block of rows.

    `excluded` holds the logits of tokens that the shard sums leave out, -inf where none is; None where none ever is.
    """
    shard_max_ptr, shard_sum_ptr, shard_argmax_ptr = buffers[0], buffers[1], buffers[2]
    shards = tl.arange(0, BLOCK_SHARDS)
    entries = (rows * num_shards)[:, None] + shards[None, :]
    inside = mask[:, None] & (shards < num_shards)[None, :]
    maxima = tl.load(shard_max_ptr + entries, mask=inside, other=float("-inf")).to(tl.float64)
    sums = tl.load(shard_sum_ptr + entries, mask=inside, other=0.0)
    row_max = tl.max(maxima, axis=1)
    if excluded is not None:
        row_max = merge_excluded(row_max, excluded, IS_PROBS)
    greedy = flag(temperature == 0.0)
    factor = weights_float64(maxima, row_max[:, None], tl.where(greedy, 1.0, temperature), IS_PROBS)
    weight_sum = tl.sum(tl.where(maxima == float("-inf"), sums, sums * factor), axis=1)
    if excluded is not None:
        weight_sum += excluded_weight(excluded, row_max, tl.where(greedy, 1.0, temperature), IS_PROBS)
    argmax = tl.full((rows.shape[0],), NO_ID, tl.int32)
    if greedy:
        ids = tl.load(shard_argmax_ptr + entries, mask=inside, other=NO_ID)
        argmax = tl.min(tl.where(maxima == row_max[:, None], ids, NO_ID), axis=1)
    return row_max, weight_sum, argmax


@triton.jit
def row_filter(buffers, rows, mask, weight_sum):
    """Return the threshold of a block of rows (-inf: not filtered) and the weight sums that it keeps."""
    row_threshold_ptr, row_sum_ptr = buffers[3], buffers[4]
    threshold = tl.full((rows.shape[0],), float("-inf"), tl.float64)
    if row_threshold_ptr is not None:
        threshold = tl.load(row_threshold_ptr + rows, mask=mask, other=float("-inf"))
        filtered = mask & (threshold > float("-inf"))
        weight_sum = tl.where(filtered, tl.load(row_sum_ptr + rows, mask=filtered, other=0.0), weight_sum)
    return threshold, weight_sum


@triton.jit
def token_probs(
    buffers, records, rows, mask, token, num_shards, temperature,
    EXCLUDES: tl.constexpr, IS_PROBS: tl.constexpr, BLOCK_SHARDS: tl.constexpr,
):  # fmt: skip
    """Return the probability of a block of tokens in their rows, and whether the rows are valid.

    `records` points at the field that holds the token's logit in the row; EXCLUDES: the shard sums leave it out.
    """
    greedy = flag(temperature == 0.0)
    logit = tl.load(records, mask=mask, other=0.0)
    excluded = None
    if EXCLUDES:
        excluded = tl.where(mask & (token >= 0) & ~spread(greedy, mask), logit, float("-inf"))
    row_max, weight_sum, argmax = merge_rows(
        buffers, rows, mask, excluded, num_shards, temperature, IS_PROBS, BLOCK_SHARDS
    )
    valid = weight_sum > 0.0
    weight = weights_float64(logit, row_max, tl.where(greedy, 1.0, temperature), IS_PROBS)
    threshold, weight_sum = row_filter(buffers, rows, mask & valid & ~spread(greedy, mask), weight_sum)
    weight = tl.where(logit >= threshold, weight, 0.0)
    prob = tl.where(greedy, tl.where(token == argmax, 1.0, 0.0), weight / weight_sum)
    return tl.where(valid & mask & (token >= 0), prob, 0.0), valid


@triton.jit
def mapped_probs(
    buffers, draft_rows, columns, positions, rows, mask, token, num_shards, temperature,
    IS_PROBS: tl.constexpr, BLOCK_SHARDS: tl.constexpr,
):  # fmt: skip
    """Return the draft probability of a block of target ids with draft columns, and whether their rows are valid."""
    row_max, weight_sum, argmax = merge_rows(buffers, rows, mask, None, num_shards, temperature, IS_PROBS, BLOCK_SHARDS)
    valid = weight_sum > 0.0
    greedy = spread(temperature == 0.0, mask)
    threshold, weight_sum = row_filter(buffers, rows, mask & valid & ~greedy, weight_sum)
    weights = column_weights(
        row_at(draft_rows, positions), columns, token, mask & valid & (token >= 0), row_max,
        tl.where(greedy, 1.0, temperature), threshold, tl.where(greedy, argmax, -1), IS_PROBS, True,
    )  # fmt: skip
    return tl.where(valid & mask, weights / tl.where(greedy, 1.0, weight_sum), 0.0), valid


@triton.jit
def draft_probs(
    buffers, draft_rows, columns, positions, records, rows, mask, token, num_shards, temperature,
    HAS_DRAFT: tl.constexpr, HAS_RECEIPT: tl.constexpr, IS_PROBS: tl.constexpr, BLOCK_SHARDS: tl.constexpr,
):  # fmt: skip
    """Return the draft probability of a block of tokens, and whether their rows are valid."""
    if columns[0] is not None:
        prob, valid = mapped_probs(
            buffers, draft_rows, columns, positions, rows, mask, token, num_shards, temperature, IS_PROBS, BLOCK_SHARDS
        )
    elif HAS_RECEIPT:
        logit = tl.load(records + contract.DRAFT_LOGIT_FIELD, mask=mask, other=0.0)
        row_max = tl.load(records + contract.DRAFT_ROW_MAX_FIELD, mask=mask, other=0.0)
        threshold = tl.load(records + contract.DRAFT_THRESHOLD_FIELD, mask=mask, other=0.0)
        weight_sum = tl.load(records + contract.DRAFT_WEIGHT_SUM_FIELD, mask=mask, other=0.0)
        weight = weights_float64(logit, row_max, tl.where(temperature == 0.0, 1.0, temperature), IS_PROBS)
        prob = tl.where(logit >= threshold, weight / weight_sum, 0.0)
        valid = weight_sum > 0.0
    elif HAS_DRAFT:
        prob, valid = token_probs(
            buffers, records + contract.DRAFT_LOGIT_FIELD, rows, mask, token, num_shards, temperature,
            False, IS_PROBS, BLOCK_SHARDS,
        )  # fmt: skip
    else:
        prob = tl.full((token.shape[0],), 1.0, tl.float64)
        valid = token == token
    return prob, valid


@triton.jit
def score(
    buffers, sizes, draft_rows, columns, sequence, positions, length, temperature, draft_temperature,
    HAS_DRAFT: tl.constexpr, HAS_RECEIPT: tl.constexpr, EXCLUDES: tl.constexpr,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr, BLOCK_SHARDS: tl.constexpr,
):  # fmt: skip
    """Judge a block of positions as if all before them had been accepted.

    Returns (accepted, status bits, accept probability, target probability, whether to draw from the residual)
    """
    gamma, num_shards, rows_per_sequence = sizes
    records_ptr = buffers[5]
    drafted = positions < length
    greedy = spread(temperature == 0.0, drafted)
    records = records_ptr + (sequence * (gamma + 1) + positions) * contract.POSITION_FIELDS
    rows = sequence * rows_per_sequence + positions
    token = tl.load(records + contract.TOKEN_FIELD, mask=drafted, other=-1.0).to(tl.int32)
    accept = tl.load(records + contract.ACCEPT_FIELD, mask=drafted, other=0.0)
    target_prob, target_valid = token_probs(
        buffers, records + contract.TARGET_LOGIT_FIELD, rows, drafted, token, num_shards, temperature,
        EXCLUDES, TARGET_IS_PROBS, BLOCK_SHARDS,
    )  # fmt: skip
    draft_prob, draft_valid = draft_probs(
        buffers, draft_rows, columns, positions, records, rows + gamma + 1, drafted & ~greedy, token, num_shards,
        draft_temperature, HAS_DRAFT, HAS_RECEIPT, DRAFT_IS_PROBS, BLOCK_SHARDS,
    )  # fmt: skip
    in_range = token >= 0
    # Multiplied, not divided, and strict: u = 0 never accepts a token without target mass.
    passes = (accept * draft_prob < target_prob) | (target_prob >= draft_prob)
    passes = (target_prob > 0.0) & (greedy | (passes & draft_valid))
    accepted = drafted & in_range & target_valid & passes

    sampled = in_range & ~greedy
    bits = tl.where(token == -1, contract.DRAFT_TOKEN_PLACEHOLDER, contract.DRAFT_TOKEN_OUT_OF_RANGE)
    bits = tl.where(in_range, 0, bits)
    bits = tl.where(sampled & ~draft_valid, contract.DRAFT_INVALID, bits)
    bits = tl.where(sampled & draft_valid & (draft_prob == 0.0), contract.DRAFT_TOKEN_IMPOSSIBLE, bits)
    bits = tl.where(drafted, tl.where(target_valid, bits, contract.TARGET_INVALID), 0)

    chance = tl.where(target_prob >= draft_prob, tl.where(target_prob > 0.0, 1.0, 0.0), target_prob / draft_prob)
    chance = tl.where(greedy, target_prob, tl.where(draft_valid, chance, float("nan")))
    chance = tl.where(in_range, chance, 0.0)
    chance = tl.where(drafted, tl.where(target_valid, chance, float("nan")), 0.0)
    return accepted, bits, chance, target_prob, sampled & draft_valid


@triton.jit
def decide(
    buffers, sizes, draft_rows, columns, sequence, length, temperature, draft_temperature,
    HAS_DRAFT: tl.constexpr, HAS_RECEIPT: tl.constexpr, EXCLUDES: tl.constexpr,
    TARGET_IS_PROBS: tl.constexpr, DRAFT_IS_PROBS: tl.constexpr,
    BLOCK_SHARDS: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return (num_accepted, status bits of the positions that decided, whether to draw from the residual)."""
    num_accepted = length
    status = tl.full((), 0, tl.int32)
    residual = tl.full((), 0, tl.int32)
    for chunk in range(0, length, BLOCK_POSITIONS):
        positions = (chunk + tl.arange(0, BLOCK_POSITIONS)).to(tl.int64)
        accepted, bits, _, _, subtractable = score(
            buffers, sizes, draft_rows, columns, sequence, positions, length, temperature, draft_temperature,
            HAS_DRAFT, HAS_RECEIPT, EXCLUDES, TARGET_IS_PROBS, DRAFT_IS_PROBS, BLOCK_SHARDS,
        )  # fmt: skip
        num_accepted = tl.minimum(num_accepted, tl.min(tl.where(accepted, length, positions), axis=0))
        status |= tl.reduce(tl.where(positions <= num_accepted, bits, 0), 0, bit_or)
        here = (positions == num_accepted) & (positions < length) & subtractable
        residual = tl.maximum(residual, tl.max(here.to(tl.int32), axis=0))
    return num_accepted, status, residual > 0
