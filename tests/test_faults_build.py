"""Faults seen in other systems: build, import, toolchain, interpreter."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specker
from specker import operators

from . import cases
from .faults import fault


@fault("B124")
@pytest.mark.parametrize("operator", ["verify", "sample"])
def test_kernels_for_gpus_are_refused_on_cpu_tensors_without_the_interpreter(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "verify": (torch.zeros((1, 1), dtype=torch.int64), torch.zeros((1, 2, 3))),
        "sample": (torch.zeros((1, 3)),),
    }
    monkeypatch.setattr(operators._choice, "name", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(specker.BackendUnavailableError, match="serves CPU tensors by the interpreter only"):
        getattr(specker, operator)(*arguments[operator])


@fault("B124")
@pytest.mark.usefixtures("on_backend")
def test_every_element_of_every_output_is_written(device: torch.device) -> None:
    # Twice over memory that held other things: what a call left out would differ.
    target, draft = cases.random_rows(4, 4, 9).to(device), cases.random_rows(4, 3, 9).to(device)
    target[2, 1] = float("nan")
    tokens = torch.tensor([[1, 2, 3], [-1, 2, 3], [4, 5, 6], [7, 8, 0]], device=device)
    results = []
    for poison in (-7, 12345):
        junk = [
            torch.full((size,), poison, dtype=torch.int64, device=device) for size in (1, 2, 3, 4, 6, 8, 12, 16) * 4
        ]
        del junk
        results.append(
            specker.verify(
                tokens, target, draft, num_draft_tokens=torch.tensor([3, 3, 3, 1], device=device), seed=1,
                return_logprobs=True, return_accept_probs=True,
            )
        )  # fmt: skip
    for first, second in zip(*results, strict=True):
        assert isinstance(first, torch.Tensor)
        assert isinstance(second, torch.Tensor)
        assert torch.equal(first.nan_to_num(99.0), second.nan_to_num(99.0))


def printed(script: str, **environment: str) -> str:
    """Return what a script prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    ).stdout


@fault("B125")
def test_import_works_without_triton_and_without_a_gpu() -> None:
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
import specker, torch
print(specker.available_backends()["triton"])
print(specker.sample(torch.tensor([[0.0, 9.0]]), temperature=0.0).token_ids.tolist())
try:
    with specker.backend("triton"):
        pass
except specker.BackendUnavailableError as error:
    print(error)
"""
    reason = "the package triton is not installed"
    lines = printed(script, CUDA_VISIBLE_DEVICES="").splitlines()
    assert lines == [reason, "[1]", f"backend 'triton' cannot serve: {reason}"]


@fault("B125")
def test_import_loads_no_kernel() -> None:
    script = "import sys, specker; print([name for name in sys.modules if name.startswith('specker.kernels')])"
    assert printed(script, CUDA_VISIBLE_DEVICES="").strip() == "[]"


@fault("B127")
def test_an_extension_that_does_not_load_names_both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"not a library")
    spec = importlib.machinery.ModuleSpec("specker._C", None, origin=str(broken))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "specker._C" else None)
    told = re.escape(f"specker._C is installed but does not load with torch {torch.__version__}: ")
    with pytest.raises(ImportError, match=told):
        operators._load_extension()


@fault("B127")
def test_an_absent_extension_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert operators._load_extension() is False


@fault("B125")
@pytest.mark.parametrize(
    "broken", [ModuleNotFoundError("No module named 'numpy'", name="numpy"), ImportError("bad file")]
)
def test_a_kernel_that_fails_to_import_says_why(broken: ImportError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise broken

    monkeypatch.setattr(operators._choice, "name", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(type(broken), match=str(broken)):
        specker.sample(torch.zeros((1, 3)))


@fault("B128")
def test_tensors_on_different_devices_are_refused() -> None:
    tokens, target = torch.zeros((1, 1), dtype=torch.int64), torch.zeros((1, 2, 3))
    with pytest.raises(ValueError, match="draft_logits: expected device cpu, that of the target, got meta"):
        specker.verify(tokens, target, torch.zeros((1, 1, 3), device="meta"))
    with pytest.raises(ValueError, match="draft_token_ids: expected device cpu, that of the target, got meta"):
        specker.verify(tokens.to("meta"), target)


@pytest.mark.gpu
@fault("B128")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_device_of_their_tensors() -> None:
    target = cases.random_rows(2, 3, 257)
    tokens = torch.tensor([[1, 2], [3, 4]])
    with torch.cuda.device(0):
        first, second = (
            specker.verify(tokens.to(device), target.to(device), seed=0).token_ids.tolist()
            for device in ("cuda:0", "cuda:1")
        )
    assert first == second


@fault("B129")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_backend_that_says_it_serves_does(temperature: float, device: torch.device) -> None:
    row = torch.tensor([0.0, 60.0, 0.0], device=device)
    assert cases.bonus_tokens(row, [0.5], temperature=temperature) == [1]
    assert specker.sample(row.unsqueeze(0), temperature=temperature).token_ids.tolist() == [1]
    assert set(operators._OPERATORS["default"]) == {"verify", "verify_plain", "sample", "verify_into"}


@fault("B130")
def test_results_are_read_by_name() -> None:
    assert specker.VerifyResult._fields == (
        "token_ids", "num_accepted", "num_emitted", "status", "seed", "logprobs", "accept_probs", "expected_accepted",
    )  # fmt: skip
    assert specker.SampleResult._fields == ("token_ids", "status", "seed", "receipt")
    assert specker.Sampling._fields == ("temperature", "top_k", "top_p", "min_p")


@pytest.fixture(scope="module")
def canaries() -> Any:
    """Return kernels that use one primitive of Triton each."""
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("no GPU and no interpreter")
    return importlib.import_module("._canaries", __package__), triton


@fault("B131", "B132", "B133")
def test_primitives_of_triton_mean_what_the_kernels_take_them_to_mean(canaries: Any) -> None:
    module, _ = canaries
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.rand(3000, generator=torch.Generator().manual_seed(0)).to(device)
    total, prefix = torch.zeros(1, device=device), torch.zeros(4096, dtype=torch.float64, device=device)
    unequal = torch.zeros(4096, dtype=torch.int32, device=device)
    holed = values.clone()
    holed[7] = float("nan")
    module.masked_sum[(1,)](values, total, 3000, 4096)
    module.prefix_sum[(1,)](values, prefix, 3000, 4096)
    module.is_nan[(1,)](holed, unequal, 3000, 4096)
    assert float(total[0]) == pytest.approx(float(values.double().sum()), rel=1e-5)
    wanted = np.cumsum(np.pad(values.double().cpu().numpy(), (0, 1096)))
    np.testing.assert_allclose(prefix.cpu().numpy(), wanted, rtol=1e-12)
    assert unequal.nonzero().flatten().tolist() == [7]


@fault("B134")
@pytest.mark.usefixtures("on_backend")
def test_generator_s_wide_constants_give_the_known_words(device: torch.device) -> None:
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    accept, emission = specker.random.uniforms(0, 0, 0)
    assert float(accept) == float(specker.random.uniform_from_words(words[0], words[1]))
    assert float(emission) == float(specker.random.uniform_from_words(words[2], words[3]))
    # A flat row of a power of two shows the leading bits of the emission uniform: 0x9B00DBD8 / 2**32 * 1024.
    drawn = specker.sample(torch.zeros((1, 1024), device=device), seed=0, position=0)
    assert drawn.token_ids.tolist() == [words[3] >> 22]
