"""Rows and the biases and masks that change them, with the same change as dense values, for tests of either."""

from __future__ import annotations

import pytest
import torch

import specker
from specker import LogitBias

BATCH, GAMMA, VOCAB = 3, 2, 70
WORDS = 3


@pytest.fixture
def generator() -> torch.Generator:
    """Return a generator of fixed seed."""
    return torch.Generator().manual_seed(4)


def make_rows(generator: torch.Generator, count: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(BATCH, count, vocab, generator=generator)


def make_mask(generator: torch.Generator, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed words, the same as booleans a token); token 7 is always allowed."""
    allowed = torch.rand(*leading, WORDS * 32, generator=generator) < 0.5
    allowed[..., 7] = True
    bits = (allowed.reshape(*leading, WORDS, 32).long() << torch.arange(32)).sum(-1)
    words = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return words, allowed[..., :VOCAB]


def make_bias() -> tuple[LogitBias, torch.Tensor]:
    """Return an unsorted bias with duplicates and a ban, and the dense values to add."""
    bias = LogitBias(
        torch.tensor([2, 0, 0, 2, 0], dtype=torch.int32),
        torch.tensor([69, 33, 0, 69, 33]),
        torch.tensor([1.5, -2.0, 4.0, 0.25, -1.0]),
    )
    dense = torch.zeros(BATCH, VOCAB)
    dense[2, 69], dense[0, 33], dense[0, 0] = 1.75, -3.0, 4.0
    return bias, dense


def make_uniforms(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(BATCH, GAMMA + 1, 2, dtype=torch.float64, generator=generator)


def assert_same(got: specker.VerifyResult, wanted: specker.VerifyResult) -> None:
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    assert got.status.tolist() == wanted.status.tolist()
    if got.logprobs is not None and wanted.logprobs is not None:
        torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-6)
