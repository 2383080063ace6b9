"""The README's tables from the files in bench/results.

python -m bench.table FILE.json             print the table of a file that `specker bench --json` wrote
python -m bench.table --write README.md     put every table into the page, between its markers
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from . import gpu_table
from .report import baseline_of
from .weigh import YARDSTICK

RESULTS = Path(__file__).parent / "results"
_COLUMNS = (
    "eager",
    "torch.compile of eager",
    "transformers",
    YARDSTICK,
    "specker",
    "specker, receipt",
    "smart eager, filters",
    "specker, filters",
)
_COMPARED = (("specker", "eager / specker"), ("specker, filters", "with filters"))
_ABSENT = (
    "No measurement on a GPU yet: the Triton kernels are tested in the interpreter and compiled for four\n"
    "architectures, not timed."
)
_BLOCK = re.compile(r"(?P<start><!-- bench: (?P<name>[\w*-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def markdown(results: dict[str, Any]) -> str:
    """Return two lines a case, warm and cold: milliseconds by provider, and how many times as long eager takes."""
    measured = {name for record in results["cases"] for name in record["providers"]}
    columns = [name for name in _COLUMNS if name in measured]
    lines = [
        f"| batch x gamma x vocab | caches | {' | '.join(columns)} | {' | '.join(title for _, title in _COMPARED)} |",
        "|---|---|" + "---:|" * (len(columns) + len(_COMPARED)),
    ]
    for record in results["cases"]:
        shape = f"{record['batch']} x {record['gamma']} x {record['vocab']:,} {record['dtype']}"
        for state in ("warm", "cold"):
            times = {name: found[state]["median"] * 1e3 for name, found in record["providers"].items()}
            cells = [f"{times[name]:.2f}" if name in times else "" for name in columns]
            cells += [f"{times[baseline_of(name)] / times[name]:.1f}x" for name, _ in _COMPARED]
            lines.append(f"| {shape if state == 'warm' else ''} | {state} | {' | '.join(cells)} |")
    return "\n".join(lines)


def caption(results: dict[str, Any]) -> str:
    """Return the machine, the date and the clock in a sentence."""
    environment = results["environment"]
    busy = environment.get("warning")
    return (
        f"Milliseconds a round, {environment['clock']} of {environment['threads']} thread"
        f"{'s' * (environment['threads'] > 1)}, medians: {environment['device']}"
        f"{' with ' + environment['capability'] if environment['backend'] != 'triton' else ''}, read bandwidth "
        f"{environment['memory_bandwidth'] / 1e9:.0f} GB/s, torch {environment['torch']}, specker "
        f"{environment['specker']}, {environment['date']}{'; ' + busy if busy else ''}."
    )


def filled(page: str, results: Path = RESULTS) -> str:
    """Return the page with the tables of each marker's files between its markers, or that there are none.

    A marker names one file or, with a star, several.
    """

    def fill(block: re.Match[str]) -> str:
        files = sorted(results.glob(f"{block['name']}.json"))
        tables = [_told(json.loads(file.read_text())) for file in files]
        return f"{block['start']}{chr(10).join(tables) or _ABSENT}\n{block['end']}"

    return _BLOCK.sub(fill, page)


def _told(measured: dict[str, Any]) -> str:
    """Return caption and table of a file, whichever of the two commands wrote it."""
    teller = gpu_table if "times" in measured else sys.modules[__name__]
    return f"{teller.caption(measured)}\n\n{teller.markdown(measured)}"


def main(arguments: list[str]) -> None:
    if arguments[0] == "--write":
        page = Path(arguments[1])
        page.write_text(filled(page.read_text()))
    else:
        sys.stdout.write(markdown(json.loads(Path(arguments[0]).read_text())) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
