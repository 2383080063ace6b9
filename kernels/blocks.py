"""Device functions that the kernels share: weights, scalar conditions, random numbers.

A weight is exp((logit - shift) / temperature) or, for rows of probabilities, (prob / shift) ** (1 / temperature): 1 at
the shift, 0 for a masked id, NaN for an entry that makes its row invalid.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NO_ID = tl.constexpr(0x7FFFFFFF)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel whose sizes, strides and pointers are never specialised, so that none of them recompiles it.

    What the code depends on is a constexpr argument: dtypes, flags, `ALIGNED`.
    """
    constant = constant_names(function)
    runtime = [name for name in inspect.signature(function).parameters if name not in constant]
    return triton.jit(function, do_not_specialize=runtime)


def constant_names(function: Any) -> list[str]:
    """Return the names of the compile-time arguments of a kernel."""
    parameters = inspect.signature(getattr(function, "fn", function)).parameters.values()
    return [parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)]


@triton.jit
def flag(condition):
    """Return a scalar condition in a form that may be combined with other scalar ones."""
    # The interpreter gives a comparison the type of what was compared, and floats have no `&`.
    return tl.where(condition, 1, 0) > 0


@triton.jit
def spread(condition, block):
    """Return a scalar condition as a mask of the shape of a block; the interpreter's own spreading is no mask."""
    return (tl.zeros(block.shape, tl.int32) + tl.where(condition, 1, 0)) > 0


@triton.jit
def exponent_scale(temperature, IS_PROBS: tl.constexpr):
    """Return the float32 factor in front of a binary exponent; never 0, so that -inf stays -inf."""
    scale = (1.0 if IS_PROBS else LOG2_E) / temperature
    return tl.maximum(scale, 1.2e-38).to(tl.float32)


@triton.jit
def lowest(IS_PROBS: tl.constexpr):
    """Return the value of an id without mass."""
    return 0.0 if IS_PROBS else float("-inf")


@triton.jit
def safe_shift(maximum, IS_PROBS: tl.constexpr):
    """Return a shift for a maximum that may be that of no mass at all."""
    return tl.where(maximum > 0.0, maximum, 1.0) if IS_PROBS else tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def shifted_weights(values, shift, scale, IS_PROBS: tl.constexpr):
    """Return float32 weights; one special-function operation an element, none for probabilities at temperature 1."""
    if IS_PROBS:
        # Powers of two keep the reciprocal of a huge or a subnormal maximum a normal number.
        lift = tl.where(shift > 18446744073709551616.0, 5.421010862427522e-20, 1.0)
        lift = tl.where(shift < 5.421010862427522e-20, 18446744073709551616.0, lift)
        share = (values * lift) * (1.0 / (shift * lift))
        share = tl.where(values < 0.0, float("nan"), share)
        weights = share
        if scale != 1.0:
            weights = tl.exp2(tl.log2(share) * scale)
    else:
        # Subtracted before scaling: the product of a large logit may overflow, the difference to the maximum may not.
        weights = tl.exp2((values - shift) * scale)
    return weights


@triton.jit
def weights_float64(values, row_max, temperature, IS_PROBS: tl.constexpr):
    """Return the weights of a few values in float64, as the decisions need them."""
    if IS_PROBS:
        share = values / row_max
        weights = share
        if temperature != 1.0:
            weights = tl.exp(tl.log(share) / temperature)
    else:
        weights = tl.exp((values - row_max) / temperature)
    return weights


@triton.jit
def uniforms(seed, position, PURPOSE: tl.constexpr):
    """Return the accept and the emission uniform of a block of int64 positions: Philox-4x32-10, float64 in [0, 1)."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low & 0
    word0, word1, word2, word3 = tl.philox(seed, low, high, zero + PURPOSE, zero)
    return uniform_from_words(word0, word1), uniform_from_words(word2, word3)


@triton.jit
def uniform_from_words(low, high):
    """Return the uniform of the 64-bit word high * 2**32 + low."""
    # The upper 53 of the 64 bits are the high word and the upper 21 bits of the low one.
    bits = (high.to(tl.int64) << 21) | (low >> 11).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16
