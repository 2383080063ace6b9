"""The command `generate`: stream a text decoded speculatively, then compare its speed with plain decoding."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specker import generation, generation_report, models
from specker.cli_options import writable
from specker.cli_report import Difference, Plain, TokenStream, first_difference, print_report
from specker.packages import ModelUnavailableError
from specker.prompts import end_tokens
from specker.sampling import GREEDY_TEMPERATURE

DEMO_PROMPT = """Repeat this text word for word:

The lighthouse keeper climbed the stairs at dusk, as he had done every evening for thirty years. He lit the lamp, \
wound the clock and wrote the weather into the book: wind from the west, rain before morning. Then he sat down by the \
window and watched the boats come home."""
"""Asks for a text that the prompt holds, where copying from the prompt saves target passes."""

_WARM_UP_TOKENS = 8
# What a wrong model, parameter or input raises; anything else is a fault of specker and shows its traceback.
_FAULTS = (ModelUnavailableError, NotImplementedError, TypeError, ValueError)


class Dtype(enum.Enum):
    """Dtypes of the models' weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", help="What to continue; several run as one batch.", show_default="a text to repeat"
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="Local folder or hub id of the target.", show_default="the embedded model")
    ] = "",
    draft: Annotated[str, typer.Option(help="lookup, layers, or the folder or hub id of a draft model.")] = "lookup",
    gamma: Annotated[str, typer.Option(help="Draft tokens a round; auto lets the cost model choose.")] = "4",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass; 1 keeps all.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest; 0 keeps all.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Where generation stops at the latest.")] = 128,
    skip_layers: Annotated[
        str, typer.Option(help="Layers that --draft layers leaves out, as in 3,17.", show_default="a few in the middle")
    ] = "",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the weights.")] = Dtype.BFLOAT16,
    device: Annotated[str, typer.Option(help="Where to run.", show_default="a GPU if there is one")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads on the CPU.", show_default="all cores")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=writable, help="Write text, counters and times here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(callback=writable, help="Draw acceptance and tokens a pass against prediction.")
    ] = None,
) -> None:
    """Generate text speculatively, show which tokens were drafted, and measure the speed against plain decoding."""
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    chosen_gamma = _gamma(gamma)
    texts = prompts or [DEMO_PROMPT]
    stream: TokenStream | None = None
    try:
        if plot is not None:
            generation_report.require_matplotlib(plot)
        if threads:
            torch.set_num_threads(threads)
        loaded = _load_target(target, dtype, device, console)
        chosen_draft, draft_name = _choose_draft(draft, skip_layers, loaded, dtype)
        input_ids, attention_mask = _encode(loaded, texts, raw)
        parameters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        where = f"{loaded.model.dtype}, {loaded.model.device}"
        settings = f"gamma {gamma}, temperature {temperature:g}, seed {seed}, {where}"
        console.print(f"target {loaded.name}, draft {draft_name}, {settings}".replace("torch.", ""), markup=False)
        options: dict[str, Any] = {"attention_mask": attention_mask, "gamma": chosen_gamma, "seed": seed, **parameters}
        arguments = (loaded.model, chosen_draft, input_ids)
        warm_up = min(_WARM_UP_TOKENS, max_new_tokens)
        generation.generate(*arguments, max_new_tokens=warm_up, on_tokens=None, **options)
        stream = TokenStream(loaded.tokenizer, console, texts)
        result = generation.generate(*arguments, max_new_tokens=max_new_tokens, on_tokens=stream, **options)
        stream.finish()
        console.print("\n")
        # No spinner here: it would take time from what is measured.
        console.print("plain decoding, for comparison ...", style="dim")
        plain = _decode_plain(loaded, input_ids, attention_mask, max_new_tokens, parameters)
        difference = _first_difference(loaded.model, input_ids, attention_mask, result.token_ids, plain)
        print_report(console, result.stats, plain, difference, greedy=_is_greedy(temperature, top_p))
        if json_file is not None:
            settings_used = {
                "target": loaded.name, "draft": draft_name, "gamma": gamma, "seed": seed, "dtype": dtype.value,
                "max_new_tokens": max_new_tokens, "device": str(loaded.model.device),
                "threads": torch.get_num_threads(), **parameters,
            }  # fmt: skip
            _write_json(json_file, settings_used, texts, loaded.tokenizer, result, plain)
        if plot is not None:
            generation_report.draw_generation(result.stats, plot)
    except KeyboardInterrupt:
        if stream is not None:
            stream.finish()
        counted = f": {stream.counters()}" if stream is not None else ""
        errors.print(f"\ninterrupted{counted}", markup=False)
        raise typer.Exit(130) from None
    except _FAULTS as error:
        errors.print(f"Error: {error}", markup=False, style="bold red")
        raise typer.Exit(1) from error


def _write_json(
    file: Path,
    settings: dict[str, Any],
    prompts: list[str],
    tokenizer: Any,
    result: generation.GenerationResult,
    plain: Plain,
) -> None:
    texts = tokenizer.batch_decode(result.token_ids, skip_special_tokens=True)
    compared = {"emitted": plain.emitted, "seconds": plain.seconds}
    fields = generation_report.record(result.stats, **settings, prompts=prompts, texts=texts, plain=compared)
    file.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _gamma(text: str) -> generation.Gamma:
    if text == "auto":
        return "auto"
    if not text.isdigit():
        raise typer.BadParameter(f"--gamma: expected a number >= 0 or auto, got {text}")
    return int(text)


def _load_target(name: str, dtype: Dtype, device: str, console: Console) -> models.LoadedModel:
    place = _device(device)
    models.hide_progress_bars()
    if name:
        with console.status(f"loading {name}"):
            return models.load(name, dtype=getattr(torch, dtype.value), device=place)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading the embedded model", total=1.0)
        return models.load_embedded(
            dtype=getattr(torch, dtype.value),
            device=place,
            report=lambda share, stage: progress.update(task, completed=share, description=f"converting once: {stage}"),
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device: expected a device such as cpu or cuda:0, got {name}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a device that is present, got {name}; specker doctor lists them")
    return device


def _is_greedy(temperature: float, top_p: float) -> bool:
    return temperature < GREEDY_TEMPERATURE or top_p <= 0


def _choose_draft(
    draft: str, skip_layers: str, loaded: models.LoadedModel, dtype: Dtype
) -> tuple[generation.Draft, str]:
    if skip_layers and draft != "layers":
        raise ValueError(f"--skip-layers: expected --draft layers with it, got --draft {draft}")
    if draft == "lookup":
        return generation.PromptLookup(), "prompt lookup"
    if draft == "layers":
        layers = _layer_numbers(skip_layers) if skip_layers else models.default_skipped_layers(loaded)
        return generation.SkipLayers(layers), f"the target without its layers {', '.join(map(str, layers))}"
    model = models.load(draft, dtype=getattr(torch, dtype.value), device=loaded.model.device)
    return model.model, model.name


def _layer_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ValueError(f"--skip-layers: expected numbers such as 3,17, got {text}") from error


def _encode(loaded: models.LoadedModel, prompts: list[str], raw: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts as one batch, padded on the left, and its mask."""
    rows = [_encode_one(loaded.tokenizer, prompt, raw) for prompt in prompts]
    length = max(map(len, rows))
    if min(map(len, rows)) == 0:
        raise ValueError("PROMPT: expected a text of at least one token, got an empty one")
    padded = [[0] * (length - len(row)) + row for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    device = loaded.model.device
    return torch.tensor(padded, device=device), torch.tensor(mask, device=device)


def _encode_one(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    if raw or not tokenizer.chat_template:
        encoded = tokenizer(prompt)
    else:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(map(int, encoded["input_ids"]))


def _decode_plain(
    loaded: models.LoadedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_new_tokens: int,
    parameters: dict[str, Any],
) -> Plain:
    """Time transformers' own generate on the same prompts, after a warm-up like that of the speculative run."""
    greedy = _is_greedy(parameters["temperature"], parameters["top_p"])
    arguments: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, **parameters}
    # Some models ask for a penalty in their generation config; neither side of the comparison applies one.
    arguments["repetition_penalty"] = 1.0
    arguments["attention_mask"] = attention_mask
    eos_token_ids = end_tokens(loaded.model, None)
    # transformers wants a padding token even for a single sequence, and warns where it has to choose one.
    arguments["pad_token_id"] = min(eos_token_ids, default=0)
    loaded.model.generate(input_ids, max_new_tokens=min(_WARM_UP_TOKENS, max_new_tokens), **arguments)
    return Plain.measure(
        lambda: loaded.model.generate(input_ids, max_new_tokens=max_new_tokens, **arguments), input_ids, eos_token_ids
    )


def _first_difference(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_ids: list[torch.Tensor], plain: Plain
) -> Difference | None:
    """Return how the first text that differs from plain decoding does, None where all are equal."""
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        difference = first_difference(model, ids[mask.bool()][None], token_ids[row], plain.token_ids[row])
        if difference is not None:
            return difference
    return None
