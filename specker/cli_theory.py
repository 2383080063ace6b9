"""The commands `figures` and `measure`: the article's numbers, and its last question put to two real models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from specker.theory import Statement


def register(app: typer.Typer) -> None:
    """Add the commands to app.

    Example:
        >>> app = typer.Typer()
        >>> register(app)
        >>> [command.callback.__name__ for command in app.registered_commands]
        ['figures']
    """
    app.command()(figures)


def figures(
    out: Annotated[Path, typer.Option(help="Folder for the PNG and SVG files.")] = Path("figures"),
    seed: Annotated[int, typer.Option(help="Seed of every simulation.")] = 1,
) -> None:
    """Draw the article's five figures and check each of its numbers; exit code 1 where one is off."""
    from specker.figures import FiguresUnavailableError, draw_figures
    from specker.theory import check_statements, simulate_article

    console = Console()
    simulation = simulate_article(seed=seed)
    try:
        files = draw_figures(out, simulation)
    except FiguresUnavailableError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from error
    statements = check_statements(simulation)
    console.print(_statement_table(statements))
    console.print(
        "The article takes the normal envelope for valid because 11/√(2π) > 5. It is 4.388; the envelope is valid "
        "because the bracket never exceeds 3.9596."
    )
    console.print(f"{len(files)} files in {out}")
    off = sum(not statement.passed for statement in statements)
    if off:
        console.print(f"{off} of {len(statements)} statements are off", style="bold")
        raise typer.Exit(1)


def _statement_table(statements: list[Statement]) -> Table:
    table = Table("quantity", title="The article's numbers")
    for heading in ("stated", "computed", "simulated"):
        table.add_column(heading, justify="right")
    table.add_column("within tolerance")
    for statement in statements:
        numbers = ("" if number is None else f"{number:.6g}" for number in statement[1:4])
        table.add_row(statement.quantity, *numbers, "yes" if statement.passed else "NO")
    return table
