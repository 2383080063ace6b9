"""The commands `figures` and `measure`: the article's numbers, and its last question put to two real models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from specker.generation import Draft
    from specker.measure import Measurement
    from specker.models import LoadedModel
    from specker.theory import Statement

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "List the steps to bake a simple loaf of bread.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
)
"""What `measure` continues where no file is given."""


def register(app: typer.Typer) -> None:
    """Add the commands to app.

    Example:
        >>> app = typer.Typer()
        >>> register(app)
        >>> [command.callback.__name__ for command in app.registered_commands]
        ['figures', 'measure']
    """
    app.command()(figures)
    app.command()(measure)


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


def measure(
    target: Annotated[
        str, typer.Argument(help="Local folder or hub id of the target; embedded is the built-in model.")
    ] = "embedded",
    draft: Annotated[str, typer.Argument(help="layers, lookup, or the folder or hub id of a draft model.")] = "layers",
    prompts: Annotated[
        Path | None, typer.Argument(help="Text file, one prompt a line.", show_default="four short prompts")
    ] = None,
    gammas: Annotated[str, typer.Option(help="Draft tokens a round to measure.")] = "1,2,4,6",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass; 1 keeps all.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens a prompt is continued by.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
) -> None:
    """Measure overlap and costs of a pair of models; compare the predicted speed-up with the measured one."""
    from specker import measure as measuring
    from specker.packages import ModelUnavailableError
    from specker.sampling import Sampling

    console = Console(highlight=False)
    try:
        numbers = _gammas(gammas)
        lines = PROMPTS if prompts is None else prompts.read_text(encoding="utf-8").splitlines()
        with console.status("loading"):
            loaded, chosen, name = _load_pair(target, draft, dtype, device)
        encoded = [_encode(loaded, line) for line in lines if line.strip()]
        console.print(
            f"target {loaded.name}, draft {name}, temperature {temperature:g}, {dtype}, {device}, "
            f"{len(encoded)} prompts, {max_new_tokens} new tokens each",
            markup=False,
        )
        with console.status("measuring") as status:
            found = measuring.measure(
                loaded.model,
                chosen,
                encoded,
                gammas=numbers,
                max_new_tokens=max_new_tokens,
                sampling=Sampling(temperature, top_k, top_p),
                seed=seed,
                report=lambda stage: status.update(f"measuring: {stage}"),
            )
    except (ModelUnavailableError, OSError, ValueError) as error:
        console.print(f"Error: {error}", markup=False)
        raise typer.Exit(1) from error
    _print_measurement(console, found)


def _gammas(text: str) -> list[int]:
    try:
        return sorted({int(number) for number in text.split(",")})
    except ValueError as error:
        raise ValueError(f"--gammas: expected numbers such as 1,2,4, got {text}") from error


def _load_pair(target: str, draft: str, dtype: str, device: str) -> tuple[LoadedModel, Draft, str]:
    import torch

    from specker import models
    from specker.generation import PromptLookup, SkipLayers

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ValueError(f"--dtype: expected one of {', '.join(dtypes)}, got {dtype}")
    models.hide_progress_bars()
    if target == "embedded":
        loaded = models.load_embedded(dtype=dtypes[dtype], device=device)
    else:
        loaded = models.load(target, dtype=dtypes[dtype], device=device)
    if draft == "lookup":
        return loaded, PromptLookup(), "prompt lookup"
    if draft == "layers":
        layers = models.default_skipped_layers(loaded)
        return loaded, SkipLayers(layers), f"the target without its layers {', '.join(map(str, layers))}"
    drafting = models.load(draft, dtype=dtypes[dtype], device=device)
    return loaded, drafting.model, drafting.name


def _encode(loaded: LoadedModel, prompt: str) -> torch.Tensor:
    import torch

    tokenizer = loaded.tokenizer
    if tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return torch.as_tensor(encoded["input_ids"], dtype=torch.int64, device=loaded.model.device)


def _print_measurement(console: Console, found: Measurement) -> None:
    costs = found.costs
    positions = Table("draft token", title="Acceptance by position, and cost of the pass")
    for heading in ("overlap α", "all accepted up to it", "target pass (plain steps)"):
        positions.add_column(heading, justify="right")
    surviving = 1.0
    positions.add_row("0", "", "", f"{costs.target_cost[0]:.2f}")
    for index, alpha in enumerate(found.alphas):
        surviving *= alpha
        positions.add_row(str(index + 1), f"{alpha:.3f}", f"{surviving:.3f}", f"{costs.target_cost[index + 1]:.2f}")
    console.print(positions)
    console.print(
        f"plain decoding {found.plain.tokens_per_second:.1f} tokens/s; a step {1e3 * costs.target_seconds[0]:.1f} ms, "
        f"a draft token {1e3 * costs.draft_seconds:.2f} ms: c = {costs.draft_cost:.3f}; "
        f"break-even α = {found.break_even:.3f}"
    )
    table = Table("gamma", title="Prediction and measurement")
    for heading in ("tokens a pass: predicted", "measured", "speed-up: predicted", "measured"):
        table.add_column(heading, justify="right")
    for point in found.points:
        table.add_row(
            str(point.gamma), f"{point.predicted_tokens:.2f}", f"{point.measured_tokens:.2f}",
            f"{point.predicted_speedup:.2f}", f"{point.measured_speedup:.2f}",
        )  # fmt: skip
    console.print(table)
    fastest = max(found.points, key=lambda point: point.measured_speedup)
    predicted = f"gamma {found.best.gamma}, {found.best.speedup:.2f} times plain decoding"
    console.print(f"predicted best: {predicted if found.best.gamma else 'no drafting, it does not pay here'}")
    console.print(f"measured best:  gamma {fastest.gamma}, {fastest.measured_speedup:.2f} times plain decoding")
