"""Classical rejection sampling: the article's figures, proven envelopes, samples that follow the target."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specker.theory import (
    Density,
    EnvelopeError,
    Proposal,
    RejectionSampler,
    article,
    goodness_of_fit,
    normal_proposal,
    prove_envelope,
    tightest_constant,
    uniform_proposal,
)

CASES = [
    pytest.param(article.UNIFORM, 25.0, 0.2295, 22.17, id="uniform"),
    pytest.param(article.NORMAL, 11.0, 0.5216, 9.93, id="normal"),
]
SMALLEST_P_VALUE = 1e-4


def test_mass_of_the_target() -> None:
    assert article.TARGET.mass() == pytest.approx(5.73807, abs=5e-6)


@pytest.mark.parametrize(("proposal", "constant", "acceptance", "tightest"), CASES)
def test_acceptance_and_samples(proposal: Proposal, constant: float, acceptance: float, tightest: float) -> None:
    sampler = RejectionSampler(article.TARGET, proposal, constant)
    assert sampler.acceptance_probability == pytest.approx(acceptance, abs=5e-5)
    run = sampler.run(article.NUM_PROPOSALS, seed=1)
    deviation = math.sqrt(acceptance * (1.0 - acceptance) / run.num_proposals)
    assert abs(run.acceptance_rate - sampler.acceptance_probability) < 4.0 * deviation
    assert goodness_of_fit(run.samples, article.TARGET).p_value > SMALLEST_P_VALUE
    bounds = tightest_constant(article.TARGET, proposal, tolerance=1e-3)
    assert bounds.upper == pytest.approx(tightest, abs=6e-3)
    assert bounds.upper - bounds.lower <= 1e-3


@pytest.mark.parametrize(("proposal", "constant"), [(article.UNIFORM, 25.0), (article.NORMAL, 11.0)])
def test_goodness_of_fit_has_power(proposal: Proposal, constant: float) -> None:
    sampler = RejectionSampler(article.TARGET, proposal, constant)
    run = sampler.run(article.NUM_PROPOSALS, seed=2)
    inside = run.candidates[article.TARGET.contains(run.candidates)]
    assert goodness_of_fit(inside, article.TARGET).p_value < 1e-12
    # The same run with heights five per cent too low on one half: a fault no histogram shows to the eye.
    heights = np.where(run.candidates > 0.0, 0.95 * run.heights, run.heights)
    biased = run.candidates[heights < article.TARGET(run.candidates)]
    assert goodness_of_fit(biased, article.TARGET).p_value < 1e-6


def test_candidates_outside_the_support_count_as_rejected() -> None:
    run = RejectionSampler(article.TARGET, article.NORMAL, 11.0).run(article.NUM_PROPOSALS, seed=3)
    outside = ~article.TARGET.contains(run.candidates)
    expected = math.erfc(3.0 / math.sqrt(2.0))
    assert abs(outside.mean() - expected) < 4.0 * math.sqrt(expected / run.num_proposals)
    assert not run.accepted[outside].any()
    assert run.num_proposals == article.NUM_PROPOSALS
    assert run.acceptance_rate == run.samples.size / article.NUM_PROPOSALS


@pytest.mark.parametrize(("proposal", "constant", "acceptance", "tightest"), CASES)
def test_envelope_below_the_target_is_refused_with_the_place(
    proposal: Proposal, constant: float, acceptance: float, tightest: float
) -> None:
    bounds = tightest_constant(article.TARGET, proposal, tolerance=1e-3)
    with pytest.raises(EnvelopeError, match=r"constant: expected .* >= target everywhere, got .* at x =") as caught:
        RejectionSampler(article.TARGET, proposal, bounds.lower - 1e-3)
    place = np.array(caught.value.place)
    assert article.TARGET(place) > (bounds.lower - 1e-3) * proposal.density(place)
    prove_envelope(article.TARGET, proposal, bounds.upper + 1e-3)
    assert tightest - 6e-3 < bounds.upper < constant
    assert acceptance < article.TARGET.mass() / bounds.upper


def test_dip_between_the_points_of_a_plot_is_found() -> None:
    spike = Density(lambda x: 1.0 + np.exp(-(((x - 0.1234567) * 2e5) ** 2)), 0.0, 1.0)
    assert spike(np.linspace(0.0, 1.0, 1001)).max() < 1.5
    with pytest.raises(EnvelopeError, match=r"at x = 0\.1234"):
        RejectionSampler(spike, uniform_proposal(0.0, 1.0), 1.5)


def test_proposal_that_misses_part_of_the_support_is_refused() -> None:
    with pytest.raises(EnvelopeError, match="got 0 against") as caught:
        RejectionSampler(article.TARGET, uniform_proposal(-3.0, 2.5), 100.0)
    assert caught.value.place > 2.5


@pytest.mark.parametrize("constant", [0.0, -1.0, math.inf, math.nan])
def test_constant_is_checked(constant: float) -> None:
    with pytest.raises(ValueError, match="constant: expected a finite number above 0"):
        RejectionSampler(article.TARGET, article.UNIFORM, constant)


def test_unbounded_support_is_refused() -> None:
    with pytest.raises(ValueError, match="target: expected a bounded support"):
        RejectionSampler(normal_proposal().density, normal_proposal(), 2.0)
    with pytest.raises(ValueError, match="support: expected finite ends"):
        normal_proposal().density.mass()


def test_normal_envelope_is_valid_because_of_the_bracket() -> None:
    # The factor beside the bell curve is 11 / sqrt(2 pi) = 4.388: below 5, but above the largest bracket.
    factor = article.NORMAL_CONSTANT / math.sqrt(2.0 * math.pi)
    largest = tightest_constant(article.BRACKET, uniform_proposal(-3.0, 3.0), tolerance=1e-3)
    assert factor == pytest.approx(4.388, abs=5e-4)
    assert largest.upper / 6.0 == pytest.approx(3.95959, abs=2e-4)
    assert largest.upper / 6.0 < factor < 5.0


def test_goodness_of_fit_needs_enough_samples() -> None:
    with pytest.raises(ValueError, match="samples: expected at least 10 in every bin"):
        goodness_of_fit(np.zeros(100), article.TARGET)


def test_runs_repeat_from_their_seed() -> None:
    sampler = RejectionSampler(article.TARGET, article.UNIFORM, 25.0)
    first, again, other = (sampler.run(100, seed=seed) for seed in (5, 5, 6))
    assert (first.candidates == again.candidates).all()
    assert (first.candidates != other.candidates).any()
