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

PRINTED = {
    "mass": 5.73807,
    "uniform acceptance": 0.2295,
    "normal acceptance": 0.5216,
    "peak": 3.69582,
    "largest bracket": 3.95959,
    "uniform tightest constant": 22.17,
    "normal tightest constant": 9.93,
    "accepted": (3000, 3000, 1000),
    "rejected": 3000,
    "replacements": (0, 1000, 2000),
    "final": (3000, 4000, 3000),
    "best gamma": 4,
    "speed-up": 1.98,
}
"""What the article states, to compare with what is computed and simulated here."""
