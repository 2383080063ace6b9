"""The cost model: the published optima, break-even, measured cost curves and acceptance by position."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from specker.theory import (
    best_gamma,
    break_even,
    expected_accepted,
    expected_tokens,
    num_accepted_law,
    overlap,
    speedup,
    survival,
)

OPTIMA = json.loads((Path(__file__).parent / "data" / "oracles.json").read_text())["cost_model"]["optimal_gamma"]


@pytest.mark.parametrize("case", OPTIMA)
def test_published_optimum(case: str) -> None:
    alpha, draft_cost = (float(number) for number in re.findall(r"=([\d.]+)", case))
    best = best_gamma(alpha, draft_cost)
    assert best.gamma == OPTIMA[case]["gamma"]
    assert best.speedup == pytest.approx(OPTIMA[case]["speedup"], abs=5e-5)
    assert best.speedup == pytest.approx(speedup(alpha, draft_cost, best.gamma))
    neighbours = [speedup(alpha, draft_cost, best.gamma + step) for step in (-1, 1)]
    assert max(neighbours) < best.speedup + 1e-12


def test_example_of_the_article() -> None:
    best = best_gamma(0.7, 0.1)
    assert (best.gamma, round(best.speedup, 2)) == (4, 1.98)


@pytest.mark.parametrize("gamma", [0, 1, 5, 40])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.95])
def test_closed_form_of_the_geometric_sum(alpha: float, gamma: int) -> None:
    assert float(expected_tokens(alpha, gamma)) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert survival(alpha, gamma)[-1] == pytest.approx(alpha**gamma)
    assert sum(num_accepted_law(alpha, gamma)) == pytest.approx(1.0)


def test_fractions_stay_exact() -> None:
    alpha = Fraction(7, 10)
    assert expected_accepted(alpha, 3) == Fraction(1533, 1000)
    assert overlap([Fraction(3, 10), Fraction(7, 10)], [Fraction(6, 10), Fraction(4, 10)]) == alpha


def test_overlap_of_rows() -> None:
    rows = overlap(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.25, 0.75], [0.0, 1.0]]))
    assert rows.tolist() == [0.75, 0.0]


def test_acceptance_by_position() -> None:
    alphas = [Fraction(9, 10), Fraction(1, 2), Fraction(0)]
    assert survival(alphas, 3) == [1, Fraction(9, 10), Fraction(9, 20), 0]
    assert expected_tokens(alphas, 2) == Fraction(235, 100)
    # The third draft token is never accepted, so a third one only costs.
    assert best_gamma(alphas, 0.1).gamma == 2
    assert best_gamma([0.7] * 12, 0.1) == best_gamma(0.7, 0.1)


def test_break_even_is_the_draft_cost() -> None:
    assert break_even(0.2) == 0.2
    for alpha, pays in ((0.19, False), (0.21, True)):
        assert (speedup(alpha, 0.2, 1) > 1.0) is pays
        assert (best_gamma(alpha, 0.2).gamma > 0) is pays
    assert best_gamma(0.0, 0.5) == (0, 1.0)


def test_measured_target_cost_moves_the_optimum() -> None:
    rising = [1.0 + 0.15 * gamma for gamma in range(13)]
    assert best_gamma(0.7, 0.1, target_cost=rising).gamma < 4
    assert best_gamma(0.7, 0.1, target_cost=[1.0] * 13) == best_gamma(0.7, 0.1)
    assert break_even(0.1, target_cost=rising) == pytest.approx(0.25)
    assert speedup(0.25, 0.1, 1, target_cost=rising) == pytest.approx(1.0)


def test_long_optimum_is_found() -> None:
    best = best_gamma(0.99, 0.001)
    assert best.gamma > 200
    assert speedup(0.99, 0.001, best.gamma) >= max(speedup(0.99, 0.001, best.gamma + step) for step in (-9, 9))


def test_max_gamma_bounds_the_search() -> None:
    assert best_gamma(1.0, 0.0, max_gamma=7).gamma == 7
    assert best_gamma(0.95, 0.01, max_gamma=3).gamma == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_gamma(1.0, 0.1), "max_gamma: expected a number for alpha 1.0"),
        (lambda: best_gamma(0.5, 0.0), "max_gamma: expected a number"),
        (lambda: survival(0.5, -1), "gamma: expected at least 0, got -1"),
        (lambda: survival([0.5], 2), "alpha: expected 2 positions, got 1"),
        (lambda: survival(1.5, 2), r"alpha: expected values in \[0, 1\], got 1.5"),
        (lambda: survival(float("nan"), 1), r"alpha: expected values in \[0, 1\], got nan"),
        (lambda: speedup(0.5, -0.1, 1), "draft_cost: expected at least 0"),
        (lambda: speedup(0.5, float("nan"), 1), "draft_cost: expected at least 0"),
        (lambda: speedup(0.5, 0.1, 2, target_cost=[1.0, 1.1]), "target_cost: expected an entry for gamma 2"),
        (lambda: speedup(0.5, 0.1, 1, target_cost=[1.0, 0.0]), "target_cost: expected entries above 0"),
        (lambda: break_even(0.1, target_cost=[1.0]), "target_cost: expected an entry for gamma 1"),
    ],
)
def test_arguments_are_checked(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
