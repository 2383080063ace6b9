"""Checks of command-line options that can be made before minutes are spent on what they ask for."""

from __future__ import annotations

from pathlib import Path

import typer


def writable(file: Path | None) -> Path | None:
    """Return the file if its folder exists; the callback of options that name an output.

    Raises:
        typer.BadParameter: there is no such folder.

    Example:
        >>> writable(Path("figures.json"))
        PosixPath('figures.json')
    """
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"expected a file in a folder that exists, got {file}")
    return file
