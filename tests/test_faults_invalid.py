"""Faults seen in other systems: NaN, infinity and ids outside the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

import specker
from specker import Status

from . import cases
from .cases import ALMOST_ONE, Round, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
NAN, INF = math.nan, math.inf
BAD_ROWS = {
    "NaN first": [NAN, 0.0, 1.0],
    "NaN in the middle": [0.0, NAN, 1.0],
    "NaN last": [0.0, 1.0, NAN],
    "NaN among masked": [-INF, NAN, -INF],
    "NaN only": [NAN, NAN, NAN],
    "infinite": [INF, 0.0, 1.0],
    "infinite and NaN": [INF, NAN, 0.0],
    "infinite and masked": [-INF, -INF, INF],
    "all masked": [-INF, -INF, -INF],
}


@fault("B13")
@pytest.mark.parametrize("vocab", [8193, 10_000, 151_936])
@pytest.mark.parametrize("low", [-INF, -1e4], ids=["masked", "underflowing"])
def test_a_last_tile_without_mass_never_wins(vocab: int, low: float, backend: str, device: torch.device) -> None:
    if interpreted(backend) and vocab > 10_000:
        pytest.skip("too many shards for the interpreter")
    target, draft = torch.full((vocab,), low, device=device), torch.full((vocab,), low, device=device)
    target[5], draft[7] = 0.0, 0.0
    assert cases.first_tokens(target, draft, 7, [0.0, ALMOST_ONE]) == [5, 5]
    assert cases.bonus_tokens(target, [0.0, ALMOST_ONE]) == [5, 5]


@fault("B14", "B131")
@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_target_row_emits_nothing_and_says_so(row: list[float], temperature: float, device: torch.device) -> None:
    target = torch.tensor([[row, [0.0, 0.0, 0.0]]], device=device)
    result = specker.verify(torch.tensor([[0]], device=device), target, temperature=temperature, seed=0)
    assert result.token_ids.tolist() == [[-1, -1]]
    assert result.num_accepted.tolist() == result.num_emitted.tolist() == [0]
    assert result.status.tolist() == [Status.TARGET_INVALID]


@fault("B14", "B18")
@pytest.mark.parametrize("row", [*BAD_ROWS.values(), [-5.0, NAN, -6.0]], ids=[*BAD_ROWS, "NaN among negative"])
def test_sample_gives_no_token_for_a_bad_row(row: list[float], device: torch.device) -> None:
    result = specker.sample(torch.tensor([[0.0, 9.0, 0.0], row], device=device), seed=0, temperature=0.5)
    assert result.token_ids.tolist()[1] == -1
    assert result.status.tolist() == [0, Status.TARGET_INVALID]
    with pytest.raises(specker.InvalidInputError, match=r"sequence 1: a target row holds NaN, \+inf, no finite entry"):
        result.raise_for_status()


@fault("B15")
@pytest.mark.parametrize("spot", [0, 4095, 4096, 12_287], ids=lambda spot: f"id {spot}")
@pytest.mark.parametrize("index", [0, 1], ids=["drafted row", "bonus row"])
def test_one_nan_in_a_row_of_many_tiles_is_told(spot: int, index: int, device: torch.device) -> None:
    target = torch.zeros((1, 2, 12_288), device=device)
    target[0, :, 3] = 30.0
    target[0, index, spot] = NAN
    result = specker.verify(
        torch.tensor([[3]], device=device), target, uniforms=cases.uniforms([[(0.5, 0.5)] * 2], device)
    )
    assert result.status.tolist() == [Status.TARGET_INVALID]
    assert result.num_emitted.tolist() == result.num_accepted.tolist() == [index]
    assert result.token_ids.tolist() == [[3] * index + [-1] * (2 - index)]
    with pytest.raises(specker.InvalidInputError, match="sequence 0: a target row holds NaN"):
        result.raise_for_status()


@fault("B16")
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_sequence_leaves_its_neighbours_bit_equal(bad: float, device: torch.device) -> None:
    target, draft = cases.random_rows(3, 3, 17).to(device), cases.random_rows(3, 2, 17).to(device)
    tokens, seed = (
        torch.tensor([[1, 2], [3, 4], [5, 6]], device=device),
        torch.tensor([5, 6, 7], device=device),
    )
    target[1], draft[1] = bad, bad

    def outputs(rows: list[int]) -> specker.VerifyResult:
        return specker.verify(
            tokens[rows], target[rows], draft[rows], seed=seed[rows], temperature=0.8, top_k=9, top_p=0.9,
            return_logprobs=True, return_accept_probs=True,
        )  # fmt: skip

    together, without = outputs([0, 1, 2]), outputs([0, 2])
    for row, alone in ((0, 0), (2, 1)):
        assert cases.sequence_of(together, row) == cases.sequence_of(without, alone)
    assert together.status.tolist()[1] == Status.TARGET_INVALID


@fault("B17")
def test_a_one_hot_row_with_a_huge_top_k_gives_its_id(device: torch.device) -> None:
    target = torch.full((32_000,), -INF, device=device)
    target[1] = 0.0
    assert cases.bonus_tokens(target, [0.0, ALMOST_ONE], top_k=2**30, top_p=1.0) == [1, 1]
    top_k = torch.full((2,), 2**30, dtype=torch.int32, device=device)
    assert cases.bonus_tokens(target, [0.0, ALMOST_ONE], top_k=top_k) == [1, 1]


@fault("B18")
def test_nan_is_not_taken_for_a_zero(device: torch.device) -> None:
    target = torch.tensor([[[-5.0, NAN, -6.0]]], device=device)
    result = specker.verify(torch.empty((1, 0), dtype=torch.int64, device=device), target, temperature=0.0)
    assert result.token_ids.tolist() == [[-1]]
    assert result.status.tolist() == [Status.TARGET_INVALID]


@fault("B19")
def test_probabilities_whose_float32_sum_overflows_keep_their_law(device: torch.device) -> None:
    probs = torch.tensor([3e38, 3e38, 1.0], device=device).expand(4, 1, 3)
    result = specker.verify_from_probs(
        torch.empty((4, 0), dtype=torch.int64, device=device),
        probs,
        uniforms=cases.uniforms([[(0.5, emission)] for emission in (0.0, 0.4999, 0.5001, ALMOST_ONE)], device),
    )
    assert result.token_ids.flatten().tolist()[:3] == [0, 0, 1]
    assert result.status.tolist() == [0] * 4


@fault("B19")
@pytest.mark.parametrize(
    "row",
    [[INF, 1.0, 1.0], [NAN, 1.0, 1.0], [-0.1, 1.0, 1.0], [0.0, 0.0, 0.0]],
    ids=["infinite", "NaN", "negative", "zero"],
)
def test_bad_probabilities_are_told(row: list[float], device: torch.device) -> None:
    tokens, good = torch.tensor([[1]], device=device), [0.2, 0.3, 0.5]
    draws = cases.uniforms([[(0.0, 0.3)] * 2], device)
    target = torch.tensor([[row, good]], device=device)
    result = specker.verify_from_probs(tokens, target, torch.tensor([[good]], device=device), uniforms=draws)
    assert result.status.tolist() == [Status.TARGET_INVALID]
    assert result.token_ids.tolist() == [[-1, -1]]
    target = torch.tensor([[good, good]], device=device)
    result = specker.verify_from_probs(tokens, target, torch.tensor([[row]], device=device), uniforms=draws)
    assert result.status.tolist() == [Status.DRAFT_INVALID]
    assert result.token_ids.tolist() == [[1, -1]]


@fault("B20")
def test_everything_behind_the_end_is_minus_one(device: torch.device) -> None:
    target = cases.log([[[0.0, 1.0, 0.0]] * 4], device)
    result = specker.verify(torch.tensor([[0, 1, 1]], device=device), target, temperature=0.0)
    assert result.token_ids.tolist() == [[1, -1, -1, -1]]
    assert result.num_emitted.tolist() == [1]


DRAFT_ROUNDS = [
    fault_case(
        "B21",
        Round([0, 1], [[0.2, 0.8]] * 3, [[NAN, 0.5], [0.5, 0.5]], [(0.0, 0.1)] * 3, [0], Status.DRAFT_INVALID),
        "first",
    ),
    fault_case(
        "B21",
        Round([1, 1], [[0.2, 0.8]] * 3, [[0.5, 0.5], [0.5, NAN]], [(0.0, 0.1)] * 3, [1, 0], Status.DRAFT_INVALID),
        "second",
    ),
    fault_case(
        "B21",
        Round([1, 1], [[0.2, 0.8]] * 3, [[0.5, 0.5], [0.0, 0.0]], [(0.0, 0.9)] * 3, [1, 1], Status.DRAFT_INVALID),
        "all masked",
    ),
    fault_case(
        "B21",
        Round([0, 1], [[0.2, 0.8]] * 3, [[0.9, 0.1], [NAN, NAN]], [(0.9, 0.1)] * 3, [1]),
        "behind the rejection",
    ),
]


@pytest.mark.parametrize("case", DRAFT_ROUNDS)
def test_a_bad_draft_row_rejects_its_position_and_says_so(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B131")
@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_every_kind_of_bad_draft_row_is_told(row: list[float], device: torch.device) -> None:
    result = specker.verify(
        torch.tensor([[1]], device=device),
        cases.log([[[0.2, 0.3, 0.5]] * 2], device),
        torch.tensor([[row]], device=device),
        uniforms=cases.uniforms([[(0.0, 0.3)] * 2], device),
    )
    assert result.token_ids.tolist() == [[1, -1]]
    assert result.num_accepted.tolist() == [0]
    assert result.status.tolist() == [Status.DRAFT_INVALID]
