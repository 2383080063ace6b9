"""pytest plugin: FlashInfer's own test of its chain sampler, with the adapter in its place and on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import not_run
import on_cpu
import pytest

from specker.integrations.flashinfer import chain_speculative_sampling

LARGEST = 100_000_000
"""Entries of the rows of a test that still runs; each test makes ten passes over them."""


def pytest_configure(config: pytest.Config) -> None:
    """Put a package in FlashInfer's place that holds the one function under test."""
    package, sampling = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    vars(sampling)["chain_speculative_sampling"] = chain_speculative_sampling
    vars(package)["sampling"] = sampling
    sys.modules.update({"flashinfer": package, "flashinfer.sampling": sampling})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run, with its reason."""
    on_cpu.skip_what_cannot_run(items, not_run.FLASHINFER)
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "num_speculate_tokens" not in parameters:
            continue
        rows = parameters["batch_size"] * (2 * parameters["num_speculate_tokens"] + 1)
        if rows * parameters["vocab_size"] > LARGEST:
            item.add_marker(pytest.mark.skip(reason=not_run.TOO_LARGE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run each test on the CPU."""
    return (yield from on_cpu.run(item))
