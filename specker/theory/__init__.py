"""Why speculative decoding keeps the target's distribution, and what it gains: every statement a function.

`rejection` is the classical sampler, `speculative` its discrete form as `specker.verify` runs it, `cost`
the model of the speed-up, `article` the worked examples. Needs numpy and mpmath, neither matplotlib nor
transformers.
"""

from __future__ import annotations

from specker.theory import article
from specker.theory.cost import (
    BestGamma,
    best_gamma,
    break_even,
    expected_accepted,
    expected_tokens,
    num_accepted_law,
    overlap,
    speedup,
    survival,
)
from specker.theory.intervals import Interval, Maximum, find_negative, maximum
from specker.theory.rejection import (
    Density,
    EnvelopeError,
    GoodnessOfFit,
    Proposal,
    RejectionRun,
    RejectionSampler,
    goodness_of_fit,
    normal_proposal,
    prove_envelope,
    tightest_constant,
    uniform_proposal,
)
from specker.theory.speculative import (
    RoundCounts,
    Rounds,
    ThreeDraws,
    TokenCounts,
    accept_probs,
    count_rounds,
    count_tokens,
    expected_counts,
    expected_round_counts,
    residual,
    simulate_rounds,
    standard_errors,
    three_draws,
)
from specker.theory.statements import Simulation, Statement, check_statements, simulate_article

__all__ = [
    "BestGamma",
    "Density",
    "EnvelopeError",
    "GoodnessOfFit",
    "Interval",
    "Maximum",
    "Proposal",
    "RejectionRun",
    "RejectionSampler",
    "RoundCounts",
    "Rounds",
    "Simulation",
    "Statement",
    "ThreeDraws",
    "TokenCounts",
    "accept_probs",
    "article",
    "best_gamma",
    "break_even",
    "check_statements",
    "count_rounds",
    "count_tokens",
    "expected_accepted",
    "expected_counts",
    "expected_round_counts",
    "expected_tokens",
    "find_negative",
    "goodness_of_fit",
    "maximum",
    "normal_proposal",
    "num_accepted_law",
    "overlap",
    "prove_envelope",
    "residual",
    "simulate_article",
    "simulate_rounds",
    "speedup",
    "standard_errors",
    "survival",
    "three_draws",
    "tightest_constant",
    "uniform_proposal",
]
