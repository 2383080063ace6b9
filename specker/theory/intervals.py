"""Interval arithmetic with outward rounding: the bounds that prove an envelope.

A function written with numpy's ufuncs runs on arrays when it is sampled and on an `Interval` when it is
bounded, so the function proven is the function sampled.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpmath import iv  # type: ignore[import-untyped]
from numpy.lib.mixins import NDArrayOperatorsMixin

# mpmath has no public type for what its interval context computes with.
Bounds = Any

_ENCLOSURES: dict[np.ufunc, Callable[..., Bounds]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.divide: operator.truediv,
    np.power: operator.pow,
    np.negative: operator.neg,
    np.absolute: abs,
    np.square: lambda value: value**2,
    np.exp: iv.exp,
    np.log: iv.log,
    np.sqrt: iv.sqrt,
    np.sin: iv.sin,
    np.cos: iv.cos,
}


class Interval(NDArrayOperatorsMixin):
    """A closed interval of reals on which numpy's ufuncs return an enclosure of all their values.

    Arithmetic is mpmath's, rounded outward: the true range always lies inside the result.

    Raises:
        TypeError: for a ufunc without an enclosure, by name.

    Example:
        >>> square = np.square(Interval(-1.0, 2.0))
        >>> (square.lower, square.upper)
        (0.0, 4.0)
    """

    def __init__(self, lower: float, upper: float | None = None) -> None:
        self.bounds: Bounds = iv.mpf([float(lower), float(lower if upper is None else upper)])

    @classmethod
    def enclosing(cls, value: Interval | float) -> Interval:
        """Return value itself where it is an Interval, otherwise the degenerate interval at that number."""
        return value if isinstance(value, Interval) else cls(value)

    @property
    def lower(self) -> float:
        """The lower end, rounded down where binary64 does not hold it."""
        return _rounded(self.bounds.a, -math.inf)

    @property
    def upper(self) -> float:
        """The upper end, rounded up where binary64 does not hold it."""
        return _rounded(self.bounds.b, math.inf)

    def hull(self, value: float) -> Interval:
        """Return the smallest interval that holds this one and value."""
        return Interval(min(self.lower, value), max(self.upper, value))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Interval | float, **options: object) -> Interval:
        """Apply the enclosure of ufunc; numpy's operators arrive here too."""
        if ufunc not in _ENCLOSURES or method != "__call__" or options:
            known = ", ".join(sorted(known.__name__ for known in _ENCLOSURES))
            raise TypeError(f"function: expected numpy functions with an enclosure ({known}), got {ufunc.__name__}")
        operands = [value.bounds if isinstance(value, Interval) else _as_operand(value) for value in inputs]
        result = Interval(0.0)
        result.bounds = iv.convert(_ENCLOSURES[ufunc](*operands))
        return result

    def __repr__(self) -> str:
        return f"Interval({self.lower!r}, {self.upper!r})"


class Maximum(NamedTuple):
    """Proven bounds of a largest value, and a place where the lower one is reached."""

    lower: float
    upper: float
    place: float


IntervalFunction = Callable[[Interval], Interval]


def maximum(
    function: IntervalFunction,
    lower: float,
    upper: float,
    *,
    tolerance: float = 1e-4,
    resolution: float = 1e-12,
) -> Maximum:
    """Return proven bounds of the largest value of function on [lower, upper] by branch and bound.

    Args:
        function: maps an Interval to an enclosure of its values.
        lower: left end, finite.
        upper: right end, finite, at least lower.
        tolerance: largest distance of the two bounds.
        resolution: width below which a cell is no longer divided.

    Raises:
        ArithmeticError: where a cell is down to resolution before the bounds meet (at a pole, say).

    Guarantees: `result.lower <= largest value <= result.upper`, in real arithmetic.

    Example:
        >>> bounds = maximum(lambda x: x * (2.0 - x), 0.0, 3.0)
        >>> bool(bounds.lower <= 1.0 <= bounds.upper)
        True
    """
    order = itertools.count()
    cells = [(-function(Interval(lower, upper)).upper, next(order), lower, upper)]
    best, place = -np.inf, lower
    while True:
        negated_bound, _, left, right = heapq.heappop(cells)
        middle = _middle(left, right)
        value = function(Interval(middle)).lower
        if value > best:
            best, place = value, middle
        if -negated_bound - best <= tolerance:
            return Maximum(best, -negated_bound, place)
        if right - left <= resolution:
            raise ArithmeticError(f"maximum: expected bounds that meet, got [{best}, {-negated_bound}] at {middle}")
        for start, end in ((left, middle), (middle, right)):
            heapq.heappush(cells, (-function(Interval(start, end)).upper, next(order), start, end))


def find_negative(function: IntervalFunction, lower: float, upper: float, *, resolution: float = 1e-9) -> float | None:
    """Prove that function is never negative, or return a place where it is or cannot be told not to be.

    Args:
        function: maps an Interval to an enclosure of its values.
        lower: left end, finite.
        upper: right end, finite, at least lower.
        resolution: width below which a cell is no longer divided.

    Guarantees: None means `function >= 0` on all of [lower, upper], in real arithmetic.

    Example:
        >>> find_negative(lambda x: x * x + 1.0, -1.0, 1.0) is None
        True
        >>> find_negative(lambda x: x, -1.0, 1.0)
        -0.5
    """
    cells = [(lower, upper)]
    while cells:
        left, right = cells.pop()
        if function(Interval(left, right)).lower >= 0.0:
            continue
        middle = _middle(left, right)
        if function(Interval(middle)).upper < 0.0 or right - left <= resolution:
            return middle
        cells += [(middle, right), (left, middle)]
    return None


def _rounded(end: Bounds, direction: float) -> float:
    # mpmath's exponents are unbounded: beyond binary64's range the conversion rounds to nearest.
    value = float(end.mid)
    return value if iv.mpf(value) == end else math.nextafter(value, direction)


def _middle(left: float, right: float) -> float:
    return left + (right - left) / 2.0


def _as_operand(value: float) -> Bounds:
    # An integer exponent has its own, tighter rule; a float of the same value would go through a logarithm.
    return int(value) if isinstance(value, (int, np.integer)) else iv.mpf(float(value))
