"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# The kernels read this when they are imported. Without a GPU they run on CPU tensors, in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import specker

from . import interpreter

BACKENDS = ("reference", "cpp", "triton")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--backend`, which restricts the tests that run on every backend to one."""
    parser.addoption("--fuzz-minutes", type=float, default=0.0, help="search on for so long in tests/test_fuzz.py")
    parser.addoption("--filter-rows", type=int, default=60_000, help="rows that tests/test_filters_exact.py compares")
    parser.addoption("--backend", choices=BACKENDS, default=None, help="run backend tests on this backend only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `backend` once on each backend, unless it lists its own."""
    if "backend" not in metafunc.fixturenames:
        return
    if any(mark.name == "parametrize" and "backend" in mark.args[0] for mark in metafunc.definition.iter_markers()):
        return
    chosen = metafunc.config.getoption("--backend")
    metafunc.parametrize("backend", [chosen] if chosen else BACKENDS)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    interpreter.replace_language_once()


@pytest.fixture
def device(backend: str) -> torch.device:
    """Return the device of a backend test: a GPU for Triton where there is one, else the CPU."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_backend(backend: str) -> Iterator[str]:
    """Run the test on one backend, or skip it with the reason why that cannot serve."""
    reason = specker.available_backends()[backend]
    if reason:
        pytest.skip(reason)
    with specker.backend(backend):
        yield backend


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run the tests of a module on one thread."""
    # Imports transformers, which most tests do without.
    from . import tiny_models

    with tiny_models.one_thread():
        yield
