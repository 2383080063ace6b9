"""The same cases for pytest-benchmark: `pytest bench/ --benchmark-only`, one group a case.

Caches are warm: one call follows the other. `make bench` compares with the last saved run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import specker

from . import gate
from .cases import CASES, Case, Inputs, make_inputs
from .machine import default_device
from .provider import Provider
from .providers import all_providers
from .timing import synchronise

DEVICE = default_device()
LAWS: dict[str, str] = {}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.lru_cache(maxsize=2)
def rows(case: Case, sampling: specker.Sampling) -> Inputs:
    return make_inputs(case, sampling, DEVICE)


@pytest.mark.parametrize("provider", all_providers(), ids=lambda provider: provider.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verify(case: Case, provider: Provider, benchmark: BenchmarkFixture) -> None:
    reason = provider.why_not(case, DEVICE)
    if reason:
        pytest.skip(reason)
    inputs = rows(case, provider.sampling)
    benchmark.group = f"{case.name}: {case.shape}"
    benchmark.extra_info["gate"] = gate.check(provider, case, inputs, LAWS)
    call = provider.make(inputs)
    call()

    def synchronised() -> None:
        call()
        synchronise(DEVICE)

    benchmark(synchronised)
