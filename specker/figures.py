"""The article's five figures, drawn from one simulation; matplotlib is imported when a figure is drawn.

Colours are Okabe and Ito's, and nothing rests on colour alone: line styles, hatches and markers differ too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specker.theory import article, best_gamma, goodness_of_fit, speedup, survival, tightest_constant
from specker.theory.rejection import Proposal, RejectionRun
from specker.theory.speculative import expected_counts
from specker.theory.statements import MAX_STANDARD_ERRORS, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptances of figure 5."""
LARGEST_GAMMA = 16
"""Right end of figure 5."""
SHOWN_PAIRS = 2500
"""Candidates of figure 2; all 300,000 would be one blot."""

_LINES = (("-", "o", BLUE), ("--", "s", VERMILION), ("-.", "^", GREEN), (":", "D", PURPLE), ((0, (5, 1)), "v", BLACK))


class FiguresUnavailableError(RuntimeError):
    """The package that draws is missing; the message says how to get it."""


def draw_figures(directory: Path, simulation: Simulation) -> list[Path]:
    """Draw the five figures into directory, each as PNG and SVG, and return the files.

    Args:
        directory: made where it does not exist.
        simulation: from `specker.theory.simulate_article`.

    Raises:
        FiguresUnavailableError: without matplotlib.

    Example:
        >>> from specker.theory import simulate_article
        >>> files = draw_figures(Path("figures"), simulate_article(seed=0))  # doctest: +SKIP
    """
    drawings: dict[str, Callable[[Simulation], Figure]] = {
        "1-envelopes": _envelopes,
        "2-candidates": _candidates,
        "3-histograms": _histograms,
        "4-mass": _mass,
        "5-speedup": _speedup,
    }
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, drawing in drawings.items():
        figure = drawing(simulation)
        for suffix in ("png", "svg"):
            files.append(directory / f"{name}.{suffix}")
            # A fixed date and id salt: the same simulation gives the same bytes.
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(files[-1], dpi=120, metadata=metadata)
    return files


def _figure(columns: int, *, width: float = 11.0) -> tuple[Figure, list[Axes]]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise FiguresUnavailableError("figures need matplotlib: pip install 'specker[figures]'") from error
    matplotlib.rcParams["svg.hashsalt"] = "specker"
    figure = Figure(figsize=(width, 4.6), layout="constrained")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _runs(simulation: Simulation) -> list[tuple[Proposal, float, RejectionRun]]:
    return [
        (article.UNIFORM, article.UNIFORM_CONSTANT, simulation.uniform),
        (article.NORMAL, article.NORMAL_CONSTANT, simulation.normal),
    ]


def _envelopes(simulation: Simulation) -> Figure:
    figure, axes = _figure(2)
    factor = article.NORMAL_CONSTANT / math.sqrt(2.0 * math.pi)
    reasons = (
        f"valid: the peak {article.PEAK:.4f} is below 25/6 = {25 / 6:.4f}",
        f"valid: the bracket never exceeds {article.LARGEST_BRACKET:.4f} < 11/√(2π) = {factor:.4f}",
    )
    for axis, reason, (proposal, constant, _) in zip(axes, reasons, _runs(simulation), strict=True):
        x = np.linspace(-4.0, 4.0, 2001)
        target, envelope = article.TARGET(x), constant * proposal.density(x)
        tightest = tightest_constant(article.TARGET, proposal, tolerance=1e-3).lower
        axis.fill_between(x, target, envelope, facecolor="#FFE3B3", edgecolor=ORANGE, hatch="///", linewidth=0.0)
        axis.fill_between(x, target, facecolor=SKY, alpha=0.45)
        axis.plot(x, target, color=BLACK, linewidth=1.6, label="target f")
        axis.plot(x, envelope, "--", color=VERMILION, linewidth=1.8, label=f"envelope, C = {constant:g}")
        axis.plot(
            x, tightest * proposal.density(x), ":", color=BLUE, linewidth=1.6, label=f"tightest, C = {tightest:.2f}"
        )
        axis.fill_between([], [], facecolor="#FFE3B3", edgecolor=ORANGE, hatch="///", label="rejected area")
        axis.set(xlabel="x (no unit)", ylabel="height (no unit)", ylim=(0.0, 5.6))
        acceptance = article.TARGET.mass() / constant
        axis.set_title(f"{proposal.name}: {acceptance:.2%} accepted\n{reason}", fontsize=10)
        axis.legend(loc="upper right", fontsize=8, ncols=2)
    return figure


def _candidates(simulation: Simulation) -> Figure:
    figure, axes = _figure(2)
    x = np.linspace(-4.0, 4.0, 2001)
    for axis, (proposal, constant, run) in zip(axes, _runs(simulation), strict=True):
        candidates, heights, kept = (values[:SHOWN_PAIRS] for values in run)
        axis.scatter(
            candidates[~kept], heights[~kept], s=9, marker="x", linewidths=0.6, color=VERMILION,
            label=f"rejected ({(~kept).sum():,})",
        )  # fmt: skip
        axis.scatter(candidates[kept], heights[kept], s=9, color=BLUE, label=f"kept ({kept.sum():,})")
        axis.plot(x, article.TARGET(x), color=BLACK, linewidth=1.6, label="target f")
        axis.plot(x, constant * proposal.density(x), "--", color=BLACK, linewidth=1.2, label="envelope")
        axis.set(xlabel="candidate x (no unit)", ylabel="height (no unit)", xlim=(-4.0, 4.0), ylim=(0.0, 5.6))
        axis.set_title(f"{proposal.name}: the first {SHOWN_PAIRS:,} candidates", fontsize=10)
        axis.legend(loc="upper right", fontsize=8, ncols=2)
    return figure


def _histograms(simulation: Simulation) -> Figure:
    figure, axes = _figure(2)
    x = np.linspace(article.TARGET.lower, article.TARGET.upper, 1201)
    for axis, (proposal, _, run) in zip(axes, _runs(simulation), strict=True):
        p_value = goodness_of_fit(run.samples, article.TARGET).p_value
        axis.hist(
            run.samples, bins=100, range=(-3.0, 3.0), density=True, facecolor=SKY, edgecolor=BLUE, linewidth=0.4,
            label=f"{run.samples.size:,} accepted samples",
        )  # fmt: skip
        axis.plot(x, article.TARGET(x) / article.TARGET.mass(), color=BLACK, linewidth=1.6, label="f / Z")
        axis.set(xlabel="x (no unit)", ylabel="density (per unit of x)", ylim=(0.0, 0.82))
        axis.set_title(f"{proposal.name}: chi-square p-value {p_value:.3f}", fontsize=10)
        axis.legend(loc="upper right", fontsize=8)
    return figure


def _mass(simulation: Simulation) -> Figure:
    figure, (axis,) = _figure(1, width=7.0)
    total = article.NUM_DRAFT_TOKENS
    expected = expected_counts(article.TARGET_PROBS, article.DRAFT_PROBS, total)
    places = np.arange(len(article.TOKENS))
    accepted, replaced = expected.accepted / total, expected.replacements / total
    axis.bar(
        places - 0.22, article.DRAFT_PROBS, 0.34, facecolor="white", edgecolor=BLACK, linestyle="--", label="draft"
    )
    axis.bar(places + 0.18, accepted, 0.4, facecolor=SKY, edgecolor=BLACK, label="accepted: min(target, draft)")
    axis.bar(
        places + 0.18, replaced, 0.4, bottom=accepted, facecolor=ORANGE, edgecolor=BLACK, hatch="///",
        label="replaced: max(target − draft, 0)",
    )  # fmt: skip
    axis.hlines(article.TARGET_PROBS, places - 0.05, places + 0.41, color=BLACK, linewidth=2.5, label="target")
    errors = MAX_STANDARD_ERRORS * np.sqrt(
        np.array(article.TARGET_PROBS) * (1 - np.array(article.TARGET_PROBS)) / total
    )
    axis.errorbar(
        places + 0.18, simulation.tokens.final / total, yerr=errors, fmt="D", color=BLACK, markersize=8,
        markeredgecolor="white", capsize=4, label=f"simulated, {total:,} rounds (±4σ)",
    )  # fmt: skip
    axis.set_xticks(places, article.TOKENS)
    axis.set(xlabel="token", ylabel="probability (no unit)", ylim=(0.0, 0.72))
    axis.set_title("Accepted mass and replacement mass make the target", fontsize=10)
    axis.legend(loc="upper right", fontsize=8)
    return figure


def _speedup(_: Simulation) -> Figure:
    figure, (left, right) = _figure(2)
    gammas = range(LARGEST_GAMMA + 1)
    for alpha, (line, marker, colour) in zip(ALPHAS, _LINES, strict=True):
        speedups = [speedup(alpha, article.DRAFT_COST, gamma) for gamma in gammas]
        best = best_gamma(alpha, article.DRAFT_COST)
        style: dict[str, Any] = {"linestyle": line, "marker": marker, "color": colour, "markersize": 3.5}
        left.plot(gammas, speedups, label=f"α = {alpha}: best γ = {best.gamma}, {best.speedup:.2f}×", **style)
        left.plot(best.gamma, best.speedup, "*", color=colour, markersize=15, markeredgecolor=BLACK)
        right.plot(gammas, np.array(survival(alpha, LARGEST_GAMMA)), label=f"α = {alpha}", **style)
    left.axhline(1.0, color=BLACK, linewidth=0.8, label="plain decoding")
    left.set(xlabel="γ (draft tokens a round)", ylabel="speed-up (times plain decoding)", ylim=(0.5, 4.6))
    left.set_title(f"Speed-up at c = {article.DRAFT_COST}; stars: the maxima", fontsize=10)
    right.set(xlabel="γ (draft tokens a round)", ylabel="probability αᵞ (no unit)", ylim=(0.0, 1.02))
    right.set_title("Survival: all γ draft tokens are accepted", fontsize=10)
    left.legend(loc="upper left", fontsize=8)
    right.legend(loc="upper right", fontsize=8)
    return figure
