"""Whole tiles of the interpreted Triton kernels: wherever rows start in memory, wherever the largest value stands."""

from __future__ import annotations

import math

import pytest
import torch

from specker.status import Status

from . import differential
from .triton_rounds import needs_interpreter, plain_call, poison_memory

rounds = pytest.importorskip("specker.kernels.rounds")
# The interpreter takes the maximum of invalid rows in numpy, which says so.
pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]
# One tile of row statistics and a piece of a second.
VOCAB = 8192 + 3


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch)


def moved(rows: torch.Tensor, shift: int) -> torch.Tensor:
    """Return rows that lie `shift` elements behind a multiple of 16 bytes, each, with NaN around them."""
    width = -(-rows.shape[1] // 16) * 16 + 16
    memory = torch.full((rows.shape[0], width), math.nan, dtype=rows.dtype)
    memory[:, shift : shift + rows.shape[1]] = rows
    return memory[:, shift : shift + rows.shape[1]]


def sample(rows: torch.Tensor, temperature: float, top_p: float | None = None) -> tuple[torch.Tensor, ...]:
    one = torch.tensor([temperature], dtype=torch.float64)
    nucleus = None if top_p is None else torch.tensor([top_p], dtype=torch.float64)
    seeds = torch.arange(rows.shape[0])
    found: tuple[torch.Tensor, ...] = torch.ops.specker_triton.sample(
        rows, one, None, nucleus, None, *[None] * 4, seeds, torch.zeros(1, dtype=torch.int64)
    )
    return found


@pytest.mark.parametrize(("dtype", "shifts"), [(torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 4)])
def test_a_search_does_not_depend_on_where_rows_lie_in_memory(dtype: torch.dtype, shifts: int) -> None:
    # So flat that a nucleus holds more values than are listed: the row itself is swept, by whole tiles first.
    rows = torch.randn(1, 2 * 16384 + 77, generator=torch.Generator().manual_seed(5)).to(dtype)
    token, status, receipt = sample(moved(rows, 0), 1.0, 0.8)
    expected = torch.ops.specker_reference.sample(
        rows, *[torch.tensor([value], dtype=torch.float64) if value else None for value in (1.0, 0, 0.8)], None,
        *[None] * 4, torch.arange(1), torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    assert torch.equal(token, expected[0])
    assert torch.equal(receipt[:, 2], expected[2][:, 2])
    assert int((rows.double() >= receipt[0, 2]).sum()) > rounds.contract.MAX_CANDIDATES
    for shift in range(1, shifts):
        found = sample(moved(rows, shift), 1.0, 0.8)
        assert all(map(torch.equal, found, (token, status, receipt))), shift


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_arg_max_is_the_lowest_id_of_the_largest_value(dtype: torch.dtype) -> None:
    # Ids that one thread holds, neighbours, other parts and shards, and the piece behind the tiles.
    ids = [0, 7, 8, 255, 256, 511, 512 + 9, 768 + 255, 1023, 1024, 5000, 8191, 8192, VOCAB - 1]
    pairs = [(low, high) for low in ids for high in ids if low <= high]
    rows = torch.full((len(pairs), VOCAB), -3.0, dtype=dtype)
    for row, pair in zip(rows, pairs, strict=True):
        row[list(pair)] = -1.0
    for shift in (0, 5):
        token, status, _ = sample(moved(rows, shift), 0.0)
        assert token.tolist() == [low for low, _ in pairs]
        assert not status.any()


def test_zeros_of_either_sign_are_tied_and_rows_without_mass_are_told() -> None:
    rows = torch.full((3, VOCAB), -math.inf)
    rows[0, 700], rows[0, 300] = 0.0, -0.0
    rows[1, 300], rows[1, 700] = 0.0, -0.0
    token, status, _ = sample(rows, 0.0)
    assert token.tolist() == [300, 300, -1]
    assert status.tolist() == [0, 0, int(Status.TARGET_INVALID)]


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, -0x400000, 0x7F800001, -0x7FFFFF])
def test_invalid_entries_are_found_wherever_they_are(bits: int) -> None:
    # +inf, NaN of both signs, quiet and signalling.
    ids = [0, 3, 7, 300, 1023, 4095, 8191, VOCAB - 1]
    rows = torch.randn(len(ids) + 1, VOCAB, generator=torch.Generator().manual_seed(1))
    for row, token in zip(rows, ids, strict=False):
        row.view(torch.int32)[token] = bits
    for shift in (0, 3):
        token, status, _ = sample(moved(rows, shift), 0.0)
        assert token[:-1].tolist() == [-1] * len(ids)
        assert status.tolist() == [int(Status.TARGET_INVALID)] * len(ids) + [0]
        assert int(token[-1]) == int(rows[-1].argmax())


@pytest.mark.slow
def test_more_than_a_million_ids_agree_with_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    target = (torch.randn(1, 2, 1024 * 1024 + 5000, generator=generator) * 3).to(torch.bfloat16)
    draft = (target[:, :1].float() + torch.randn(target[:, :1].shape, generator=generator)).to(torch.bfloat16)
    call = plain_call(target, draft, draft.argmax(-1), top_k=torch.tensor([300]), top_p=torch.tensor([0.9]))
    assert differential.assert_agrees("triton", call) == 0
