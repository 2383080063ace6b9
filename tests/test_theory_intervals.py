"""Interval enclosures: they hold every value, are tight where it matters, refuse what they cannot bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specker.theory import Interval, article, find_negative, maximum

ENDS = st.floats(-4.0, 4.0, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(ENDS, ENDS, st.floats(0.0, 1.0))
def test_enclosure_holds_every_value(first: float, second: float, share: float) -> None:
    lower, upper = min(first, second), max(first, second)
    inside = min(max(lower + share * (upper - lower), lower), upper)
    bounds = article.TARGET.enclose(Interval(lower, upper))
    value = float(article.TARGET(np.array(inside)))
    slack = 1e-13 * (1.0 + abs(value))
    assert bounds.lower - slack <= value <= bounds.upper + slack


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x**2, (0.0, 4.0)),
        (lambda x: x * x, (-2.0, 4.0)),
        (lambda x: np.abs(x), (0.0, 2.0)),
        (lambda x: 3 - x, (1.0, 4.0)),
        (lambda x: -x, (-2.0, 1.0)),
        (lambda x: 1.0 / (x + 2.0), (0.25, 1.0)),
        (lambda x: np.sqrt(np.square(x)), (0.0, 2.0)),
    ],
)
def test_exact_arithmetic(function: Callable[[Interval], Interval], expected: tuple[float, float]) -> None:
    bounds = function(Interval(-1.0, 2.0))
    assert (bounds.lower, bounds.upper) == expected


def test_rounding_is_outward() -> None:
    tenth = Interval(1.0) / Interval(10.0)
    assert tenth.lower < tenth.upper == math.nextafter(tenth.lower, 1.0)
    assert np.cos(Interval(3.0, 4.0)).lower == -1.0


def test_function_without_enclosure_is_named() -> None:
    with pytest.raises(TypeError, match="got tanh"):
        np.tanh(Interval(0.0, 1.0))
    with pytest.raises(TypeError, match="got add"):
        np.add.reduce(Interval(0.0, 1.0))  # type: ignore[call-overload]


def test_maximum_brackets_the_articles_peaks() -> None:
    peak = maximum(article.TARGET.enclose, -3.0, 3.0, tolerance=1e-5)
    assert peak.lower <= 3.69582 <= peak.upper + 5e-6
    assert peak.place == pytest.approx(-0.36335, abs=1e-3)
    largest = maximum(article.BRACKET.enclose, -3.0, 3.0, tolerance=1e-5)
    assert largest.lower - 5e-6 <= 3.95959 <= largest.upper
    grid = np.linspace(-3.0, 3.0, 400_001)
    for bounds, density in ((peak, article.TARGET), (largest, article.BRACKET)):
        assert bounds.upper >= density(grid).max() >= bounds.upper - 2e-5


def test_maximum_refuses_a_pole() -> None:
    with pytest.raises(ArithmeticError, match="expected bounds that meet"):
        maximum(lambda x: 1.0 / x, -1.0, 1.0)


def test_find_negative_sees_a_dip_narrower_than_any_plot() -> None:
    # Below zero only within 1e-4 of 0.7310585.
    def dips(x: Interval) -> Interval:
        values: Interval = (x - 0.7310585) ** 2 - 1e-8
        return values

    place = find_negative(dips, -3.0, 3.0)
    assert place is not None
    assert abs(place - 0.7310585) < 1e-4
    assert min((np.linspace(-3.0, 3.0, 2001) - 0.7310585) ** 2 - 1e-8) > 0.0
    assert find_negative(lambda x: (x - 0.7310585) ** 2 + 1e-8, -3.0, 3.0) is None


def test_touching_functions_are_undecided_at_their_place() -> None:
    place = find_negative(lambda x: (x - 0.3) * (x - 0.3), 0.0, 2.0)
    assert place == pytest.approx(0.3, abs=1e-3)


def test_ends_beyond_binary64_are_rounded_outward() -> None:
    huge = Interval(1e308) * Interval(10.0)
    assert (huge.lower, huge.upper) == (np.finfo(np.float64).max, math.inf)
    tiny = Interval(5e-324) / Interval(3.0)
    assert tiny.lower <= 0.0 < tiny.upper


def test_repr_and_hull() -> None:
    assert repr(Interval(1.0, 2.0).hull(0.0)) == "Interval(0.0, 2.0)"
