"""The filters of the interpreted Triton kernels: the thresholds of a sort, whichever way they are found."""

from __future__ import annotations

import math

import pytest
import torch

from specker.reference import RECEIPT_FIELDS

from . import differential
from .triton_rounds import needs_interpreter, poison_memory, random_rounds

contract = pytest.importorskip("specker.kernels.contract")
pytestmark = needs_interpreter


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch)


def test_filters_of_large_rows_agree_with_the_reference() -> None:
    filters = {
        "top_k": torch.tensor([50, 3000, 0]), "top_p": torch.tensor([0.9, 0.8, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.01]),
    }  # fmt: skip
    call = random_rounds(9000, torch.bfloat16) | filters | {f"draft_{name}": value for name, value in filters.items()}
    assert differential.assert_agrees("triton", call) == 0
    assert differential.assert_agrees("triton", call | {"draft": None}) == 0


def filter_rows(kind: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, vocab, generator=generator) * 3
    if kind == "tied":
        return logits.to(torch.bfloat16)
    if kind == "half":
        return logits.to(torch.float16)
    if kind == "trend":
        # As in vocabularies that are sorted by frequency: the bound of the shards is far from the threshold.
        return logits / 3 - torch.linspace(0.0, 4.0, vocab)
    if kind == "flat":
        return torch.zeros_like(logits)
    if kind == "masked":
        return logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.9, -math.inf)
    if kind == "narrow":
        # Distinct neighbours beside far outliers: a sample of the row tells little.
        logits = 1.0 + torch.arange(vocab, dtype=torch.float32).expand(2, -1) * 2.0**-23
        return torch.cat([logits, torch.tensor([[-1e30, 1.01]]).expand(2, -1)], dim=1)
    return logits


@pytest.mark.parametrize("kind", ["random", "tied", "half", "trend", "flat", "masked", "narrow"])
@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p"),
    [
        (40, 7, 0.5),
        (3000, 50, None),
        (3000, 2500, None),
        (3000, None, 0.95),
        (3000, 2500, 0.9),
        (3000, None, 1 - 1e-12),
        (20000, 6000, 0.9),
        (20000, None, 0.97),
        (20000, None, 1 - 1e-9),
    ],
)
def test_filters_find_the_thresholds_of_a_sort(kind: str, vocab: int, top_k: int | None, top_p: float | None) -> None:
    arguments = (
        filter_rows(kind, vocab), torch.tensor([1.0, 0.7], dtype=torch.float64),
        None if top_k is None else torch.tensor([top_k]),
        None if top_p is None else torch.tensor([top_p], dtype=torch.float64), None, *[None] * 4,
        torch.arange(2), torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    triton, reference = torch.ops.specker_triton.sample(*arguments), torch.ops.specker_reference.sample(*arguments)
    names = dict(zip(RECEIPT_FIELDS, triton[2].unbind(-1), strict=True))
    expected = dict(zip(RECEIPT_FIELDS, reference[2].unbind(-1), strict=True))
    assert torch.equal(names["threshold"], expected["threshold"])
    torch.testing.assert_close(names["weight_sum"], expected["weight_sum"], rtol=5e-7, atol=0.0)
    assert torch.equal(triton[1], reference[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_between_two_values_of_a_dtype_lose_and_add_none(dtype: torch.dtype) -> None:
    # Neither the bound of the candidates nor a min-p threshold is a value that a row of so few bits can hold.
    generator = torch.Generator().manual_seed(3)
    rows = (2 * torch.randn(4, 1500, generator=generator)).to(dtype)
    for top_p, min_p in ((0.6, 0.001), (0.9, 0.01), (0.99, 0.0)):
        arguments = (
            rows, torch.ones(1, dtype=torch.float64), None, torch.tensor([top_p], dtype=torch.float64),
            torch.tensor([min_p], dtype=torch.float64), *[None] * 4, torch.arange(4), torch.zeros(1).long(),
        )  # fmt: skip
        found = torch.ops.specker_triton.sample(*arguments)[2]
        expected = torch.ops.specker_reference.sample(*arguments)[2]
        torch.testing.assert_close(found[:, 2:], expected[:, 2:], rtol=5e-7, atol=0.0)
