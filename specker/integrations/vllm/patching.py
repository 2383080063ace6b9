"""Putting the adapters where vLLM looks its own functions up, and taking them out again."""

from __future__ import annotations

import importlib
import inspect
import re
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from specker.integrations.vllm.batch import rejection_sample
from specker.integrations.vllm.slots import rejection_sample_by_slot

OLDEST, NEWEST = (0, 26), (0, 33)
"""The versions (major, minor) served; read were 0.26.0 and 0.33.0. In earlier ones the second runner differs."""


class VersionError(RuntimeError):
    """The vLLM that is installed is none that the adapters were made for; the message says why."""


class _Place(NamedTuple):
    """A module that holds the name `rejection_sample`, and what replaces it there."""

    module: str
    adapter: Callable[..., Any]


_PLACES = (
    _Place("vllm.v1.sample.rejection_sampler", rejection_sample),
    _Place("vllm.v1.worker.gpu.spec_decode.rejection_sampler", rejection_sample_by_slot),
)
_NAME = "rejection_sample"
_lock = threading.Lock()


class Patch:
    """The adapters in vLLM's modules, until `restore` is called or the `with` block ends."""

    def __init__(self, originals: dict[ModuleType, Any], adapters: dict[ModuleType, Any]) -> None:
        self._originals = originals
        self._adapters = adapters

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of vLLM that are patched."""
        return tuple(module.__name__ for module in self._originals)

    def restore(self) -> None:
        """Put vLLM's own functions back; a second call does nothing.

        Raises:
            RuntimeError: somebody else has patched vLLM since; nothing is changed then.
        """
        with _lock:
            for module, adapter in self._adapters.items():
                if module in self._originals and getattr(module, _NAME) is not adapter:
                    raise RuntimeError(
                        f"{module.__name__}.{_NAME}: expected specker's adapter, got {getattr(module, _NAME)!r}: "
                        "restore the later patch first"
                    )
            while self._originals:
                module, original = self._originals.popitem()
                setattr(module, _NAME, original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def patch() -> Patch:
    """Let vLLM verify with specker: both runners, in this process, from now on.

    Call it in every process that samples (vLLM's workers), before or after the engine is built.

    Returns:
        Patch, whose `restore()` undoes it; it is a context manager too.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        VersionError: its version or the parameters of its functions are not those the adapters were made for.
        RuntimeError: it is patched already.

    Guarantees: all or nothing: vLLM is unchanged where this raises.

    Source: `rejection_sample` of vLLM 0.26 to 0.33.

    Example:
        >>> with patch():  # doctest: +SKIP
        ...     llm.generate(prompts)
    """
    version = str(importlib.import_module("vllm").__version__)
    _check_version(version)
    with _lock:
        found = {}
        for place in _PLACES:
            module = _import_or_none(place.module)
            if module is not None:
                _check_function(module, place.adapter, version)
                found[module] = place.adapter
        if not found:
            raise VersionError(
                f"vLLM {version}: expected one of {', '.join(place.module for place in _PLACES)}, found neither"
            )
        originals = {module: getattr(module, _NAME) for module in found}
        for module, adapter in found.items():
            setattr(module, _NAME, adapter)
    return Patch(originals, found)


def _import_or_none(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module itself or a package above it may be absent; one that fails shows its own error.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        return None


def _check_version(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        raise VersionError(
            f"vLLM {version} is installed; specker's adapters were made for {OLDEST[0]}.{OLDEST[1]} to "
            f"{NEWEST[0]}.{NEWEST[1]}, whose rejection_sample they replace. Install one of those, or a specker that "
            "knows this one"
        )


def _check_function(module: ModuleType, adapter: Callable[..., Any], version: str) -> None:
    original = getattr(module, _NAME, None)
    if original is adapter:
        raise RuntimeError(f"{module.__name__}.{_NAME}: expected vLLM's own function, got specker's: patched already")
    if not callable(original):
        raise VersionError(f"vLLM {version}: expected a function {_NAME} in {module.__name__}, found none")
    theirs, ours = inspect.signature(original).parameters, inspect.signature(adapter).parameters
    unknown = [name for name in theirs if name not in ours]
    required = [name for name, parameter in ours.items() if parameter.default is inspect.Parameter.empty]
    missing = [name for name in required if name not in theirs]
    if unknown or missing or list(theirs)[: len(required)] != required:
        raise VersionError(
            f"vLLM {version}: expected {module.__name__}.{_NAME} to begin with ({', '.join(required)}) and to take "
            f"nothing that specker does not know, got ({', '.join(theirs)})"
        )
