"""What a run of the decode loop leaves behind: a JSON record, and a picture beside the model's prediction."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specker.accounting import GenerationStats
from specker.packages import ModelUnavailableError
from specker.theory.cost import expected_tokens, num_accepted_law, survival

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours; markers and hatches tell the same apart without them.
_SKY, _VERMILION = "#56B4E9", "#D55E00"


def predicted_tokens_per_round(stats: GenerationStats) -> float:
    """Return the tokens a round emits by the cost model: acceptance alike at every position, blocks as they were.

    Example:
        >>> from specker.accounting import GenerationStats, SequenceStats, TokenKind
        >>> counters = SequenceStats()
        >>> counters.record(2, [TokenKind.ACCEPTED, TokenKind.RECOVERED], [0.5, 0.5])
        >>> predicted_tokens_per_round(GenerationStats((counters,), 1, None))
        1.75
    """
    rounds = stats.rounds_by_drafted
    tokens = sum(count * float(expected_tokens(_overlap(stats), drafted)) for drafted, count in enumerate(rounds))
    return tokens / stats.rounds


def record(stats: GenerationStats, **settings: Any) -> dict[str, Any]:
    """Return the settings and counters of a run, and the prediction beside them, ready for JSON.

    Example:
        >>> record(stats, gamma=4)["gamma"]  # doctest: +SKIP
        4
    """
    return {**settings, **stats.as_dict(), "predicted_tokens_per_round": predicted_tokens_per_round(stats)}


def require_matplotlib(file: Path) -> ModuleType:
    """Return matplotlib's module of figures, if a picture can be drawn into the file.

    Raises:
        ModelUnavailableError: matplotlib is missing.
        ValueError: the file's ending names no format.

    Example:
        >>> require_matplotlib(Path("generation.txt"))
        Traceback (most recent call last):
        ValueError: --plot: expected a file ending in .png, .svg or .pdf, got generation.txt
    """
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: expected a file ending in .png, .svg or .pdf, got {file}")
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise ModelUnavailableError("pictures need the package matplotlib: pip install 'specker[figures]'") from error


def draw_generation(stats: GenerationStats, file: Path) -> None:
    """Draw acceptance by position and tokens per round, each against the model's prediction, into a PNG, SVG or PDF.

    Raises:
        ModelUnavailableError: matplotlib is missing.
        ValueError: the file's ending names no format.

    Example:
        >>> draw_generation(stats, Path("generation.png"))  # doctest: +SKIP
    """
    figure: Figure = require_matplotlib(file).Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_acceptance(left, stats)
    _draw_tokens(right, stats)
    figure.savefig(file, dpi=150)


def _draw_acceptance(axes: Axes, stats: GenerationStats) -> None:
    shares = stats.acceptance_by_position
    positions = range(1, len(shares) + 1)
    axes.bar(positions, shares, color=_SKY, edgecolor="black", label="measured: share of draft tokens accepted")
    predicted = [float(value) for value in survival(_overlap(stats), len(shares))[1:]]
    label = f"predicted: αᵏ with α = {_overlap(stats):.3f}"
    axes.plot(positions, predicted, "D--", color=_VERMILION, label=label)
    axes.set(xlabel="position k in the block", ylabel="acceptance (no unit)", ylim=(0.0, 1.25), xticks=positions)
    axes.set_title("Acceptance by position", fontsize=10)
    axes.legend(loc="upper right", fontsize=8)


def _draw_tokens(axes: Axes, stats: GenerationStats) -> None:
    measured = [count / stats.rounds for count in stats.rounds_by_emitted]
    predicted = [0.0] * max(len(measured), len(stats.rounds_by_drafted) + 1)
    for drafted, count in enumerate(stats.rounds_by_drafted):
        for accepted, share in enumerate(num_accepted_law(_overlap(stats), drafted)):
            predicted[accepted + 1] += float(share) * count / stats.rounds
    axes.bar(range(1, len(measured)), measured[1:], color=_SKY, edgecolor="black", label="measured")
    axes.plot(range(1, len(predicted)), predicted[1:], "D--", color=_VERMILION, label="predicted")
    mean = stats.emitted / stats.rounds
    axes.set(xlabel="tokens of a sequence per target pass", ylabel="share of rounds (no unit)", ylim=(0.0, 1.1))
    axes.set_xticks(range(1, len(predicted)))
    title = f"Tokens per target pass: {mean:.2f} measured, {predicted_tokens_per_round(stats):.2f} predicted"
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", fontsize=8)


def _overlap(stats: GenerationStats) -> float:
    # Without drafts every round emits one token, whatever the overlap.
    return 0.0 if stats.overlap is None else min(stats.overlap, 1.0)
