"""Language models to generate with: the embedded default, a local folder or a hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specker import embedded
from specker.embedded import EMBEDDED_NAME, Report
from specker.packages import ModelUnavailableError, require

EMBEDDED_SKIPPED_LAYERS: tuple[int, ...] = (3, 17)
"""The two of its 30 layers that a layer-skipping draft misses least: 77 % of its sampled drafts are accepted."""


class LoadedModel(NamedTuple):
    """A causal language model in evaluation mode, its tokenizer and a name to print.

    `model` is a transformers `PreTrainedModel`, `tokenizer` a `PreTrainedTokenizerBase`.
    """

    model: Any
    tokenizer: Any
    name: str


def load(name_or_path: str, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> LoadedModel:
    """Load a causal language model and its tokenizer from a local folder or by its hub id.

    Args:
        name_or_path: a folder that holds `config.json`, or an id such as `organisation/model`.
        dtype: a floating-point dtype for the weights.
        device: where the weights go.

    Raises:
        ModelUnavailableError: transformers is missing, or there is no such model.

    Example:
        >>> load("no/such/folder")
        Traceback (most recent call last):
        specker.packages.ModelUnavailableError: model no/such/folder: expected a local folder with config.json or ...
    """
    transformers = require("transformers")
    # A hub id has at most one slash; anything longer, or that starts like a path, can only be a folder.
    looks_like_path = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    folder = Path(name_or_path).expanduser()
    if looks_like_path and not (folder / "config.json").is_file():
        raise ModelUnavailableError(f"model {name_or_path}: expected a local folder with config.json or a hub id")
    source = str(folder) if folder.is_dir() else name_or_path
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        # transformers explains at length; its first line says what is wrong.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailableError(f"model {name_or_path}: cannot be loaded: {reason}") from error
    return LoadedModel(model.to(device).eval(), tokenizer, folder.name if folder.is_dir() else name_or_path)


def load_embedded(
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
    report: Report | None = None,
) -> LoadedModel:
    """Load SmolLM2-135M-Instruct from the cache, filling the cache from the installed GGUF file where needed.

    Args:
        dtype: a floating-point dtype; the cached weights are bfloat16 and are widened from there.
        device: where the weights go.
        cache_dir: the folder for caches, by default `embedded.cache_home()`.
        report: told how far the conversion is; not called where the cache serves.

    Raises:
        ModelUnavailableError: a package is missing, or the cache cannot be written.

    Guarantees: the cache appears under its name only when complete, and each of its files is compared with its
    SHA-256 before it is used, so neither an interruption nor damage on the disk can reach the model.

    Example:
        >>> tokens = load_embedded().model.config.vocab_size  # doctest: +SKIP
        49152
    """
    require("transformers")
    file = embedded.gguf_file()
    folder = (embedded.cache_home() if cache_dir is None else Path(cache_dir)) / embedded.cache_name(file)
    if not embedded.is_intact(folder):
        embedded.convert(file, folder, report or (lambda _share, _stage: None))
    return load(str(folder), dtype=dtype, device=device)._replace(name=EMBEDDED_NAME)


def default_skipped_layers(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the layers a layer-skipping draft leaves out: measured for the embedded model, else a few in the middle.

    Example:
        >>> default_skipped_layers(load_embedded())  # doctest: +SKIP
        (3, 17)
    """
    if loaded.name == EMBEDDED_NAME:
        return EMBEDDED_SKIPPED_LAYERS
    # One layer in 15, as for the embedded model: more cost more acceptance than they save time.
    num_layers = loaded.model.config.get_text_config().num_hidden_layers
    num_skipped = max(num_layers // 15, 1)
    first = (num_layers - num_skipped) // 2
    return tuple(range(first, first + num_skipped))


def hide_progress_bars() -> None:
    """Keep transformers from drawing its own bars, for a caller that draws one.

    Example:
        >>> hide_progress_bars()  # doctest: +SKIP
    """
    require("transformers.utils.logging").disable_progress_bar()
