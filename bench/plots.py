"""The picture of a run: time a round by provider, and how it grows with vocab, batch and gamma.

Also from a file: `python -m bench.plots FILE.json FILE.png` draws what `--json` wrote.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

from .record import Record
from .weigh import YARDSTICK

_COLOURS = {
    "eager": "#8c8c8c",
    "torch.compile of eager": "#c49c3e",
    "transformers": "#cc79a7",
    "vLLM": "#d55e00",
    "FlashInfer": "#f0a050",
    YARDSTICK: "#000000",
    "specker": "#0072b2",
    "specker, receipt": "#56b4e9",
    "specker, point mass": "#003f66",
    "smart eager, filters": "#bdbdbd",
    "specker, filters": "#009e73",
    "specker, filters, receipt": "#7fd1b5",
}
_OTHERS = "#444444"
_WIDTH = 0.8


class PlotsUnavailableError(RuntimeError):
    """The drawing package is not installed."""


def require_matplotlib() -> Any:
    """Return matplotlib's module of figures.

    Raises:
        PlotsUnavailableError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise PlotsUnavailableError("pictures need the package matplotlib: pip install 'specker[bench]'") from error


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw the bars and, where the run measured them, the scaling panels.

    Raises:
        PlotsUnavailableError: matplotlib is not installed.
    """
    figures = require_matplotlib()
    sweeps = results.get("sweeps", {})
    figure = figures.Figure(figsize=(13, 9 if sweeps else 5), layout="constrained")
    grid = figure.add_gridspec(2 if sweeps else 1, max(len(sweeps), 1))
    _bars(figure.add_subplot(grid[0, :]), results["cases"])
    for column, (size, records) in enumerate(sweeps.items()):
        _scaling(figure.add_subplot(grid[1, column]), size, records, results["environment"]["cache_bytes"], not column)
    figure.suptitle(_title(results["environment"]), fontsize=10)
    figure.savefig(file, dpi=110)


def _title(environment: dict[str, Any]) -> str:
    threads = f"{environment['threads']} thread{'s' * (environment['threads'] > 1)}"
    busy = f"; {environment['warning']}" if environment.get("warning") else ""
    return (
        f"One verify round: {environment['clock']} of {threads}, {environment['device']}, "
        f"torch {environment['torch']}, specker {environment['specker']}, {environment['date']}{busy}"
    )


def _bars(axes: Any, records: list[Record]) -> None:
    """Draw a group of bars a case: solid with warm caches, pale up to the time with cold ones."""
    names = [name for name in _COLOURS if any(name in record["providers"] for record in records)]
    names += sorted({name for record in records for name in record["providers"]} - set(names))
    width = _WIDTH / max(len(names), 1)
    for index, name in enumerate(names):
        found = [(at, record["providers"][name]) for at, record in enumerate(records) if name in record["providers"]]
        places = [at - _WIDTH / 2 + (index + 0.5) * width for at, _ in found]
        colour = _COLOURS.get(name, _OTHERS)
        for state, opacity, label in (("cold", 0.35, None), ("warm", 1.0, name)):
            heights = [provider[state]["median"] * 1e3 for _, provider in found]
            axes.bar(places, heights, width, color=colour, alpha=opacity, label=label)
    for at, record in enumerate(records):
        floor = _floor(record)
        label = "floor: each row that decides read once from memory" if at == 0 else None
        axes.plot([at - _WIDTH / 2, at + _WIDTH / 2], [floor, floor], color="black", linestyle=":", label=label)
    axes.set_xticks(range(len(records)), [_case_label(record) for record in records], fontsize=8)
    axes.set_yscale("log")
    # Room for the legend above the highest bar.
    axes.set_ylim(top=axes.get_ylim()[1] * 20)
    axes.set_ylabel("ms a round (pale: with cold caches)")
    axes.legend(fontsize=8, ncols=3, loc="upper left")


def _case_label(record: Record) -> str:
    return f"{record['case']}\n{record['batch']} x {record['gamma']} x {record['vocab']:,}\n{record['dtype']}"


def _floor(record: Record) -> float:
    """Return the milliseconds in which the rows that decide a plain round can be read from memory."""
    return float(record["providers"]["specker"]["cold"]["floor_seconds"] * 1e3)


def _scaling(axes: Any, size: str, records: list[Record], cache_bytes: int, legend: bool) -> None:
    """Draw the time against one size on log axes, warm and cold, the floor, and where the rows outgrow the cache."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = [record[size] for record in records]
    for name in records[0]["providers"]:
        for state, style in (("warm", "-"), ("cold", "--")):
            times = [record["providers"][name][state]["median"] * 1e3 for record in records]
            label = name if state == "warm" else None
            axes.plot(sizes, times, style, marker=".", color=_COLOURS.get(name, _OTHERS), label=label)
    axes.plot(sizes, [_floor(record) for record in records], ":", color="black", label="floor")
    crossing = crossing_of(sizes, [record["providers"]["specker"]["floor_bytes"] for record in records], cache_bytes)
    if crossing is not None:
        axes.axvline(crossing, color="#aa0000", linewidth=0.8)
        words = f"rows that decide fill \nthe cache ({cache_bytes / 2**20:.0f} MiB) "
        bottom = axes.get_xaxis_transform()
        axes.text(crossing, 0.02, words, fontsize=7, color="#aa0000", ha="right", va="bottom", transform=bottom)
    fixed = ", ".join(f"{other} {records[0][other]:,}" for other in ("batch", "gamma", "vocab") if other != size)
    axes.set_xlabel(f"{size} ({fixed}, {records[0]['dtype']})", fontsize=9)
    axes.set_xticks(sizes, [_short(value) for value in sizes], fontsize=8)
    axes.minorticks_off()
    if legend:
        axes.set_ylabel("ms a round (dashed: with cold caches)")
        axes.legend(fontsize=7)


def _short(value: int) -> str:
    return f"{value / 1000:.0f}k" if value >= 1000 else str(value)


def crossing_of(sizes: list[int], row_bytes: list[int], cache_bytes: int) -> float | None:
    """Return the size at which the rows fill the cache, interpolated on log axes; None where that is outside."""
    pairs = list(zip(sizes, row_bytes, strict=True))
    for (low_size, low), (high_size, high) in itertools.pairwise(pairs):
        if low <= cache_bytes < high:
            share = math.log(cache_bytes / low) / math.log(high / low)
            return float(low_size * (high_size / low_size) ** share)
    return None


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
