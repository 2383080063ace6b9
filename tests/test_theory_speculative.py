"""Discrete speculative sampling: closed forms against exact fractions, simulations by verify."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specker
from specker.theory import (
    accept_probs,
    article,
    count_rounds,
    count_tokens,
    expected_accepted,
    expected_counts,
    expected_round_counts,
    num_accepted_law,
    overlap,
    residual,
    simulate_rounds,
    standard_errors,
    three_draws,
)

ORACLES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "oracles.json").read_text())
DISTRIBUTIONS = ORACLES["distributions"]
TARGET = [Fraction(3, 10), Fraction(4, 10), Fraction(3, 10)]
DRAFT = [Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)]


def fractions(values: list[str]) -> list[Fraction]:
    return [Fraction(value) for value in values]


def test_the_articles_table_exactly() -> None:
    assert accept_probs(TARGET, DRAFT).tolist() == [Fraction(1, 2), 1, 1]
    assert residual(TARGET, DRAFT).tolist() == [0, Fraction(1, 3), Fraction(2, 3)]
    counts = expected_counts(TARGET, DRAFT, 10_000)
    printed = ORACLES["article"]["cat_dog_fox_10000"]
    assert counts.accepted.tolist() == printed["accepted"]
    assert counts.rejected.tolist() == [printed["rejected"], 0, 0]
    assert counts.replacements.tolist() == printed["replacements"]
    assert counts.final.tolist() == printed["final"]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_accepted_and_replaced_mass_make_the_target(name: str) -> None:
    target, draft = fractions(DISTRIBUTIONS[name]["target"]), fractions(DISTRIBUTIONS[name]["draft"])
    counts = expected_counts(target, draft, 1)
    assert counts.final.tolist() == target
    assert counts.replacements.tolist() == fractions(DISTRIBUTIONS[name]["residual_unnormalised"])
    shared = overlap(target, draft)
    assert shared == Fraction(DISTRIBUTIONS[name]["overlap_sum_min"])
    assert sum(accept_probs(target, draft) * np.array(draft)) == shared


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_rounds_match_the_exact_fractions(name: str, gamma: int) -> None:
    law = DISTRIBUTIONS[name]["token"].get(f"gamma_{gamma}")
    if law is None:
        pytest.skip("no fractions for this gamma")
    alpha = Fraction(DISTRIBUTIONS[name]["overlap_sum_min"])
    assert expected_accepted(alpha, gamma) == Fraction(law["expected_accepted"])
    computed = {str(count): value for count, value in enumerate(num_accepted_law(alpha, gamma)) if value}
    assert computed == {count: Fraction(value) for count, value in law["num_accepted_law"].items() if Fraction(value)}


@pytest.mark.law
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_simulated_tokens_within_four_sigma(name: str) -> None:
    target = [float(value) for value in fractions(DISTRIBUTIONS[name]["target"])]
    draft = [float(value) for value in fractions(DISTRIBUTIONS[name]["draft"])]
    rounds = simulate_rounds(target, draft, 1, 10_000, seed=2024)
    simulated, expected = count_tokens(rounds, len(target)), expected_counts(target, draft, 10_000)
    for observed, mean in zip(simulated, expected, strict=True):
        assert standard_errors(observed, mean, 10_000).max() < 4.0
    assert (simulated.accepted + simulated.replacements == simulated.final).all()


@pytest.mark.law
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_counters_of_a_block(gamma: int) -> None:
    num_rounds = 20_000
    counts = count_rounds(simulate_rounds(article.TARGET_PROBS, article.DRAFT_PROBS, gamma, num_rounds, seed=77))
    expected = expected_round_counts(article.ALPHA, gamma, num_rounds)
    assert standard_errors(counts.rounds_by_accepted, expected.rounds_by_accepted, num_rounds).max() < 4.0
    # A sum over rounds of a number in 0..gamma has at most this deviation.
    slack = 4.0 * gamma / 2.0 * num_rounds**0.5
    for field in ("accepted", "rejected", "discarded", "recovered", "bonus", "emitted"):
        assert abs(getattr(counts, field) - getattr(expected, field)) < slack, field
    assert counts.accepted + counts.rejected + counts.discarded == counts.drafted == gamma * num_rounds
    assert counts.accepted + counts.recovered + counts.bonus == counts.emitted
    assert counts.recovered == counts.rejected == num_rounds - counts.bonus
    assert num_rounds <= counts.emitted <= (gamma + 1) * num_rounds


def test_rounds_without_drafts() -> None:
    rounds = simulate_rounds(article.TARGET_PROBS, article.DRAFT_PROBS, 0, 5, seed=0)
    counts = count_rounds(rounds)
    assert (counts.bonus, counts.emitted, counts.drafted) == (5, 5, 0)
    with pytest.raises(ValueError, match="rounds: expected gamma >= 1"):
        count_tokens(rounds, 3)


@pytest.mark.law
def test_one_number_for_three_jobs_breaks_the_law() -> None:
    target, draft, num_rounds = (0.1, 0.6, 0.3), (0.7, 0.25, 0.05), 100_000
    finals = [
        count_tokens(simulate_rounds(target, draft, 1, num_rounds, seed=9, reuse_draft_draw=reuse), 3).final
        for reuse in (False, True)
    ]
    errors = [standard_errors(final, np.array(target) * num_rounds, num_rounds).max() for final in finals]
    assert errors[0] < 4.0
    assert errors[1] > 40.0


def test_three_draws_are_the_ones_verify_uses() -> None:
    num_rounds, seed = 500, 31
    draws = three_draws(seed, 0, num_rounds)
    rounds = simulate_rounds(article.TARGET_PROBS, article.DRAFT_PROBS, 1, num_rounds, seed=seed)
    drafted = np.searchsorted([0.6, 0.9], draws.draft.numpy(), side="right")
    assert (rounds.draft_token_ids[:, 0] == drafted).all()
    accepted = draws.threshold.numpy() < np.array([0.5, 1.0, 1.0])[drafted]
    assert (rounds.num_accepted == accepted).all()
    replacement = 1 + (draws.correction.numpy() >= 1.0 / 3.0)
    assert (rounds.token_ids[~accepted, 0] == replacement[~accepted]).all()
    assert 0 < accepted.sum() < num_rounds


def test_simulation_goes_through_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    verify = specker.verify

    def spy(*arguments: Any, **options: Any) -> specker.VerifyResult:
        calls.append(arguments)
        return verify(*arguments, **options)

    monkeypatch.setattr(specker, "verify", spy)
    simulate_rounds(article.TARGET_PROBS, article.DRAFT_PROBS, 2, 4, seed=0)
    assert len(calls) == 1


def test_invalid_rows_are_reported() -> None:
    with pytest.raises(specker.InvalidInputError, match="target row"):
        simulate_rounds((float("nan"), 1.0), (0.5, 0.5), 1, 2, seed=0)


def test_residual_of_equal_distributions_is_refused() -> None:
    with pytest.raises(ValueError, match="target: expected mass above the draft"):
        residual(TARGET, TARGET)


def test_standard_errors_of_certain_counts() -> None:
    errors = standard_errors(np.array([0, 100, 1]), np.array([0.0, 100.0, 0.0]), 100)
    assert errors.tolist() == [0.0, 0.0, np.inf]
