"""Classical rejection sampling: a target, a proposal and an envelope that is proven before anything is drawn.

Source: von Neumann 1951, "Various techniques used in connection with random digits".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specker.theory.intervals import Interval, Maximum, find_negative, maximum

Array = npt.NDArray[Any]
Value = TypeVar("Value", npt.NDArray[Any], Interval)


class EnvelopeError(ValueError):
    """An envelope that is below its target, or cannot be proven not to be; `place` says where."""

    def __init__(self, message: str, place: float) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Density:
    """A non-negative function on an interval, zero outside; it need not be normalised.

    Args:
        function: built from numpy's ufuncs, so that it runs on arrays and on Interval alike; it may return
            a float.
        lower: left end of the support.
        upper: right end of the support.

    Example:
        >>> triangle = Density(lambda x: 1.0 - np.abs(x), -1.0, 1.0)
        >>> triangle(np.array([-2.0, 0.0, 0.5])).tolist()
        [0.0, 1.0, 0.5]
    """

    function: Callable[..., Any]
    lower: float = -math.inf
    upper: float = math.inf

    def __call__(self, x: Array) -> Array:
        """Return the values at x, float64, of its shape."""
        values = np.asarray(x, dtype=np.float64)
        return np.where(self.contains(values), self.function(values), 0.0)

    def contains(self, x: Array) -> Array:
        """Return where x lies in the support, bool, of its shape."""
        return (np.asarray(x) >= self.lower) & (np.asarray(x) <= self.upper)

    def enclose(self, x: Interval) -> Interval:
        """Return an interval that holds every value on x."""
        if x.upper < self.lower or x.lower > self.upper:
            return Interval(0.0)
        inside = Interval(max(x.lower, self.lower), min(x.upper, self.upper))
        values = Interval.enclosing(self.function(inside))
        return values if (inside.lower, inside.upper) == (x.lower, x.upper) else values.hull(0.0)

    def mass(self, lower: float | None = None, upper: float | None = None) -> float:
        """Return the integral over the support, or over [lower, upper], by Gauss-Legendre panels.

        Raises:
            ValueError: where an end is infinite.
        """
        start, end = self.lower if lower is None else lower, self.upper if upper is None else upper
        if not (math.isfinite(start) and math.isfinite(end)):
            raise ValueError(f"support: expected finite ends, got [{start}, {end}]")
        nodes, weights = np.polynomial.legendre.leggauss(16)
        edges = np.linspace(start, end, 257)
        half_widths, centres = np.diff(edges) / 2.0, (edges[:-1] + edges[1:]) / 2.0
        values = self(centres[:, None] + half_widths[:, None] * nodes)
        return float((half_widths[:, None] * weights * values).sum())


@dataclass(frozen=True)
class Proposal:
    """A normalised density and the function that draws from it.

    Args:
        density: integrates to 1.
        draw: (generator, size) to float64 array of that size.
        name: how tables and figures call it.
    """

    density: Density
    draw: Callable[[np.random.Generator, int], Array]
    name: str


def uniform_proposal(lower: float, upper: float) -> Proposal:
    """Return the uniform distribution on [lower, upper].

    Example:
        >>> float(uniform_proposal(-3.0, 3.0).density(np.array(0.0))) == 1 / 6
        True
    """
    height = 1.0 / (upper - lower)
    return Proposal(
        Density(lambda _: height, lower, upper),
        lambda generator, size: generator.uniform(lower, upper, size),
        "uniform",
    )


def normal_proposal() -> Proposal:
    """Return the standard normal distribution.

    Example:
        >>> round(float(normal_proposal().density(np.array(0.0))), 6)
        0.398942
    """
    scale = 1.0 / math.sqrt(2.0 * math.pi)
    return Proposal(
        Density(lambda x: scale * np.exp(-(x**2) / 2.0)),
        lambda generator, size: generator.standard_normal(size),
        "standard normal",
    )


class RejectionRun(NamedTuple):
    """What one run of the rejection sampler drew: three arrays of one entry a proposal."""

    candidates: Array
    heights: Array
    accepted: Array

    @property
    def samples(self) -> Array:
        """The accepted candidates: independent draws from the normalised target."""
        return self.candidates[self.accepted]

    @property
    def num_proposals(self) -> int:
        """How many candidates were drawn, those outside the target's support included."""
        return self.candidates.size

    @property
    def acceptance_rate(self) -> float:
        """Accepted candidates over all candidates."""
        return float(self.accepted.mean())


@dataclass(frozen=True)
class RejectionSampler:
    """Draw from a target by thinning a proposal under the proven envelope `constant * proposal`.

    A candidate comes from the proposal, a height from `uniform(0, constant * proposal(candidate))`; the
    candidate is kept where the height is below the target. Construction proves `target <= constant *
    proposal` on the whole support with interval arithmetic.

    Args:
        target: non-negative, with a bounded support; not necessarily normalised.
        proposal: what candidates are drawn from.
        constant: factor C of the envelope, finite and positive.

    Raises:
        ValueError: for a constant that is not finite and positive, or an unbounded support.
        EnvelopeError: where the envelope is below the target or cannot be told not to be (where they touch).

    Example:
        >>> triangle = Density(lambda x: 1.0 - np.abs(x), -1.0, 1.0)
        >>> sampler = RejectionSampler(triangle, uniform_proposal(-1.0, 1.0), constant=2.1)
        >>> round(sampler.acceptance_probability, 4)
        0.4762
    """

    target: Density
    proposal: Proposal
    constant: float

    def __post_init__(self) -> None:
        """Prove the envelope."""
        if not (math.isfinite(self.constant) and self.constant > 0.0):
            raise ValueError(f"constant: expected a finite number above 0, got {self.constant}")
        prove_envelope(self.target, self.proposal, self.constant)

    @property
    def acceptance_probability(self) -> float:
        """Mass of the target over the mass of the envelope."""
        return self.target.mass() / self.constant

    def run(self, num_proposals: int, *, seed: int) -> RejectionRun:
        """Draw num_proposals candidates with heights and keep those under the target.

        Example:
            >>> triangle = Density(lambda x: 1.0 - np.abs(x), -1.0, 1.0)
            >>> run = RejectionSampler(triangle, uniform_proposal(-1.0, 1.0), constant=2.1).run(1000, seed=0)
            >>> run.num_proposals
            1000
        """
        generator = np.random.default_rng(seed)
        candidates = self.proposal.draw(generator, num_proposals)
        heights = generator.random(num_proposals) * self.constant * self.proposal.density(candidates)
        return RejectionRun(candidates, heights, heights < self.target(candidates))


def prove_envelope(target: Density, proposal: Proposal, constant: float) -> None:
    """Prove that `constant * proposal` is nowhere below target, in real arithmetic.

    Raises:
        ValueError: for a target with an unbounded support.
        EnvelopeError: with the place where the envelope is below the target or cannot be told from it.

    Example:
        >>> flat = Density(lambda x: 1.0, 0.0, 1.0)
        >>> prove_envelope(flat, uniform_proposal(0.0, 1.0), 1.5)
    """
    if not (math.isfinite(target.lower) and math.isfinite(target.upper)):
        raise ValueError(f"target: expected a bounded support, got [{target.lower}, {target.upper}]")
    place = find_negative(
        lambda x: constant * proposal.density.enclose(x) - target.enclose(x), target.lower, target.upper
    )
    if place is not None:
        height, envelope = float(target(np.array(place))), constant * float(proposal.density(np.array(place)))
        raise EnvelopeError(
            f"constant: expected {constant} * proposal >= target everywhere, "
            f"got {envelope:.6g} against {height:.6g} at x = {place:.9g}",
            place,
        )


def tightest_constant(target: Density, proposal: Proposal, *, tolerance: float = 1e-4) -> Maximum:
    """Return proven bounds of the smallest valid constant: the largest target / proposal.

    Raises:
        ArithmeticError: where the proposal has no mass somewhere under the target.

    Example:
        >>> ramp = Density(lambda x: 2.0 * x, 0.0, 1.0)
        >>> round(tightest_constant(ramp, uniform_proposal(0.0, 1.0)).upper, 4)
        2.0
    """
    return maximum(
        lambda x: target.enclose(x) / proposal.density.enclose(x),
        target.lower,
        target.upper,
        tolerance=tolerance,
    )


class GoodnessOfFit(NamedTuple):
    """Pearson's chi-square statistic, its degrees of freedom and its p-value."""

    statistic: float
    degrees_of_freedom: int
    p_value: float


def goodness_of_fit(samples: Array, target: Density, *, num_bins: int = 50) -> GoodnessOfFit:
    """Test samples against the normalised target with Pearson's chi-square on bins of equal width.

    Args:
        samples: float64, any shape, inside the support.
        target: bounded support.
        num_bins: at least 2.

    Raises:
        ValueError: where a bin is expected to hold fewer than 10 samples.

    Example:
        >>> flat = Density(lambda x: 1.0, 0.0, 1.0)
        >>> goodness_of_fit((np.arange(1000) + 0.5) / 1000, flat, num_bins=10).p_value
        1.0
    """
    edges = np.linspace(target.lower, target.upper, num_bins + 1)
    masses = np.array([target.mass(left, right) for left, right in itertools.pairwise(edges)])
    expected = masses / masses.sum() * np.size(samples)
    if expected.min() < 10.0:
        raise ValueError(f"samples: expected at least 10 in every bin, got {expected.min():.3g}")
    observed, _ = np.histogram(samples, bins=edges)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # The chi-square tail is a regularised incomplete gamma function, which torch has.
    half = torch.tensor([(num_bins - 1) / 2.0, statistic / 2.0], dtype=torch.float64)
    return GoodnessOfFit(statistic, num_bins - 1, float(torch.special.gammaincc(half[0], half[1])))
