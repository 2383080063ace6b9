"""Numbers that the kernels share with the rest of the library, and the sizes of their tiles.

The status bits and the greedy threshold are those of `specker.Status` and `specker.sampling`; a test compares them.
"""

from __future__ import annotations

import triton.language as tl

TARGET_INVALID = tl.constexpr(1)
DRAFT_INVALID = tl.constexpr(2)
DRAFT_TOKEN_PLACEHOLDER = tl.constexpr(4)
DRAFT_TOKEN_OUT_OF_RANGE = tl.constexpr(8)
DRAFT_TOKEN_IMPOSSIBLE = tl.constexpr(16)
RESIDUAL_EMPTY = tl.constexpr(32)
INVALID_TEMPERATURE = tl.constexpr(64)
INVALID_TOP_P = tl.constexpr(128)
INVALID_MIN_P = tl.constexpr(256)
INVALID_NUM_DRAFT_TOKENS = tl.constexpr(512)
INVALID_UNIFORMS = tl.constexpr(1024)
INVALID_DRAFT_INDEX = tl.constexpr(2048)
INVALID_ARGUMENT = tl.constexpr(64 | 128 | 256 | 512 | 1024 | 2048)

GREEDY_TEMPERATURE = tl.constexpr(1e-5)
DRAFT_PURPOSE = 0
VERIFY_PURPOSE = 1

MAX_SHARD = 1024
"""Most ids of a vocabulary shard: what one warp takes in, so that no barrier is needed to sum it."""
TILE_SHARDS = tl.constexpr(8)
"""Shards of a tile, what a program reads in one trip: 64 logits a thread with 4 warps of 32."""
REST_SHARDS = tl.constexpr(4)
"""Shards read at once where the row ends, as masks take registers."""
MAX_CANDIDATES = 1024
"""Values around a threshold that are listed and compared with one another."""
SEARCH_SHARDS = tl.constexpr(16)
"""Shards, half shards where logits are float32, that a program of WIDE_WARPS warps reads at once to search a row."""
SAMPLE = 2048
"""Values of a row that say where in it a threshold may lie."""
MAX_POSITIONS = 8
"""Most positions of a sequence that are decided at once."""
MAX_MERGED = 1024
"""Most shard sums of several positions that the last kernel merges at once: each takes exponentials in float64."""
MAX_MERGED_BESIDE = 256
"""The same where the registers are needed for rows."""
NUM_WARPS = 4
"""Warps of a program that streams rows."""
WIDE_WARPS = 8
"""Warps of a program that merges, scans or sorts out what the others left."""
MAX_SHARDS = 8192
"""Shards whose sums one program merges at once; from a few thousand on it keeps some of them in memory."""

ENOUGH_PROGRAMS = 1056
"""Programs that keep a large GPU busy: eight on each of 132 multiprocessors."""

SEQUENCE_FIELDS = tl.constexpr(7)
STATUS_FIELD = tl.constexpr(0)
LENGTH_FIELD = tl.constexpr(1)
TARGET_OFFSET_FIELD = tl.constexpr(2)
DRAFT_OFFSET_FIELD = tl.constexpr(3)
FRONT_FIELD = tl.constexpr(4)
START_FIELD = tl.constexpr(5)
NUM_ROWS_FIELD = tl.constexpr(6)

POSITION_FIELDS = tl.constexpr(8)
TOKEN_FIELD = tl.constexpr(0)
TARGET_LOGIT_FIELD = tl.constexpr(1)
ACCEPT_FIELD = tl.constexpr(2)
EMISSION_FIELD = tl.constexpr(3)
DRAFT_LOGIT_FIELD = tl.constexpr(4)
DRAFT_ROW_MAX_FIELD = tl.constexpr(5)
DRAFT_THRESHOLD_FIELD = tl.constexpr(6)
DRAFT_WEIGHT_SUM_FIELD = tl.constexpr(7)

LIMIT_FIELDS = tl.constexpr(5)
TOP_K_FIELD = tl.constexpr(0)
TOP_P_FIELD = tl.constexpr(1)
MIN_P_FIELD = tl.constexpr(2)
TEMPERATURE_FIELD = tl.constexpr(3)
BOUND_FIELD = tl.constexpr(4)


def shard_size(vocab: int) -> int:
    """Return the ids of one vocabulary shard: a function of the vocabulary alone, so no result depends on the batch.

    Example:
        >>> shard_size(5), shard_size(1000), shard_size(128256)
        (32, 1024, 1024)
    """
    return min(MAX_SHARD, max(32, power_of_two(vocab)))


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is not below a positive value."""
    return 1 << (value - 1).bit_length()


def num_shards(widest: int, vocab: int) -> int:
    """Return the number of shards of the widest row, in shards of the size that the target's vocabulary has.

    Raises:
        ValueError: the vocabulary has more shards than one program can merge.
    """
    shards = -(-widest // shard_size(vocab))
    if shards > MAX_SHARDS:
        raise ValueError(
            f"vocab: expected at most {MAX_SHARDS * shard_size(vocab)} on the Triton backend, got {widest}"
        )
    return shards


def constants(
    vocab: int,
    widest: int,
    *,
    flat: bool,
    aligned: bool,
    has_receipt: bool,
    target_is_probs: bool,
    draft_is_probs: bool,
    same_rows: bool,
    excludes: bool,
    purpose: int,
) -> dict[str, int | bool]:
    """Return the compile-time arguments of all kernels by name: what a round is compiled for, dtypes aside.

    `widest` is the larger of the target's and the draft's vocabulary; `excludes` leaves draft tokens out of the shard
    sums of their target rows, where they are all that a rejection takes away.
    """
    shards = power_of_two(num_shards(widest, vocab))
    return {
        "FLAT": flat,
        "ALIGNED": aligned,
        "HAS_RECEIPT": has_receipt,
        "TARGET_IS_PROBS": target_is_probs,
        "DRAFT_IS_PROBS": draft_is_probs,
        "SAME_ROWS": same_rows,
        "EXCLUDES": excludes,
        "PURPOSE": purpose,
        "SHARD": shard_size(vocab),
        "BLOCK_SHARDS": shards,
        "BLOCK_POSITIONS": max(1, min(MAX_POSITIONS, MAX_MERGED // shards)),
        "FEW_POSITIONS": max(1, min(MAX_POSITIONS, MAX_MERGED_BESIDE // shards)),
        "SAMPLE": SAMPLE,
        "MAX_CANDIDATES": MAX_CANDIDATES,
        "FITS": widest <= MAX_CANDIDATES,
    }


def shards_per_program(rows: int, shards: int) -> int:
    """Return how many shards of a row one program goes through, which changes nothing but the time it takes.

    One tile where there are few rows, so that a single sequence fills the machine; more where there are many, so that a
    program's fixed cost is spread.

    Example:
        >>> shards_per_program(9, 126), shards_per_program(288, 126), shards_per_program(4096, 126)
        (8, 32, 128)
    """
    tile = int(TILE_SHARDS.value)
    tiles = -(-shards // tile)
    return tile * max(1, min(tiles, rows * tiles // ENOUGH_PROGRAMS))
