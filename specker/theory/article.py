"""The article's examples and numbers: a target with two proposals, three animals, one speed-up."""

from __future__ import annotations

import numpy as np

from specker.theory.rejection import Density, Value, normal_proposal, uniform_proposal


def bracket(x: Value) -> Value:
    """Return the factor beside the bell curve: `sin(6 + x)**2 + 3 cos(x)**2 sin(4x)**2 + 1`."""
    values: Value = np.sin(6 + x) ** 2 + 3 * np.cos(x) ** 2 * np.sin(4 * x) ** 2 + 1
    return values


TARGET = Density(lambda x: np.exp(-(x**2) / 2.0) * bracket(x), -3.0, 3.0)
"""The unnormalised target f: a wavy bell curve on [-3, 3], zero outside."""
BRACKET = Density(bracket, -3.0, 3.0)
"""The target without its bell curve; what the constant of a normal envelope has to cover."""
UNIFORM, UNIFORM_CONSTANT = uniform_proposal(-3.0, 3.0), 25.0
"""The flat proposal and the article's constant for it."""
NORMAL, NORMAL_CONSTANT = normal_proposal(), 11.0
"""The bell-shaped proposal and the article's constant for it."""
NUM_PROPOSALS = 300_000
"""Candidates of one continuous simulation."""

TOKENS = ("cat", "dog", "fox")
"""The vocabulary of the discrete example."""
TARGET_PROBS = (0.3, 0.4, 0.3)
"""Its target distribution."""
DRAFT_PROBS = (0.6, 0.3, 0.1)
"""Its draft distribution."""
NUM_DRAFT_TOKENS = 10_000
"""Draft tokens of one discrete simulation."""

ALPHA, DRAFT_COST = 0.7, 0.1
"""Acceptance and cost of the speed-up example."""

MASS = 5.73807
"""Integral of the target."""
ACCEPTANCES = (0.2295, 0.5216)
"""Share of candidates kept, uniform and normal."""
PEAK, LARGEST_BRACKET = 3.69582, 3.95959
"""Largest values of the target and of its bracket: what a flat and a bell-shaped envelope have to cover."""
NORMAL_FACTOR = 4.388
"""11 / sqrt(2 pi). The article calls it larger than 5; it is not, and the envelope is valid all the same."""
TIGHTEST_CONSTANTS = (22.17, 9.93)
"""Smallest valid constants, uniform and normal."""
COUNTS: dict[str, tuple[int, ...]] = {
    "accepted": (3000, 3000, 1000),
    "rejected": (3000,),
    "replacements": (0, 1000, 2000),
    "final": (3000, 4000, 3000),
}
"""Expected counts of 10,000 draft tokens, by token or in all."""
PRINTED_GAMMA, PRINTED_SPEEDUP = 4, 1.98
"""Best gamma at ALPHA and DRAFT_COST, and the speed-up there."""
