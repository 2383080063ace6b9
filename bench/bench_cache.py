"""Time what sequences of different lengths cost, `python -m bench.bench_cache`: slots by position against the others.

One pass of the target over a block for each of eight sequences, behind about 200 tokens each. *equal* is transformers'
own cache with sequences of equal length, where nothing has to be done; *slots, equal* and *slots, ragged* are this
package's; *realigned* is transformers' cache with every sequence shifted, after every pass, to end where the longest
does.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from specker import models
from specker.cached_model import CachedModel
from specker.embedded import EMBEDDED_NAME

from .machine import environment
from .timing import summary

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_LENGTH = 200


@app.command()
def main(
    batch: Annotated[int, typer.Option(min=2, help="Sequences.")] = 8,
    gamma: Annotated[int, typer.Option(min=1, help="Draft tokens of a block.")] = 4,
    repeats: Annotated[int, typer.Option(min=5, help="Passes of each kind.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; 1 reports processor time.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print the milliseconds of a pass for each way to keep a cache."""
    torch.set_num_threads(threads)
    models.hide_progress_bars()
    model = models.load_embedded().model
    block = torch.randint(100, 40_000, (batch, gamma + 1), generator=torch.Generator().manual_seed(0))
    ways = {
        "equal": equal(model, block),
        "realigned": realigned(model, block),
        "slots, equal": slots(model, block, [_LENGTH] * batch),
        "slots, ragged": slots(model, block, [_LENGTH - 3 * row for row in range(batch)]),
    }
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, run in ways.items():
            start = clock()
            run()
            # The first two passes warm up.
            seconds[name] += [clock() - start] if repeat >= 2 else []
    timings = {name: summary(values) for name, values in seconds.items()}
    table = Table(
        "cache", "median ms", "10-90 % ms", "against equal", title=f"{batch} sequences, {gamma + 1} tokens each"
    )
    for name, timing in timings.items():
        spread = f"{timing.low * 1e3:.1f}-{timing.high * 1e3:.1f}"
        table.add_row(name, f"{timing.median * 1e3:.1f}", spread, f"{timing.median / timings['equal'].median:.2f}")
    Console().print(table)
    if json_file is not None:
        figures = {name: timing._asdict() for name, timing in timings.items()}
        settings = {"batch": batch, "gamma": gamma, "length": _LENGTH, "model": EMBEDDED_NAME}
        record = {"environment": environment(torch.device("cpu"), threads), **settings, "seconds": figures}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def slots(model: Any, block: torch.Tensor, lengths: list[int]) -> Callable[[], None]:
    """Return a pass with specker's cache, and the rejection of all it read."""
    cached = CachedModel(model, "target", len(lengths))
    with torch.inference_mode():
        cached.advance([[7] * length for length in lengths])

    @torch.inference_mode()
    def run() -> None:
        cached.advance([[7]] * len(lengths), block[:, 1:], num_logits=block.shape[1])
        cached.keep(lengths)

    return run


def equal(model: Any, block: torch.Tensor) -> Callable[[], None]:
    """Return a pass with transformers' cache over sequences of equal length, and the rejection of all it read."""
    read, cache = _reader(model, len(block))

    @torch.inference_mode()
    def run() -> None:
        read(block)
        cache.crop(-block.shape[1])

    return run


def realigned(model: Any, block: torch.Tensor) -> Callable[[], None]:
    """Return a pass with transformers' cache, and the shift of every sequence by what it rejected: 0 to gamma."""
    read, cache = _reader(model, len(block))
    width = block.shape[1]
    rejected = [row % width for row in range(len(block))]
    columns = torch.arange(_LENGTH + width)
    # Row r moves right by what it rejected, so that all end together; what comes in on the left is masked.
    sources = torch.stack([(columns - count).clamp(min=0) for count in rejected])[:, None, :, None]
    mask = torch.ones(len(block), _LENGTH + width, dtype=torch.int64)
    for row, count in enumerate(rejected):
        mask[row, :count] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]

    @torch.inference_mode()
    def run() -> None:
        read(block, attention_mask=mask, position_ids=positions)
        for layer in cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)
                setattr(layer, name, states.gather(2, sources.expand_as(states)))
        cache.crop(-width)

    return run


def _reader(model: Any, batch: int) -> tuple[Callable[..., Any], Any]:
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def read(token_ids: torch.Tensor, **options: Any) -> Any:
        options[name] = cache
        return model(input_ids=token_ids, use_cache=True, logits_to_keep=token_ids.shape[1], **options)

    with torch.inference_mode():
        read(torch.full((batch, _LENGTH), 7))
    return read, cache


if __name__ == "__main__":
    app()
