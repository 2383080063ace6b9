"""The README's table of a GPU, from a file that `bench/gpu_check.py` wrote."""

from __future__ import annotations

from typing import Any

_COLUMNS = (
    "eager",
    "torch.compile of eager",
    "specker",
    "specker, graph",
    "specker, receipt, graph",
    "smart eager, filters",
    "specker, filters, graph",
)
_COMPARED = (("specker, graph", "eager / specker, graph"), ("specker, filters, graph", "with filters"))


def markdown(results: dict[str, Any]) -> str:
    """Return one line a case: microseconds by provider, eager's multiple of them, share of the copy bandwidth."""
    records = results["times"]["cases"]
    columns = [name for name in _COLUMNS if any(name in record["seconds"] for record in records)]
    titles = [*(title for _, title in _COMPARED), "of the bandwidth"]
    lines = [
        f"| batch x vocab dtype | {' | '.join([*columns, *titles])} |",
        "|---|" + "---:|" * (len(columns) + len(titles)),
    ]
    for record in records:
        seconds, ratios = record["seconds"], record["eager_over_this"]
        cells = [f"{seconds[name] * 1e6:.1f}" if name in seconds else "" for name in columns]
        cells += [f"{ratios[name]:.1f}x" if name in ratios else "" for name, _ in _COMPARED]
        share = record["share_of_bandwidth"].get(_COMPARED[0][0])
        cells.append("" if share is None else f"{share:.0%}")
        lines.append(f"| {record['case'].replace('torch.', '')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def caption(results: dict[str, Any]) -> str:
    """Return the machine, the date and how it was measured in a sentence."""
    versions, checks = results["versions"], results["checks"]
    passed = sum(check["passed"] for check in checks.values())
    return (
        f"Microseconds of device time a round at gamma 4, cold caches, medians; *graph*: replayed as a CUDA graph: "
        f"{versions['device']}, copy bandwidth {results['times']['copy_bandwidth'] / 1e12:.2f} TB/s, torch "
        f"{versions['torch']}, triton {versions['triton']}, specker {versions['specker']}, {versions['date']}; "
        f"{passed} of {len(checks)} checks passed (`python -m bench.gpu_check`)."
    )
