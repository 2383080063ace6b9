"""Status bits of a sequence: what was wrong with its input, in one place for every backend."""

from __future__ import annotations

import enum

import torch


class Status(enum.IntFlag):
    """What the kernels found wrong with one sequence; 0 is a healthy one.

    `csrc/contract.h` and `kernels/contract.py` hold the same numbers; a test compares the three.
    """

    TARGET_INVALID = 1
    """A target row that decides holds NaN, +inf, no finite entry or a negative probability; nothing was emitted."""
    DRAFT_INVALID = 2
    """A draft row that decides holds what a target row may not, or its receipt tells of another row or token; its
    position was rejected."""
    DRAFT_TOKEN_PLACEHOLDER = 4
    """A draft token is -1, the field's placeholder; its position was rejected. Not an error."""
    DRAFT_TOKEN_OUT_OF_RANGE = 8
    """A draft token is below -1 or not below vocab; its position was rejected."""
    DRAFT_TOKEN_IMPOSSIBLE = 16
    """A draft token has probability 0 under the draft distribution it was supposedly drawn from."""
    RESIDUAL_EMPTY = 32
    """The residual had no mass, so the token was drawn from the target row instead."""
    INVALID_TEMPERATURE = 64
    """A temperature is negative, infinite or NaN; nothing was emitted."""
    INVALID_TOP_P = 128
    """A top_p is negative or NaN; nothing was emitted."""
    INVALID_MIN_P = 256
    """A min_p is outside [0, 1] or NaN; nothing was emitted."""
    INVALID_NUM_DRAFT_TOKENS = 512
    """num_draft_tokens is outside 0..gamma; nothing was emitted."""
    INVALID_UNIFORMS = 1024
    """A uniform of the sequence is outside [0, 1) or NaN; nothing was emitted."""
    INVALID_DRAFT_INDEX = 2048
    """draft_index points outside the leading rows of the draft tensor; nothing was emitted."""


INVALID_ARGUMENT = (
    Status.INVALID_TEMPERATURE
    | Status.INVALID_TOP_P
    | Status.INVALID_MIN_P
    | Status.INVALID_NUM_DRAFT_TOKENS
    | Status.INVALID_UNIFORMS
    | Status.INVALID_DRAFT_INDEX
)
"""The bits that a CPU call turns into a ValueError before it returns."""

_REASONS = {
    Status.TARGET_INVALID: "a target row holds NaN, +inf, no finite entry or a negative probability",
    Status.DRAFT_INVALID: (
        "a draft row holds NaN, +inf, no finite entry or a negative probability, or its receipt belongs to another row "
        "or token"
    ),
    Status.DRAFT_TOKEN_OUT_OF_RANGE: "a draft token is outside 0..vocab-1",
    Status.DRAFT_TOKEN_IMPOSSIBLE: "a draft token has probability 0 under its draft distribution",
    Status.RESIDUAL_EMPTY: "the residual max(target - draft, 0) has no mass",
    Status.INVALID_TEMPERATURE: "temperature: expected a finite value >= 0",
    Status.INVALID_TOP_P: "top_p: expected a value >= 0",
    Status.INVALID_MIN_P: "min_p: expected a value in [0, 1]",
    Status.INVALID_NUM_DRAFT_TOKENS: "num_draft_tokens: expected a value in 0..gamma",
    Status.INVALID_UNIFORMS: "uniforms: expected values in [0, 1)",
    Status.INVALID_DRAFT_INDEX: "draft_index: expected a leading row of the draft tensor",
}


class InvalidInputError(ValueError):
    """Input that a kernel found invalid, told by sequence number and reason."""


def raise_for_bits(status: torch.Tensor, bits: int = ~int(Status.DRAFT_TOKEN_PLACEHOLDER)) -> None:
    """Raise InvalidInputError where `status & bits` is not 0; reads the status on the host.

    Args:
        status: `(batch,)` int32 bit mask of Status.
        bits: the bits that count; by default all but DRAFT_TOKEN_PLACEHOLDER.

    Raises:
        InvalidInputError: naming at most eight sequences and every reason.
    """
    values = status.tolist()
    # What nearly every call of a CPU comes by.
    if not any(values):
        return
    flagged = [(row, value & bits) for row, value in enumerate(values) if value & bits]
    if not flagged:
        return
    lines = [
        f"sequence {row}: " + "; ".join(reason for bit, reason in _REASONS.items() if value & bit)
        for row, value in flagged[:8]
    ]
    if len(flagged) > len(lines):
        lines.append(f"and {len(flagged) - len(lines)} more sequences")
    raise InvalidInputError("invalid input in " + "\n".join(lines))
