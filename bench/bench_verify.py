"""`specker bench`, also `python -m bench.bench_verify` from the tree: time verify rounds and compare."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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
_QUICK_DEADLINE = 45.0


def bench(
    case: Annotated[str | None, typer.Option(help="Run the cases whose name contains this.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, at most a minute in all.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Seconds of measuring a case.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; 1 on a CPU reports processor time.")] = 1,
    device: Annotated[str | None, typer.Option(help="Device; the accelerator where there is one.")] = None,
    compiled: Annotated[bool, typer.Option(help="Include torch.compile of the eager round.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this PNG file, scaling included.")] = None,
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
    budget = seconds or (_QUICK_SECONDS if quick else _SECONDS)
    session = record.start(where, budget, processor_time=processor_time)
    if quick:
        session = session._replace(min_calls=_QUICK_CALLS, deadline=began + _QUICK_DEADLINE)
    results: dict[str, Any] = {
        "environment": {
            **environment(where, threads),
            "memory_bandwidth": session.memory_bandwidth,
            "clock": "processor time" if processor_time else "wall clock",
            "peak_memory": footprint.peak_method(where),
        },
        "cases": [],
        "left_out": [],
    }
    report.print_machine(console, results["environment"])
    providers = [provider for provider in all_providers() if compiled or provider.name != COMPILED]
    try:
        _run(console, session, chosen, providers, results, sweeps(quick=quick) if plot else {})
    except DisagreementError as error:
        console.print(f"refused: {error}", style="bold", markup=False)
        raise typer.Exit(1) from error
    _finish(console, session, results)
    if json_file is not None:
        json_file.write_text(json.dumps(record.rounded(results), indent=1) + "\n")
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
    chosen = [entry for entry in CASES if case.lower() in entry.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"expected part of one of {[entry.name for entry in CASES]}, got {case!r}")
    return chosen


def _run(
    console: Console,
    session: record.Session,
    chosen: list[Case],
    providers: list[Provider],
    results: dict[str, Any],
    swept: dict[str, tuple[Case, ...]],
) -> None:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(chosen) + sum(map(len, swept.values())))

        def tell(words: str) -> None:
            progress.update(task, description=words)

        for entry in chosen:
            if _is_left_out(session, entry, results):
                continue
            found = record.run_case(session, entry, providers, tell)
            results["cases"].append(found)
            progress.advance(task)
            console.print(report.case_table(found))
            console.print("\n".join(report.skipped_lines(found)), highlight=False, markup=False)
        few = [provider for provider in providers if provider.name in SWEPT]
        brief = session._replace(seconds=session.seconds / 5, min_calls=_QUICK_CALLS)
        # One point of each panel in turn: a run that ends early has drawn something in all of them.
        turns = itertools.zip_longest(*([(size, entry) for entry in cases] for size, cases in swept.items()))
        for size, entry in filter(None, itertools.chain.from_iterable(turns)):
            if _is_left_out(session, entry, results):
                continue
            found = record.run_case(brief, entry, few, tell, footprints=False)
            results.setdefault("sweeps", {}).setdefault(size, []).append(found)
            progress.advance(task)


def _is_left_out(session: record.Session, case: Case, results: dict[str, Any]) -> bool:
    if session.is_late():
        results["left_out"].append(case.name)
    return session.is_late()


def _finish(console: Console, session: record.Session, results: dict[str, Any]) -> None:
    console.print(report.EXPLANATION, style="dim")
    for line in report.gate_lines(results["cases"]):
        console.print(line, highlight=False, markup=False)
    if results["left_out"]:
        console.print(f"left out for want of time: {', '.join(results['left_out'])}", highlight=False)
    warning = session.bystanders.warning()
    results["environment"]["other_cores_busy"] = session.bystanders.cores()
    results["environment"]["warning"] = warning
    if warning:
        clock = results["environment"]["clock"]
        console.print(f"Not a quiet machine: {warning} ({clock} is shown).", style="bold", highlight=False)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(bench)

if __name__ == "__main__":
    app()
