"""The generated code that is shipped, kernel by kernel, and a table of what it costs: `python -m bench.codegen`.

Nothing here needs a GPU or its driver: the kernels are compiled for GPUs that need not be there. Every kernel that a
round launches is listed for float32 and bfloat16 at a vocabulary of 128,256; those that stream the vocabulary also at
one that 16 does not divide, with rows behind one another (so that most of them start at no multiple of 16 bytes) and
with rows padded to one.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specker.kernels import contract, variants
from specker.kernels.rounds import KERNELS as LAUNCHED

VOCAB = 128_256
ODD_VOCAB = 128_257
STREAMING = ("row_statistics", "filter_candidates", "filter_thresholds", "residual_mass")
MAX_INSTRUCTIONS = 12.0
"""Instructions a logit of bfloat16: an H200 that reads 4.3 TB/s has issue slots for 14, an MI300X at 5.3 for 15."""
MAX_SPECIAL = 1.1
"""Special-function operations a logit."""
MAX_BARRIERS = 3
"""Barriers a trip."""
# An H200: issue slots a second of all its multiprocessors (132 of 4 schedulers, 32 lanes, 1.755 GHz), those of the
# special-function units (16 a multiprocessor), and bytes a second that its memory has been measured to read.
ISSUE_RATE = 132 * 4 * 32 * 1.755e9
SPECIAL_RATE = 132 * 16 * 1.755e9
READ_RATE = 4.3e12


class Kernel(NamedTuple):
    """One kernel as it is compiled for a launch."""

    name: str
    """Unique."""
    function: Any
    """The `@triton.jit` function that is launched."""
    signature: dict[str, str]
    """Argument -> Triton type, in the kernel's order."""
    constexprs: dict[str, Any]
    """Compile-time arguments as launched; None is an input that does not exist."""
    divisible: tuple[str, ...]
    """Arguments that the launch makes divisible by 16: none, as none is specialised; `ALIGNED` says it of rows."""
    elements: int
    """Logits that one program reads in one trip of its loop over the vocabulary; 0 without such a loop."""
    options: dict[str, Any]
    """Launch options."""


def _elements(kernel: Any, dtype: torch.dtype, constexprs: dict[str, Any], rows: int) -> int:
    if kernel.__name__ not in STREAMING:
        return 0
    if kernel.__name__ == "filter_thresholds":
        return int(contract.SEARCH_SHARDS.value * constexprs["SHARD"] * 2 // dtype.itemsize)
    return int(rows * contract.TILE_SHARDS.value * constexprs["SHARD"])


def _entry(
    kernel: Any, dtype: torch.dtype, vocab: int, label: str, *, draft: bool = True, filtered: bool = False, **flags: Any
) -> Kernel:
    absent = variants.PLAIN_ABSENT - (variants.FILTER_INPUTS if filtered else frozenset())
    told = variants.variant(kernel, vocab, dtype, dtype if draft else None, absent, **flags)
    rows = 2 if kernel.__name__ == "residual_mass" and draft else 1
    return Kernel(
        f"{told.name}_{vocab}{label}",
        told.function,
        told.signature,
        told.constexprs,
        (),
        _elements(kernel, dtype, told.constexprs, rows),
        told.options,
    )


def _kernels() -> list[Kernel]:
    entries = []
    for dtype in (torch.float32, torch.bfloat16):
        for kernel in LAUNCHED:
            name = kernel.__name__
            filters = name in ("filter_candidates", "filter_thresholds")
            entries.append(_entry(kernel, dtype, VOCAB, "", filtered=filters))
            if name in STREAMING:
                entries.append(_entry(kernel, dtype, ODD_VOCAB, "", filtered=filters, aligned=False))
                entries.append(_entry(kernel, dtype, ODD_VOCAB, "_padded", filtered=filters))
            if name in ("residual_mass", "emit_tokens"):
                entries.append(_entry(kernel, dtype, VOCAB, "_filtered", filtered=True))
            if name in ("row_statistics", "emit_tokens"):
                entries.append(_entry(kernel, dtype, VOCAB, "_point_mass", draft=False, excludes=True))
    return entries


KERNELS = _kernels()
"""Every kernel that is launched, without biases, masks and reduced vocabularies."""
ADJUSTED = [
    Kernel(*told[:4], (), 0, told.options)
    for dtype in (torch.float32, torch.bfloat16)
    for told in variants.adjusted_variants(VOCAB, dtype)
]
"""The kernels of rounds with biases and masks on target and draft rows and a reduced draft vocabulary."""


_HEADINGS = ("kernel", "registers", "shared B", "instructions", "special", "loads", "barriers", "spills", "bound")


def bound(code: Any, entry: Kernel) -> str:
    """Return what limits a loop over the vocabulary on an H200, with the share of the others' time."""
    loop = code.main_loop()
    if not entry.elements or loop is None:
        return "latency"
    threads = code.threads / entry.elements
    size = 4 if "fp32" in entry.name else 2
    times = {
        "memory": size / READ_RATE,
        "instructions": loop.instructions * threads / ISSUE_RATE,
        "special functions": loop.special * threads / SPECIAL_RATE,
    }
    slowest = max(times, key=lambda name: times[name])
    return f"{slowest} ({times[slowest] / times['memory']:.2f} of memory's time)"


def table(target: str, entries: list[Kernel]) -> Table:
    """Return the table of one GPU, compiling what no cache holds: a number for each loop over whole tiles."""
    from . import gpu_code

    result = Table(title=f"{target}, a logit", title_justify="left")
    for heading in _HEADINGS:
        result.add_column(heading, justify="left" if heading in ("kernel", "bound") else "right")
    for entry in track(entries, description=target, transient=True):
        code = gpu_code.inspect_kernel(
            entry.function, entry.signature, entry.constexprs, entry.divisible, entry.options, target
        )
        loops = code.tile_loops() if entry.elements else []
        share = code.threads / entry.elements if entry.elements else 0.0
        widths = [f"{count}x{width}" for loop in loops[:1] for width, count in sorted(loop.load_widths.items())]
        result.add_row(
            entry.name,
            str(code.registers),
            str(code.shared),
            " ".join(f"{loop.instructions * share:.1f}" for loop in loops) or "-",
            " ".join(f"{loop.special * share:.1f}" for loop in loops) or "-",
            " ".join(widths) or "-",
            " ".join(str(loop.barriers) for loop in loops) or "-",
            str(code.spill_bytes),
            bound(code, entry),
        )
    return result


def main(
    target: Annotated[list[str] | None, typer.Option(help="sm_80, sm_90, sm_100 or gfx942; all by default.")] = None,
    name: Annotated[str, typer.Option(help="Only the kernels whose name contains this.")] = "",
) -> None:
    """Print the table of every kernel for the GPUs asked for."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise typer.BadParameter("TRITON_INTERPRET: expected it unset, the interpreter compiles nothing")
    console = Console(width=200)
    chosen = [entry for entry in [*KERNELS, *ADJUSTED] if name in entry.name]
    for each in target or ["sm_80", "sm_90", "sm_100", "gfx942"]:
        console.print(table(each, chosen))


if __name__ == "__main__":
    typer.run(main)
