"""`specker bench`, also `python -m bench.bench_verify` from the tree: time verify rounds and compare."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specker.cli_options import writable

from . import footprint, plots, record, report
from .cases import CASES, QUICK, Case, sweeps
from .gate import DisagreementError
from .machine import default_device, environment
from .provider import COMPILED, Provider
from .providers import SWEPT, all_providers

_SECONDS = 10.0
_QUICK_SECONDS = 2.0
_QUICK_CALLS = 3
_WIDTH = 118
_QUICK_DEADLINE = 40.0


def bench(
    case: Annotated[str | None, typer.Option(help="Run the cases whose name or shape contains this.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, at most a minute in all.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Seconds of measuring a case.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; 1 on a CPU reports processor time.")] = 1,
    device: Annotated[str | None, typer.Option(help="Device; the accelerator where there is one.")] = None,
    compiled: Annotated[bool, typer.Option(help="Include torch.compile of the eager round.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write the figures to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="Draw the figures into this PNG file, scaling included.")
    ] = None,
) -> None:
    """Time verify rounds of real models' shapes: eager PyTorch, torch.compile, other packages' functions, specker."""
    began = time.perf_counter()
    torch.set_num_threads(threads)
    console = Console()
    # Wide enough for the tables: a narrower terminal wraps them, which is better than cutting figures off.
    console.width = max(console.width, _WIDTH)
    chosen = _chosen(case, quick)
    if plot is not None:
        _require_matplotlib(console)
    where = default_device() if device is None else torch.device(device)
    processor_time = threads == 1 and where.type == "cpu"
    session = record.start(where, seconds or (_QUICK_SECONDS if quick else _SECONDS), processor_time=processor_time)
    if quick:
        session = session._replace(min_calls=_QUICK_CALLS, deadline=began + _QUICK_DEADLINE)
    providers = [provider for provider in all_providers() if compiled or provider.name != COMPILED]
    run = _Run(console, session, providers, _Results(_environment(session, threads), [], {}, []))
    report.print_machine(console, run.results.environment)
    try:
        run.measure(chosen, sweeps(quick=quick) if plot else {})
    except DisagreementError as error:
        console.print(f"refused: {error}", style="bold", markup=False)
        raise typer.Exit(1) from error
    run.finish()
    results = record.rounded(run.results._asdict())
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    if plot is not None:
        plots.draw(results, plot)
        console.print(f"picture: {plot}")


def _require_matplotlib(console: Console) -> None:
    """Fail before minutes are spent on figures that cannot be drawn."""
    try:
        plots.require_matplotlib()
    except plots.PlotsUnavailableError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error


def _chosen(case: str | None, quick: bool) -> list[Case]:
    if case is None:
        return [entry for entry in CASES if not quick or entry.name in QUICK]
    chosen = [entry for entry in CASES if case.lower() in f"{entry.name}: {entry.shape}".lower()]
    if not chosen:
        known = "; ".join(f"{entry.name}: {entry.shape}" for entry in CASES)
        raise typer.BadParameter(f"expected part of one of these, got {case!r}: {known}")
    return chosen


def _environment(session: record.Session, threads: int) -> dict[str, Any]:
    return {
        **environment(session.device, threads),
        "memory_bandwidth": session.memory_bandwidth,
        "clock": "processor time" if session.clock is time.process_time else "wall clock",
        "peak_memory": footprint.peak_method(session.device),
    }


class _Results(NamedTuple):
    """What is written to the file."""

    environment: dict[str, Any]
    cases: list[record.Record]
    sweeps: dict[str, list[record.Record]]
    left_out: list[str]


class _Run(NamedTuple):
    """A run of the command: what it measures with, and what has come of it."""

    console: Console
    session: record.Session
    providers: list[Provider]
    results: _Results

    def measure(self, chosen: list[Case], swept: dict[str, tuple[Case, ...]]) -> None:
        """Run the cases, printing each, and then the shapes of the scaling panels."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("starting", total=len(chosen) + sum(map(len, swept.values())))

            def tell(words: str) -> None:
                progress.update(task, description=words)

            for entry in filter(self._has_time, chosen):
                self._measure_case(entry, tell)
                progress.advance(task)
            # One point of each panel in turn: a run that ends early has drawn something in all of them.
            turns = itertools.zip_longest(*([(size, entry) for entry in entries] for size, entries in swept.items()))
            for size, entry in filter(None, itertools.chain.from_iterable(turns)):
                if self._has_time(entry):
                    self._measure_point(size, entry, tell)
                progress.advance(task)

    def _measure_case(self, case: Case, tell: Callable[[str], None]) -> None:
        found = record.run_case(self.session, case, self.providers, tell)
        self.results.cases.append(found)
        self.console.print(report.case_table(found))
        self.console.print("\n".join(report.skipped_lines(found)), highlight=False, markup=False)

    def _measure_point(self, size: str, case: Case, tell: Callable[[str], None]) -> None:
        brief = self.session._replace(seconds=self.session.seconds / 5, min_calls=_QUICK_CALLS)
        few = [provider for provider in self.providers if provider.name in SWEPT]
        found = record.run_case(brief, case, few, tell, footprints=False)
        self.results.sweeps.setdefault(size, []).append(found)

    def _has_time(self, case: Case) -> bool:
        late = self.session.is_late()
        if late:
            self.results.left_out.append(case.name)
        return not late

    def finish(self) -> None:
        """Print what the figures mean, how the gate was passed, and who else was at work."""
        self.console.print(report.EXPLANATION, style="dim")
        for line in report.gate_lines(self.results.cases):
            self.console.print(line, highlight=False, markup=False)
        if self.results.left_out:
            self.console.print(f"left out for want of time: {', '.join(self.results.left_out)}", highlight=False)
        bystanders, known = self.session.bystanders, self.results.environment
        known |= {"other_cores_busy": bystanders.cores(), "warning": bystanders.warning()}
        if known["warning"]:
            words = f"Not a quiet machine: {known['warning']} ({known['clock']} is shown)."
            self.console.print(words, style="bold", highlight=False)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(bench)

if __name__ == "__main__":
    app()
