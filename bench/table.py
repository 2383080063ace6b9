"""Print the README's table from a file that `bench_verify --json` wrote: `python -m bench.table FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .cases import CASES

_COLUMNS = (
    "eager",
    "torch.compile of eager",
    "specker",
    "specker, receipt",
    "smart eager, filters",
    "specker, filters",
)


def markdown(results: dict[str, Any]) -> str:
    """Return one line a case: milliseconds by provider, and how many times specker is faster than eager PyTorch."""
    shapes = {case.name: case for case in CASES}
    lines = [
        f"| batch x gamma x vocab | {' | '.join(_COLUMNS)} | eager / specker | with filters |",
        "|---|" + "---:|" * (len(_COLUMNS) + 2),
    ]
    for record in results["cases"]:
        case = shapes[record["case"]]
        times = {name: record["timings"][name]["median"] * 1e3 for name in _COLUMNS}
        shape = f"{case.batch} x {case.gamma} x {case.vocab:,} {str(case.dtype).removeprefix('torch.')}"
        plain = times["eager"] / times["specker"]
        filtered = times["smart eager, filters"] / times["specker, filters"]
        cells = " | ".join(f"{value:.2f}" for value in times.values())
        lines.append(f"| {shape} | {cells} | {plain:.1f}x | {filtered:.1f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown(json.loads(Path(sys.argv[1]).read_text())) + "\n")
