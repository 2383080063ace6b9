"""Time a verify round against eager PyTorch: `python -m bench.bench_verify` from the repository root."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specker

from .cases import CASES, Case, Inputs, make_inputs
from .providers import FILTERED, PLAIN, providers
from .timing import Timing, measure

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    case: Annotated[str | None, typer.Option(help="Run the cases whose name contains this.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of measuring a case.")] = 10.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; 1 reports processor time.")] = 1,
    compiled: Annotated[bool, typer.Option(help="Include torch.compile of the eager round.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print the time of a round for every case and provider, with the ratio to eager PyTorch."""
    torch.set_num_threads(threads)
    console = Console()
    chosen = [entry for entry in CASES if case is None or case in entry.name]
    if not chosen:
        raise typer.BadParameter(f"expected part of one of {[entry.name for entry in CASES]}, got {case!r}")
    console.print(" ".join(f"{key}={value}" for key, value in environment(threads).items()))
    clock = time.process_time if threads == 1 else time.perf_counter
    records = []
    for entry in track(chosen, description="measuring", console=console, transient=True):
        plain = make_inputs(entry, PLAIN, torch.device("cpu"))
        filtered = make_inputs(entry, FILTERED, torch.device("cpu"))
        check_against_reference(entry, plain)
        timings = measure(providers(plain, filtered, compiled=compiled), seconds=seconds, clock=clock)
        records.append({"case": entry.name, "timings": {name: timing._asdict() for name, timing in timings.items()}})
        console.print(table(entry, timings))
    if json_file is not None:
        json_file.write_text(json.dumps({"environment": environment(threads), "cases": records}, indent=1) + "\n")


def environment(threads: int) -> dict[str, Any]:
    """Return versions, processor and load, without which a figure says little."""
    return {
        "specker": specker.__version__,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def check_against_reference(case: Case, inputs: Inputs) -> None:
    """Refuse to time a wrong answer: equal tokens with the float64 reference on the first sequences of the case."""
    few = slice(0, 2)
    rows = (inputs.draft_token_ids[few], inputs.target_logits[few], inputs.draft_logits[few])
    got = specker.verify(*rows, uniforms=inputs.uniforms[few])
    with specker.backend("reference"):
        wanted = specker.verify(*rows, uniforms=inputs.uniforms[few])
    if not torch.equal(got.token_ids, wanted.token_ids):
        raise SystemExit(f"{case.name}: expected the reference's {wanted.token_ids}, got {got.token_ids}")


def table(case: Case, timings: dict[str, Timing]) -> Table:
    """Return the table of one case."""
    dtype = str(case.dtype).removeprefix("torch.")
    result = Table(title=f"{case.name}: {case.batch} x {case.gamma} x {case.vocab:,} {dtype}", title_justify="left")
    for heading in ("provider", "median ms", "10-90 % ms", "eager / this", "calls"):
        result.add_column(heading, justify="left" if heading == "provider" else "right")
    for name, timing in timings.items():
        base = timings["smart eager, filters" if "filters" in name else "eager"]
        result.add_row(
            name,
            f"{timing.median * 1e3:.3f}",
            f"{timing.low * 1e3:.3f}-{timing.high * 1e3:.3f}",
            f"{base.median / timing.median:.1f}x",
            str(timing.calls),
        )
    return result


if __name__ == "__main__":
    app()
