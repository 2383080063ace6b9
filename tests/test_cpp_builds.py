"""The builds of the C++ kernels: their exponential, equal bits on every instruction set and number of threads."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specker

from .random_calls import CallMaker

pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["cpp"]), reason=specker.available_backends()["cpp"] or "never"
)
ROOT = Path(__file__).resolve().parents[1]


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("specker._C")
    assert spec is not None
    return ctypes.CDLL(str(spec.origin))


def _capabilities() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    wanted = {"avx2": ("avx2", "fma", "f16c"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")}
    return ["default", *(name for name, needs in wanted.items() if all(f" {flag}" in flags for flag in needs))]


@pytest.mark.parametrize("capability", _capabilities())
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.003, 1e4])
def test_exponential_is_within_two_ulp(capability: str, temperature: float) -> None:
    differences = np.linspace(-110.0, 0.0, 1 << 20, dtype=np.float32) * np.float32(temperature)
    differences[:64] = -np.inf
    differences[64:128] = -np.finfo(np.float32).max
    weights = np.empty_like(differences)
    _library().specker_weigh(
        capability.encode(), differences.ctypes.data_as(ctypes.c_void_p), weights.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(differences.size), ctypes.c_double(temperature),
    )  # fmt: skip
    expected = np.exp(differences.astype(np.float64) / temperature)
    ulp = np.maximum(np.spacing(expected.astype(np.float32)).astype(np.float64), 2.0**-149)
    assert (np.abs(weights - expected) / ulp).max() <= 2.0
    assert (weights[:128] == 0.0).all()
    # Subnormal results are in the range, not flushed.
    assert ((weights > 0) & (weights < np.finfo(np.float32).tiny)).any()


_DIGEST = """
import hashlib, sys
sys.path.insert(0, {root!r})
import torch
from tests.random_calls import CallMaker
import specker
digest = hashlib.sha256()
maker = CallMaker(17)
for _ in range(150):
    for output in torch.ops.specker.verify(**maker.verify_call()):
        digest.update(output.contiguous().numpy().tobytes())
print(digest.hexdigest())
"""


def _digest(capability: str) -> str:
    """Return a digest of many results, computed in a process that uses the given build of the kernels."""
    environment = {**os.environ, "SPECKER_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", _DIGEST.format(root=str(ROOT))]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    return finished.stdout.strip() if finished.returncode == 0 else finished.stderr


@pytest.mark.skipif("avx512" not in _capabilities(), reason="this processor has no AVX-512")
def test_avx512_and_avx2_give_equal_bits() -> None:
    wide, narrow = _digest("avx512"), _digest("avx2")
    assert len(wide) == 64
    assert wide == narrow


def test_an_unknown_capability_raises_in_words() -> None:
    assert "SPECKER_CPU_CAPABILITY: expected avx512, avx2 or default" in _digest("sse9")


@pytest.mark.parametrize("batch", [1, 3])
def test_threads_do_not_change_a_bit(batch: int) -> None:
    maker = CallMaker(3)
    target = torch.randn(batch, 4, 30000, generator=maker.generator) * 3
    draft = target[:, :3] + torch.randn(batch, 3, 30000, generator=maker.generator)
    tokens = torch.multinomial(draft.softmax(-1).view(-1, 30000), 1, generator=maker.generator).view(batch, 3)
    before = torch.get_num_threads()
    outcomes = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            plain: dict[str, Any] = {}
            for sampling in (plain, {"top_p": 0.9, "top_k": 4000}):
                results = [
                    specker.verify(tokens, target, draft, seed=seed, return_logprobs=True, **sampling)
                    for seed in range(10)
                ]
                outcomes.append(
                    (bool(sampling), torch.cat([result.token_ids.double() for result in results]),
                     torch.cat([result.logprobs for result in results if result.logprobs is not None]))
                )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    for filtered, tokens_drawn, logprobs in outcomes[2:]:
        _, expected_tokens, expected_logprobs = outcomes[int(filtered)]
        assert torch.equal(tokens_drawn, expected_tokens)
        assert torch.equal(logprobs, expected_logprobs)
