"""The article's statements beside what is computed and what is simulated here, with a verdict each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specker.theory import article
from specker.theory.cost import best_gamma, num_accepted_law, speedup
from specker.theory.intervals import maximum
from specker.theory.rejection import (
    Proposal,
    RejectionRun,
    RejectionSampler,
    goodness_of_fit,
    tightest_constant,
)
from specker.theory.speculative import (
    RoundCounts,
    TokenCounts,
    count_rounds,
    count_tokens,
    expected_counts,
    simulate_rounds,
    standard_errors,
)

MAX_STANDARD_ERRORS = 4.0
"""How far a simulation may be off what is computed."""
SMALLEST_P_VALUE = 1e-4
"""Below this a goodness-of-fit test counts as failed."""


class Simulation(NamedTuple):
    """One run of every experiment of the article; the figures and the table show the same one."""

    uniform: RejectionRun
    normal: RejectionRun
    tokens: TokenCounts
    rounds: RoundCounts


class Statement(NamedTuple):
    """One line of the table: None where the article, a formula or a simulation has nothing to say."""

    quantity: str
    stated: float | None
    computed: float | None
    simulated: float | None
    passed: bool


def simulate_article(*, seed: int) -> Simulation:
    """Run every experiment of the article once.

    Example:
        >>> simulate_article(seed=0).uniform.num_proposals
        300000
    """
    uniform = RejectionSampler(article.TARGET, article.UNIFORM, article.UNIFORM_CONSTANT)
    normal = RejectionSampler(article.TARGET, article.NORMAL, article.NORMAL_CONSTANT)
    rows = article.TARGET_PROBS, article.DRAFT_PROBS
    # Rounds have consecutive seeds, so experiments that are to be independent start far apart.
    first_seed = seed << 32
    single = simulate_rounds(*rows, 1, article.NUM_DRAFT_TOKENS, seed=first_seed)
    block = simulate_rounds(*rows, article.PRINTED_GAMMA, article.NUM_DRAFT_TOKENS, seed=first_seed + (1 << 31))
    return Simulation(
        uniform.run(article.NUM_PROPOSALS, seed=seed),
        normal.run(article.NUM_PROPOSALS, seed=seed + 1),
        count_tokens(single, len(article.TOKENS)),
        count_rounds(block),
    )


def check_statements(simulation: Simulation) -> list[Statement]:
    """Compare every number of the article with what is computed, and that with what was simulated.

    A statement passes where the computed number rounds to the stated one and the simulated one lies within four
    standard errors of the computed one.

    Example:
        >>> all(statement.passed for statement in check_statements(simulate_article(seed=0)))
        True
    """
    return [*_continuous(simulation), *_discrete(simulation.tokens), *_rounds(simulation.rounds)]


def _compare(
    quantity: str,
    computed: float,
    *,
    stated: float | None = None,
    half_unit: float = 0.0,
    simulated: float | None = None,
    standard_error: float = 0.0,
) -> Statement:
    agrees = stated is None or abs(computed - stated) <= half_unit
    follows = simulated is None or abs(simulated - computed) <= MAX_STANDARD_ERRORS * standard_error
    return Statement(quantity, stated, computed, simulated, agrees and follows)


def _continuous(simulation: Simulation) -> list[Statement]:
    peak = maximum(article.TARGET.enclose, article.TARGET.lower, article.TARGET.upper, tolerance=1e-5)
    bracket = maximum(article.BRACKET.enclose, article.TARGET.lower, article.TARGET.upper, tolerance=1e-5)
    factor = article.NORMAL_CONSTANT / math.sqrt(2.0 * math.pi)
    covered = Statement(
        "11/√(2π), to exceed the bracket", article.NORMAL_FACTOR, factor, None,
        passed=abs(factor - article.NORMAL_FACTOR) <= 5e-4 and factor > bracket.upper,
    )  # fmt: skip
    mass, rate = article.TARGET.mass(), simulation.uniform.acceptance_rate
    return [
        _compare(
            "mass Z of the target", mass, stated=article.MASS, half_unit=5e-6,
            simulated=rate * article.UNIFORM_CONSTANT,
            standard_error=article.UNIFORM_CONSTANT * _rate_error(rate, simulation.uniform.num_proposals),
        ),
        _compare("peak of the target", peak.lower, stated=article.PEAK, half_unit=5e-6),
        _compare("largest bracket", bracket.lower, stated=article.LARGEST_BRACKET, half_unit=5e-6),
        covered,
        *_proposal(article.UNIFORM, article.UNIFORM_CONSTANT, simulation.uniform, 0),
        *_proposal(article.NORMAL, article.NORMAL_CONSTANT, simulation.normal, 1),
    ]  # fmt: skip


def _proposal(proposal: Proposal, constant: float, run: RejectionRun, index: int) -> list[Statement]:
    acceptance, tightest = article.TARGET.mass() / constant, tightest_constant(article.TARGET, proposal)
    p_value = goodness_of_fit(run.samples, article.TARGET).p_value
    return [
        _compare(
            f"{proposal.name}, C = {constant:g}: acceptance", acceptance,
            stated=article.ACCEPTANCES[index], half_unit=5e-5,
            simulated=run.acceptance_rate, standard_error=_rate_error(acceptance, run.num_proposals),
        ),
        Statement(f"{proposal.name}: p-value against f/Z", None, None, p_value, p_value > SMALLEST_P_VALUE),
        _compare(
            f"{proposal.name}: tightest C", tightest.lower,
            stated=article.TIGHTEST_CONSTANTS[index], half_unit=5e-3,
        ),
        _compare(f"{proposal.name}: acceptance at that C", article.TARGET.mass() / tightest.lower),
    ]  # fmt: skip


def _discrete(tokens: TokenCounts) -> list[Statement]:
    total = article.NUM_DRAFT_TOKENS
    expected = expected_counts(article.TARGET_PROBS, article.DRAFT_PROBS, total)
    lost = float(np.abs(expected.final / total - np.array(article.TARGET_PROBS)).max())
    statements = [_compare("|min + (·)₊ − target|", lost, stated=0.0, half_unit=1e-12)]
    for kind, stated in article.COUNTS.items():
        computed, simulated = getattr(expected, kind), getattr(tokens, kind)
        if len(stated) == 1:
            computed, simulated, names = [computed.sum()], [simulated.sum()], ["all"]
        else:
            names = list(article.TOKENS)
        statements += _counts(kind, names, stated, computed, simulated)
    return statements


def _counts(
    kind: str, names: Sequence[str], stated: Sequence[int], computed: Sequence[float], simulated: Sequence[int]
) -> list[Statement]:
    errors = standard_errors(np.asarray(simulated), np.asarray(computed), article.NUM_DRAFT_TOKENS)
    return [
        Statement(
            f"{kind}, {name}", float(stated[index]), float(computed[index]), float(simulated[index]),
            bool(abs(computed[index] - stated[index]) < 1e-6 and errors[index] <= MAX_STANDARD_ERRORS),
        )
        for index, name in enumerate(names)
    ]  # fmt: skip


def _rounds(rounds: RoundCounts) -> list[Statement]:
    num_rounds, gamma = article.NUM_DRAFT_TOKENS, article.PRINTED_GAMMA
    law = np.array(num_accepted_law(article.ALPHA, gamma))
    counts = np.arange(gamma + 1)
    mean = float(law @ counts)
    error = math.sqrt((float(law @ counts**2) - mean**2) / num_rounds)
    best = best_gamma(article.ALPHA, article.DRAFT_COST)
    round_cost = 1.0 + article.DRAFT_COST * gamma
    emitted = float(rounds.emitted) / num_rounds
    return [
        _compare(
            f"accepted in a round, gamma = {gamma}", mean,
            simulated=float(rounds.accepted) / num_rounds, standard_error=error,
        ),
        _compare(f"emitted in a round, gamma = {gamma}", mean + 1.0, simulated=emitted, standard_error=error),
        _compare("best gamma at α = 0.7, c = 0.1", best.gamma, stated=gamma),
        _compare(
            "speed-up there", speedup(article.ALPHA, article.DRAFT_COST, gamma),
            stated=article.PRINTED_SPEEDUP, half_unit=5e-3,
            simulated=emitted / round_cost, standard_error=error / round_cost,
        ),
    ]  # fmt: skip


def _rate_error(rate: float, total: int) -> float:
    return math.sqrt(rate * (1.0 - rate) / total)
