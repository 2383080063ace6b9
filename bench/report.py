"""What the command prints: the machine, a table a case, what was skipped and why."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .provider import BASELINE, FILTERED_BASELINE
from .record import Record

_HEADINGS = ("provider", "warm ms", "10-90 %", "cold ms", "10-90 %", "eager/this", "MB moved", "read share", "peak MB")
EXPLANATION = (
    "warm: the call before was the same; cold: the caches were emptied before the call. eager / this: warm, against "
    "eager PyTorch under the same parameters. MB moved: rows read (specker), or what goes in and out of each operator "
    "(eager code). read share: the time to read the rows that decide, once, at the read bandwidth measured here, as "
    "a share of the time taken (warm / cold). peak MB: most memory held beyond the inputs."
)


def baseline_of(name: str) -> str:
    """Return the name of the eager provider that a provider is compared with."""
    return FILTERED_BASELINE if "filters" in name else BASELINE


def print_machine(console: Console, environment: dict[str, Any]) -> None:
    """Print versions, device, bandwidth and load."""
    words = dict(environment)
    for key in ("memory_bandwidth",):
        words[key] = f"{words[key] / 1e9:.1f} GB/s"
    words["cache_bytes"] = f"{words['cache_bytes'] / 2**20:.0f} MiB"
    console.print("  ".join(f"[dim]{key}[/dim] {value}" for key, value in words.items()), highlight=False)


def case_table(record: Record) -> Table:
    """Return the table of one case."""
    shape = f"{record['batch']} x {record['gamma']} x {record['vocab']:,} {record['dtype']}"
    table = Table(
        title=f"{record['case']}: {shape}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "provider" else "right", no_wrap=True)
    providers = record["providers"]
    for name, found in providers.items():
        warm, cold = found["warm"], found["cold"]
        base = providers.get(baseline_of(name))
        moved = found["moved_bytes"]
        table.add_row(
            name,
            *_milliseconds(warm),
            *_milliseconds(cold),
            f"{base['warm']['median'] / warm['median']:.1f}x" if base else "",
            "not seen" if moved is None else f"{moved / 1e6:.1f}",
            f"{warm['floor_seconds'] / warm['median']:.0%} / {cold['floor_seconds'] / cold['median']:.0%}",
            f"{found['peak_bytes'] / 1e6:.1f}",
        )
    return table


def _milliseconds(timing: dict[str, float]) -> tuple[str, str]:
    low, median, high = (_digits(timing[key] * 1e3) for key in ("low", "median", "high"))
    return median, f"{low}-{high}"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def skipped_lines(record: Record) -> list[str]:
    """Return one line for each provider that did not run, with its reason."""
    return [f"  skipped {name}: {reason}" for name, reason in record["skipped"].items()]


def gate_lines(records: list[Record]) -> list[str]:
    """Return how the providers agreed with the reference, those that did alike in one line."""
    agreed: dict[str, list[str]] = {}
    for name, words in {
        name: found["gate"] for record in records for name, found in record["providers"].items()
    }.items():
        agreed.setdefault(words, []).append(name)
    return [f"gate: {' | '.join(names)}: {words}" for words, names in agreed.items()]
