"""Faults seen in other systems: speed and memory, as far as counts and not seconds show them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import FrameType

import pytest
import torch

import specker

from . import cases
from .cases import ALMOST_ONE, interpreted
from .faults import fault


@fault("B117")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_262144_is_read_in_tiles(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    if interpreted(backend):
        pytest.skip("too many shards for the interpreter, which shows one such row under B34")
    vocab = 2**18
    target = torch.full((vocab,), -20.0, dtype=dtype, device=device)
    for token in (0, 100_000, vocab - 1):
        target[token] = 3.0
    assert cases.bonus_tokens(target, [0.0, 0.5, ALMOST_ONE], top_k=3) == [0, 100_000, vocab - 1]
    assert cases.first_tokens(target, None, 100_000, [0.1, 0.9]) == [0, vocab - 1]


# Prints by how much the peak of the resident memory grows in calls that follow a first, small one.
MEMORY_SCRIPT = """
import resource, torch, specker
batch, gamma, vocab = 16, 4, 32_000
target = torch.zeros(batch, gamma + 1, vocab)
draft = torch.zeros(batch, gamma, vocab)
tokens = torch.zeros(batch, gamma, dtype=torch.int64)
target[..., 5], draft[..., 7] = 3.0, 3.0
options = dict(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, return_logprobs=True, return_accept_probs=True)
with specker.backend("cpp"):
    specker.verify(tokens[:1], target[:1], draft[:1], **options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    specker.verify(tokens, target, draft, **options)
    specker.verify(tokens, target, None, **options)
    specker.sample(target[:, 0], temperature=0.8, top_k=40, top_p=0.9)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@fault("B120")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["cpp"])
def test_nothing_as_large_as_the_logits_is_allocated(backend: str) -> None:
    # One copy of the target rows would be 10 MB; the peak is that of a process of its own.
    printed = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, check=True).stdout
    assert int(printed) < 2_000


@pytest.mark.gpu
@fault("B120")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["triton"])
def test_nothing_as_large_as_the_logits_is_allocated_on_a_gpu(backend: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    target, draft = torch.zeros((64, 5, 32_000), device=device), torch.zeros((64, 4, 32_000), device=device)
    tokens = torch.zeros((64, 4), dtype=torch.int64, device=device)
    specker.verify(tokens, target, draft, temperature=0.8, top_p=0.9)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    specker.verify(tokens, target, draft, temperature=0.8, top_p=0.9)
    assert torch.cuda.max_memory_allocated() - before < 64 * 32_000


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the kernels that are launched by the interpreter."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    names: list[str] = []
    call = interpreter.GridExecutor.__call__

    def counted(executor: object, *arguments: object, **options: object) -> object:
        names.append(executor.fn.__name__)  # type: ignore[attr-defined]
        return call(executor, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    return names


@fault("B122")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gamma", [1, 3])
def test_a_round_is_a_handful_of_launches_whatever_its_size(
    batch: int, gamma: int, backend: str, launches: list[str]
) -> None:
    if not interpreted(backend):
        pytest.skip("counted in the interpreter")
    tokens = torch.zeros((batch, gamma), dtype=torch.int64)
    rows = (torch.zeros((batch, gamma + 1, 33)), torch.zeros((batch, gamma, 33)))
    specker.verify(tokens, *rows, seed=0)
    assert 1 <= len(launches) <= 3
    launches.clear()
    specker.verify(tokens, *rows, top_p=0.9, seed=0)
    assert 1 <= len(launches) <= 5
    launches.clear()
    specker.sample(torch.zeros((batch, 33)), top_p=0.9, seed=0)
    assert 1 <= len(launches) <= 5


@fault("B123")
@pytest.mark.usefixtures("on_backend")
def test_no_python_runs_once_a_sequence(backend: str, device: torch.device) -> None:
    if interpreted(backend):
        pytest.skip("the interpreter itself is a Python loop over programs")
    counts = []
    for batch in (2, 256, 256):
        target, draft = torch.zeros((batch, 3, 7), device=device), torch.zeros((batch, 2, 7), device=device)
        tokens, seed = torch.zeros((batch, 2), dtype=torch.int64, device=device), torch.arange(batch, device=device)
        calls = [0]

        def count(frame: FrameType, event: str, argument: object, calls: list[int] = calls) -> None:
            del frame, argument
            calls[0] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            specker.verify(tokens, target, draft, seed=seed, temperature=0.7)
            specker.sample(draft[:, 0], seed=seed)
        finally:
            sys.setprofile(None)
        counts.append(calls[0])
    assert counts[2] <= counts[0]
