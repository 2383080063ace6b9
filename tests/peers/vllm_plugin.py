"""pytest plugin: vLLM's own tests of its rejection samplers, with the adapters in their places and on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import not_run
import on_cpu
import pytest
import sources
import stand_ins
import torch

from specker.integrations.vllm import patch, rejection_sample_by_slot

UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
REASONS = {"test_rejection_sampler.py": not_run.VLLM_BATCH, "test_rejection_sampler_utils.py": not_run.VLLM_SLOTS}
_has_gpu = torch.cuda.is_available


def pytest_configure(config: pytest.Config) -> None:
    """Make vLLM importable and patch it before its tests import anything."""
    stand_ins.install("vllm", sources.SOURCES["vllm"].folder)
    patch()
    # The tests of the second runner take the function from where it is defined rather than from where it is used.
    vars(importlib.import_module(UTILS))["rejection_sample"] = rejection_sample_by_slot
    # They leave at once where there is no GPU.
    torch.cuda.is_available = lambda: True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run, with its reason."""
    torch.cuda.is_available = _has_gpu
    for file, reasons in REASONS.items():
        on_cpu.skip_what_cannot_run([item for item in items if Path(item.path).name == file], reasons)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run each test on the CPU."""
    return (yield from on_cpu.run(item))
