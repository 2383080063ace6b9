"""Time whole texts, `python -m bench.bench_generate` from the repository root: plain, assisted and specker's decoding.

Every row decodes the same eight prompts to the same number of tokens: one by one, in fours, and all at once. The
decoders take turns at each group of prompts, so that all of them see the same machine; a group's time is its median
over the repetitions, and a row's the sum over its groups. With one thread it is the processor's time, which other
processes disturb less than the wall clock's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specker import models

from .decoders import GAMMA, MODES, PROMPTS, Decoded, Pair, Prompts
from .machine import Bystanders, environment

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

BATCHES = (1, 4, 8)
DRAFTS = ("lookup", "layers")
Row = tuple[str, str, int]
_WARM_UP_TOKENS = 6


@app.command()
def main(
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens each prompt is continued by.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="How often each group of prompts is decoded.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch; 1 reports processor time.")] = 1,
    target: Annotated[str, typer.Option(help="Folder or hub id.", show_default="the embedded model")] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bfloat16",
    row: Annotated[str, typer.Option(help="Run the rows whose name contains this, as in 'greedy lookup 1'.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Print tokens per second for every mode, draft and batch, and specker's against the others'."""
    torch.set_num_threads(threads)
    console = Console(width=120)
    models.hide_progress_bars()
    kind = getattr(torch, dtype)
    loaded = models.load(target, dtype=kind) if target else models.load_embedded(dtype=kind)
    skipped = models.default_skipped_layers(loaded)
    pair, prompts = Pair(loaded.model, skipped), encode(loaded.tokenizer)
    rows = [
        (mode, draft, batch)
        for mode in MODES
        for draft in DRAFTS
        for batch in BATCHES
        if row in f"{mode} {draft} {batch}"
    ]
    if not rows:
        raise typer.BadParameter(f"expected part of a row such as 'greedy lookup 1', got {row!r}")
    clock = time.process_time if threads == 1 else time.perf_counter
    settings = {
        "command": "python -m bench.bench_generate "
        f"--new-tokens {new_tokens} --repeats {repeats} --threads {threads}",
        "model": loaded.name, "dtype": dtype, "gamma": GAMMA, "skipped_layers": list(skipped),
        "clock": "processor" if threads == 1 else "wall", "modes": MODES,
    }  # fmt: skip
    measured: dict[Row, dict[str, dict[str, Any]]] = {}
    bystanders = Bystanders()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(rows) * repeats)
        for entry in rows:
            with bystanders:
                measured[entry] = measure(
                    pair, prompts, entry, new_tokens, repeats, clock, lambda: progress.advance(task)
                )
            # After every row, so that an interruption costs one.
            if json_file is not None:
                write(json_file, {**settings, "others_cores": bystanders.cores()}, measured, threads)
    console.print(table(measured))
    console.print(verdicts(measured), markup=False)
    console.print(bystanders.warning())


def write(file: Path, settings: dict[str, Any], measured: dict[Row, dict[str, dict[str, Any]]], threads: int) -> None:
    """Write the figures measured so far."""
    figures = [
        {"mode": mode, "draft": draft, "batch": batch, "decoders": decoders}
        for (mode, draft, batch), decoders in measured.items()
    ]
    written = {"environment": environment(torch.device("cpu"), threads), **settings, "rows": figures}
    file.write_text(json.dumps(written, indent=1) + "\n")


def encode(tokenizer: Any) -> Prompts:
    """Return the prompts as one batch, each as a user's message where the tokenizer has a chat template."""
    encoded = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        chat = tokenizer.chat_template is not None
        encoded.append(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            if chat
            else tokenizer(prompt)["input_ids"]
        )
    length = max(map(len, encoded))
    return Prompts(
        torch.tensor([[0] * (length - len(ids)) + list(ids) for ids in encoded]),
        torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in encoded]),
    )


def measure(
    pair: Pair, prompts: Prompts, row: Row, new_tokens: int, repeats: int, clock: Any, tell: Any
) -> dict[str, dict[str, Any]]:
    """Return the figures of each decoder of a row."""
    mode, draft, batch = row
    decoders = pair.decoders(mode, draft, batch)
    groups = [prompts.only(slice(start, start + batch)) for start in range(0, len(PROMPTS), batch)]
    for decode in decoders.values():
        decode(groups[0], _WARM_UP_TOKENS, 0)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    decoded: dict[tuple[str, int], Decoded] = {}
    for _ in range(repeats):
        for number, group in enumerate(groups):
            for name, decode in decoders.items():
                start = clock()
                # The same seed in every repetition: what differs between them is the machine alone.
                decoded[name, number] = decode(group, new_tokens, number)
                seconds[name, number].append(clock() - start)
        tell()
    numbers = range(len(groups))
    return {
        name: figures(
            [seconds[name, number] for number in numbers],
            [decoded[name, number] for number in numbers],
            [decoded["plain", number] for number in numbers],
        )
        for name in decoders
    }


def figures(seconds: list[list[float]], decoded: list[Decoded], plain: list[Decoded]) -> dict[str, Any]:
    """Return speed, latency and draft counts of one decoder over all groups of prompts."""
    tokens = sum(len(text) for group in decoded for text in group.token_ids)
    total = sum(map(statistics.median, seconds))
    longest = sum(max(map(len, group.token_ids)) for group in decoded)
    known = all(group.drafted is not None for group in decoded)
    equal = sum(
        ours == theirs for mine, others in zip(decoded, plain, strict=True)
        for ours, theirs in zip(mine.token_ids, others.token_ids, strict=True)
    )  # fmt: skip
    return {
        "tokens_per_second": round(tokens / total, 3),
        "lowest": round(tokens / sum(map(max, seconds)), 3),
        "highest": round(tokens / sum(map(min, seconds)), 3),
        "milliseconds_per_token_of_a_text": round(1e3 * total / longest, 3),
        "tokens": tokens,
        "target_passes": sum(group.target_passes for group in decoded),
        "drafted": sum(group.drafted or 0 for group in decoded) if known else None,
        "accepted": sum(group.accepted or 0 for group in decoded) if known else None,
        "texts_equal_to_plain": equal,
    }


def table(measured: dict[Row, dict[str, dict[str, Any]]]) -> Table:
    """Return the table of all rows."""
    result = Table(title="tokens per second over eight prompts", title_justify="left")
    for heading in ("mode", "draft", "batch", "decoder", "tokens/s", "range", "ms/token", "passes", "accepted/drafted"):
        result.add_column(heading, justify="left" if heading in ("mode", "draft", "decoder") else "right")
    for (mode, draft, batch), decoders in measured.items():
        for name, values in decoders.items():
            counts = "" if values["drafted"] is None else f"{values['accepted']}/{values['drafted']}"
            result.add_row(
                mode, draft, str(batch), name, f"{values['tokens_per_second']:.1f}",
                f"{values['lowest']:.1f}-{values['highest']:.1f}", f"{values['milliseconds_per_token_of_a_text']:.1f}",
                str(values["target_passes"]), counts,
            )  # fmt: skip
        result.add_section()
    return result


def verdicts(measured: dict[Row, dict[str, dict[str, Any]]]) -> str:
    """Return how specker compares: with assisted generation one by one, and a batch with single runs in sequence."""
    lines = []
    for (mode, draft, batch), decoders in measured.items():
        ours = decoders["specker"]["tokens_per_second"]
        if batch == 1:
            ratio = ours / decoders["assisted"]["tokens_per_second"]
            lines.append(f"{mode}, {draft}: specker is {ratio:.2f} times as fast as assisted generation")
        elif (mode, draft, 1) in measured:
            ratio = ours / measured[mode, draft, 1]["specker"]["tokens_per_second"]
            lines.append(f"{mode}, {draft}: a batch of {batch} is {ratio:.2f} times as fast as single runs in sequence")
    return "\n".join(lines)


if __name__ == "__main__":
    app()
