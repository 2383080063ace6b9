"""Faults seen in other systems: acceptance and residual."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

import specker
from specker import Sampling, Status

from . import cases, laws
from .cases import ALMOST_ONE, Round, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
NAN = float("nan")
EMPTY = Status.DRAFT_TOKEN_IMPOSSIBLE | Status.RESIDUAL_EMPTY

ROUNDS = [
    fault_case("B01", Round([2], [[0, 1, 0, 0]] * 2, [[0, 0, 1, 0]], [(0.0, 0.5)] * 2, [1])),
    fault_case("B01", Round([0], [[0, 1, 0, 0]] * 2, None, [(0.0, 0.5)] * 2, [1]), "point mass"),
    fault_case("B03", Round([0], [[0, 0.5, 0.5]] * 2, [[0, 0.5, 0.5]], [(0.0, 0.49)] * 2, [1], EMPTY), "lower half"),
    fault_case("B03", Round([0], [[0, 0.5, 0.5]] * 2, [[0, 0.5, 0.5]], [(0.0, 0.51)] * 2, [2], EMPTY), "upper half"),
    *(
        fault_case(
            "B04",
            Round(
                [0],
                [[0.2, 0.3, 0.5]] * 2,
                [[NAN, 0, 0]],
                [(0.0, emission)] * 2,
                [token],
                Status.DRAFT_INVALID,
            ),
            f"emission {emission}",
        )
        for emission, token in ((0.1, 0), (0.3, 1), (0.7, 2))
    ),
    *(
        fault_case(
            "B08",
            Round(
                [0, 0],
                [[0.1, 0.65, 0.25]] * 3,
                [[0.9, 0.05, 0.05]] * 2,
                [(0.99, emission), (0.0, 0.5), (0.0, 0.5)],
                [token],
            ),
            f"emission {emission}",
        )
        for emission, token in ((0.0, 1), (0.749, 1), (0.751, 2), (ALMOST_ONE, 2))
    ),
]


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_has_its_right_result(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B01")
@pytest.mark.parametrize(("uniform", "accepted"), [(0.5, 0), (0.5 - 2.0**-54, 1)], ids=["on it", "just below"])
def test_a_uniform_on_the_threshold_rejects(uniform: float, accepted: int, device: torch.device) -> None:
    # All numbers are powers of two, so that uniform * draft = target holds to the last bit.
    result = specker.verify_from_probs(
        torch.tensor([[0]], device=device),
        torch.tensor([[[0.25, 0.25, 0.5]] * 2], device=device),
        torch.tensor([[[0.5, 0.5, 0.0]]], device=device),
        uniforms=cases.uniforms([[(uniform, 0.1)] * 2], device),
    )
    assert result.num_accepted.tolist() == [accepted]
    assert result.token_ids.tolist() == [[0, 0] if accepted else [2, -1]]


@fault("B04")
def test_nan_in_draft_probs_rejects_and_draws_from_the_target(device: torch.device) -> None:
    result = specker.verify(
        torch.tensor([[0]], device=device),
        cases.log([[[0.2, 0.3, 0.5]] * 2], device),
        draft_probs=torch.tensor([[[NAN, 0.0, 0.0]]], device=device),
        uniforms=cases.uniforms([[(0.0, 0.3)] * 2], device),
    )
    assert result.token_ids.tolist() == [[1, -1]]
    assert result.status.tolist() == [Status.DRAFT_INVALID]


@fault("B02")
def test_an_impossible_token_never_passes_in_half_precision(backend: str, device: torch.device) -> None:
    batch = 8 if interpreted(backend) else 40_000
    target = cases.log([0, 1, 0, 0], device, torch.bfloat16).expand(batch, 2, 4)
    draft = cases.log([0, 0, 1, 0], device, torch.bfloat16).expand(batch, 1, 4)
    result = specker.verify(torch.full((batch, 1), 2, device=device), target, draft, seed=0)
    assert int(result.num_accepted.sum()) == 0
    assert bool((result.token_ids[:, 0] == 1).all())


@fault("B05")
def test_residual_of_tiny_ratios_equals_float64(backend: str, device: torch.device) -> None:
    # The draft is 2**-25 of the target everywhere but at the last id, which takes the rest.
    vocab = 2**16
    target = cases.random_rows(vocab)
    draft = target.double().softmax(-1).log() - 25 * np.log(2)
    draft[-1] = 0.0
    draft = draft.float()
    residual = (target.double().softmax(-1) - draft.double().softmax(-1)).clamp(min=0)
    ids = torch.linspace(0, vocab - 2, 2 if interpreted(backend) else 64).long()
    middle = (residual.cumsum(-1) - residual / 2) / residual.sum()
    heavy = [int(residual[max(token - 500, 0) : token + 500].argmax()) + max(token - 500, 0) for token in ids.tolist()]
    emitted = cases.first_tokens(target.to(device), draft.to(device), vocab - 1, middle[heavy].tolist())
    assert emitted == heavy


@fault("B06")
def test_sample_feeding_verify_keeps_the_law_in_bfloat16(backend: str, device: torch.device) -> None:
    if interpreted(backend):
        pytest.skip("too many sequences for the interpreter")
    rounds = 200_000
    target = torch.tensor([0.0, 1.0, 0.5, -1.0, 0.2], dtype=torch.bfloat16, device=device)
    draft = torch.arange(5, device=device).mul(2.0**-9 * 100).to(torch.bfloat16)
    seed = torch.arange(rounds, device=device)
    drawn = specker.sample(draft.expand(rounds, 5), seed=seed)
    result = specker.verify(
        drawn.token_ids.unsqueeze(-1), target.expand(rounds, 2, 5), draft.expand(rounds, 1, 5), seed=seed
    )
    counts = torch.bincount(result.token_ids[:, 0], minlength=5)
    law = {str(token): float(weight) for token, weight in enumerate(target.double().softmax(-1))}
    assert laws.p_value({str(token): int(count) for token, count in enumerate(counts)}, law) > 1e-6


@fault("B07")
@pytest.mark.parametrize("floor", [float("-inf"), -1000.0], ids=["masked", "underflowing"])
def test_residual_has_no_floor(floor: float, backend: str, device: torch.device) -> None:
    vocab = 128_256
    target, draft = torch.full((vocab,), floor, device=device), torch.full((vocab,), floor, device=device)
    target[3], draft[9] = 0.0, 0.0
    emissions = [0.5] if interpreted(backend) else [0.0, 0.5, ALMOST_ONE]
    assert cases.first_tokens(target, draft, 9, emissions) == [3] * len(emissions)


@fault("B09")
def test_ratios_are_those_of_the_draft_tokens(backend: str, device: torch.device) -> None:
    target = [[0.1, 0.15, 0.2, 0.25, 0.3], [0.3, 0.24, 0.21, 0.14, 0.11], [0.2] * 5]
    draft = [[0.31, 0.26, 0.19, 0.13, 0.11], [0.12, 0.13, 0.16, 0.28, 0.31]]
    for tokens in list(itertools.permutations(range(5), 2))[:: 7 if interpreted(backend) else 1]:
        result = specker.verify(
            torch.tensor([tokens], device=device),
            cases.log([target], device),
            cases.log([draft], device),
            seed=0,
            return_accept_probs=True,
        )
        ratios = [min(1.0, target[row][token] / draft[row][token]) for row, token in enumerate(tokens)]
        assert result.accept_probs is not None
        assert result.accept_probs[0].tolist() == pytest.approx(ratios, rel=1e-6)


@fault("B10")
@pytest.mark.law
def test_law_of_three_opposite_drafts_is_the_exact_joint_law(backend: str) -> None:
    if interpreted(backend):
        pytest.skip("too many sequences for the interpreter")
    rows = laws.Rows((Fraction(9, 10), Fraction(1, 10)), (Fraction(1, 10), Fraction(9, 10)))
    law = laws.enumerated_law(specker.verify, rows, gamma=3)
    wanted = laws.joint_law(np.full((4, 2), [0.9, 0.1]), np.full((3, 2), [0.1, 0.9]), 3)
    assert set(law) == set(wanted)
    assert {key: float(weight) for key, weight in law.items()} == pytest.approx(wanted, abs=1e-12)
    first = sum(weight for key, weight in law.items() if key.split("|")[1].startswith("0"))
    assert first == Fraction(9, 10)


@fault("B11")
def test_logits_at_a_temperature_equal_probabilities_tempered_beforehand(device: torch.device) -> None:
    target, draft = torch.tensor([1.0, 0.0], device=device), torch.tensor([0.0, 0.5], device=device)
    tokens = torch.tensor([[0], [1]], device=device)
    # The accept thresholds are 1 for token 0 and 0.163 for token 1.
    uniforms = cases.uniforms([[(0.5, 0.5), (0.5, 0.5)], [(0.2, 0.5), (0.5, 0.5)]], device)
    shapes = (2, 2, 2), (2, 1, 2)
    by_logits = specker.verify(
        tokens, target.expand(shapes[0]), draft.expand(shapes[1]), temperature=0.5, uniforms=uniforms,
        return_accept_probs=True,
    )  # fmt: skip
    by_probs = specker.verify_from_probs(
        tokens, (target / 0.5).softmax(-1).expand(shapes[0]), (draft / 0.5).softmax(-1).expand(shapes[1]),
        uniforms=uniforms, return_accept_probs=True,
    )  # fmt: skip
    assert by_logits.token_ids.tolist() == by_probs.token_ids.tolist()
    assert by_logits.num_accepted.tolist() == by_probs.num_accepted.tolist() == [1, 0]
    assert by_logits.accept_probs is not None
    assert by_probs.accept_probs is not None
    torch.testing.assert_close(by_logits.accept_probs, by_probs.accept_probs, rtol=1e-6, atol=0)


@fault("B11")
def test_a_row_that_sums_to_one_is_not_taken_for_probabilities(device: torch.device) -> None:
    row = torch.tensor([0.7, 0.3], device=device)
    assert cases.token_probs(row).tolist() == pytest.approx(row.softmax(-1).tolist(), rel=1e-6)


@fault("B12")
def test_a_bad_draft_is_mostly_rejected(backend: str, device: torch.device) -> None:
    batch = 8 if interpreted(backend) else 10_000
    result = specker.verify(
        torch.zeros((batch, 1), dtype=torch.int64, device=device),
        cases.log([0.01, 0.99], device).expand(batch, 2, 2),
        cases.log([0.99, 0.01], device).expand(batch, 1, 2),
        seed=3,
    )
    rate, mean = float(result.num_accepted.double().mean()), 0.01 / 0.99
    assert abs(rate - mean) <= 4 * (mean * (1 - mean) / batch) ** 0.5


@fault("B11")
def test_a_draft_tempered_apart_is_said_so_by_its_own_parameters(device: torch.device) -> None:
    target, draft = torch.tensor([1.0, 0.0, 0.3], device=device), torch.tensor([0.0, 0.5, 0.2], device=device)
    result = specker.verify(
        torch.tensor([[1]], device=device),
        target.expand(1, 2, 3),
        draft.expand(1, 1, 3),
        temperature=0.5,
        draft_sampling=Sampling(temperature=2.0),
        seed=0,
        return_accept_probs=True,
    )
    ratio = ((target.double() / 0.5).softmax(-1) / (draft.double() / 2.0).softmax(-1))[1]
    assert result.accept_probs is not None
    assert float(result.accept_probs[0, 0]) == pytest.approx(float(ratio), rel=1e-6)
