"""Stand-ins for what the engines import but their samplers do not need, so that their real code runs on a CPU.

The modules of an engine under test are its own, from its own source. Around them, packages are entered without
running their `__init__`, and modules that need a GPU, a compiled extension or a server are replaced by empty ones whose
every attribute is a class that does nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import triton
import triton.language as tl

# Packages whose `__init__` starts an engine.
ENTERED = {
    "vllm": [
        "vllm",
        "vllm.v1",
        "vllm.v1.sample",
        "vllm.v1.spec_decode",
        "vllm.v1.worker",
        "vllm.v1.worker.gpu",
        "vllm.v1.worker.gpu.spec_decode",
        "vllm.model_executor",
        "vllm.model_executor.layers",
        "vllm.model_executor.warmup",
    ],
    "sglang": [
        "sglang",
        "sglang.kernels",
        "sglang.kernels.ops",
        "sglang.kernels.ops.speculative",
    ],
}
# Configuration, platforms, attention, compiled extensions, requests: a sampler's tests reach none of their behaviour.
EMPTY = {
    "vllm": [
        "vllm._aiter_ops",
        "vllm._custom_ops",
        "vllm.compilation",
        "vllm.config",
        "vllm.distributed",
        "vllm.env_override",
        "vllm.envs",
        "vllm.forward_context",
        "vllm.inputs",
        "vllm.logger",
        "vllm.logits_process",
        "vllm.lora",
        "vllm.model_executor.parameter",
        "vllm.multimodal",
        "vllm.outputs",
        "vllm.platforms",
        "vllm.pooling_params",
        "vllm.sampling_params",
        "vllm.triton_utils",
        "vllm.utils.flashinfer",
        "vllm.v1.attention",
    ],
    "sglang": [
        "sglang.srt",
        "sglang.kernels.jit",
        "sglang.kernels.api_logging",
        "sgl_kernel",
    ],
}


class _Platform:
    """A CPU that has none of the features vLLM asks for."""

    device_type = "cpu"
    dispatch_key = "CPU"

    @staticmethod
    def num_compute_units(_device: object = None) -> int:
        """Return how many programs vLLM may start side by side."""
        return 1

    def __getattr__(self, _name: str) -> Callable[..., bool]:
        return lambda *_arguments, **_options: False


class _Libdevice:
    """The one function that vLLM takes from CUDA's library, which the interpreter does not run."""

    @staticmethod
    def log1p(value: Any) -> Any:
        """Return log(1 + value); less exact for small values, where it only scales the noise that draws a token."""
        return tl.log(1.0 + value)


class _Empty(types.ModuleType):
    """A module whose every attribute is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(
            name,
            (),
            {
                "__init__": lambda _self, *_arguments, **_options: None,
                "__class_getitem__": classmethod(lambda cls, _item: cls),
            },
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins before anything else is asked."""

    def __init__(self, root: Path, entered: Iterable[str], empty: Iterable[str]) -> None:
        self.root = root
        self.entered = frozenset(entered)
        self.empty = tuple(empty)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a stand-in, None for every other module."""
        if fullname in self.entered:
            spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            spec.submodule_search_locations = [str(self.root.joinpath(*fullname.split(".")))]
            return spec
        if any(fullname == name or fullname.startswith(name + ".") for name in self.empty):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Return an empty stand-in, or None for a package whose modules are real."""
        return None if spec.name in self.entered else _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def install(engine: str, root: Path) -> None:
    """Make the modules of an engine importable from `root`."""
    sys.meta_path.insert(0, _Finder(root, ENTERED[engine], EMPTY[engine]))
    sys.path.insert(0, str(root))
    if engine == "vllm":
        _furnish_vllm(root.name.rpartition("-")[2])


def _furnish_vllm(version: str) -> None:
    vllm: Any = importlib.import_module("vllm")
    vllm.__version__ = version
    vllm.SamplingParams = vllm.CompletionOutput = object
    vllm.envs = importlib.import_module("vllm.envs")
    furniture: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": _Libdevice, "HAS_TRITON": False},
        "vllm.config.model": {"PROCESSED_LOGPROBS_MODES": ("processed_logits", "processed_logprobs")},
    }
    for name, attributes in furniture.items():
        vars(importlib.import_module(name)).update(attributes)
