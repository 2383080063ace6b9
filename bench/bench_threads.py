"""What a second thread saves: `python -m bench.bench_threads`, wall clock, numbers of threads interleaved.

The larger cases of `specker bench`, and rounds about the size from which the kernels use threads at all: the first
line of either size class that gains is where a threshold belongs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import specker

from .cases import CASES, Case, make_inputs
from .eager import PLAIN
from .machine import environment
from .timing import Timing, summary

_SMALL = tuple(
    Case(f"{batch} x 4 x {vocab:,}", batch, 4, vocab, torch.float32)
    for batch, vocabs in (
        (1, (4_096, 8_192, 13_000, 13_200, 16_384, 24_576, 65_536)),
        (8, (1_024, 1_600, 1_664, 4_096)),
    )
    for vocab in vocabs
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    threads: Annotated[int, typer.Option(min=2, help="Threads to compare with one.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of measuring a case.")] = 5.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print the time of a round on one thread and on several."""
    console = Console()
    records = []
    for case in (*_SMALL, *CASES[2:]):
        one, several = compare(case, threads, seconds)
        records.append({"case": case.name, "logits": _logits(case), "one": one._asdict(), "several": several._asdict()})
    table = Table(title=f"1 and {threads} threads, medians of the wall clock", title_justify="left")
    for heading in ("round", "logits", "1 thread ms", f"{threads} threads ms", "gain", "calls"):
        table.add_column(heading, justify="left" if heading == "round" else "right")
    for record in records:
        table.add_row(*_row(record))
    console.print(table)
    if json_file is not None:
        found = {"environment": environment(torch.device("cpu"), threads), "cases": records}
        json_file.write_text(json.dumps(found, indent=1) + "\n")


def compare(case: Case, threads: int, seconds: float) -> tuple[Timing, Timing]:
    """Return the time of a round on one thread and on several, call by call in turn."""
    inputs = make_inputs(case, PLAIN, torch.device("cpu"))

    def call() -> None:
        specker.verify(*inputs[:3], seed=inputs.seed)

    samples: dict[int, list[float]] = {1: [], threads: []}
    before = torch.get_num_threads()
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(samples[1]) < 5:
            for number, times in samples.items():
                torch.set_num_threads(number)
                call()
                times.append(_seconds(call))
    finally:
        torch.set_num_threads(before)
    return summary(samples[1]), summary(samples[threads])


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _logits(case: Case) -> int:
    return case.batch * (case.gamma + 1) * case.vocab


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    one, several = record["one"]["median"], record["several"]["median"]
    times = (f"{one * 1e3:.3f}", f"{several * 1e3:.3f}", f"{one / several:.2f}x")
    return (record["case"], f"{record['logits']:,}", *times, str(record["one"]["calls"]))


if __name__ == "__main__":
    app()
