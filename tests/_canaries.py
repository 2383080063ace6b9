"""One primitive of Triton a kernel, for tests that hold the interpreter and the compiler to what they should do."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def masked_sum(values, total, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """Add up `count` values in one block; masked lanes load 0."""
    offsets = tl.arange(0, BLOCK)
    tl.store(total, tl.sum(tl.load(values + offsets, mask=offsets < count, other=0.0)))


@triton.jit
def prefix_sum(values, prefix, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """Write the float64 prefix sums of one block."""
    offsets = tl.arange(0, BLOCK)
    loaded = tl.load(values + offsets, mask=offsets < count, other=0.0).to(tl.float64)
    tl.store(prefix + offsets, tl.cumsum(loaded, 0))


@triton.jit
def is_nan(values, flags, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """Write 1 where a value differs from itself."""
    offsets = tl.arange(0, BLOCK)
    loaded = tl.load(values + offsets, mask=offsets < count, other=0.0)
    tl.store(flags + offsets, (loaded != loaded).to(tl.int32))
