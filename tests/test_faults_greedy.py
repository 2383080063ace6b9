"""Faults seen in other systems: greedy sequences and temperature."""

from __future__ import annotations

import pytest
import torch

import specker
from specker import operators

from . import cases
from .cases import ALMOST_ONE, Round, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
INF = float("inf")

ROUNDS = [
    fault_case(
        "B56", Round([0], [[1 / 3] * 3] * 2, [[1 / 3] * 3], [(0.9, 0.9)] * 2, [0, 0], sampling={"temperature": 0})
    ),
    fault_case(
        "B56", Round([1], [[1 / 3] * 3] * 2, None, [(0.0, 0.9)] * 2, [0], sampling={"temperature": 0.0}), "other token"
    ),
    fault_case(
        "B56", Round([2], [[0.1, 0.45, 0.45]] * 2, None, [(0.0, 0.9)] * 2, [1], sampling={"top_p": 0.0}), "top-p of 0"
    ),
    fault_case(
        "B58",
        Round([0], [[0.3, 0.5, 0.2]] * 2, [[0.2, 0.4, 0.4]], [(0.0, 0.0)] * 2, [1], sampling={"temperature": 0.0}),
    ),
    fault_case(
        "B58",
        Round([0], [[0.3, 0.5, 0.2]] * 2, [[0.2, 0.4, 0.4]], [(0.0, 0.0)] * 2, [0, 0]),
        "the same sampled",
    ),
]


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_has_its_right_result(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B51", "B52")
@pytest.mark.parametrize("greedy", [0.0, 1e-6, 1e-12])
def test_greedy_beside_sampling_takes_the_arg_max_and_leaves_the_other_alone(
    greedy: float, device: torch.device
) -> None:
    row = torch.tensor([1.0, -INF, 2.0], device=device)
    draws = cases.uniforms([[(0.999, 0.2)] * 2] * 2, device)
    tokens, temperature = torch.tensor([[2], [2]], device=device), torch.tensor([greedy, 0.7], device=device)
    both = specker.verify(
        tokens,
        row.expand(2, 2, 3),
        temperature=temperature,
        uniforms=draws,
        return_logprobs=True,
        return_accept_probs=True,
    )
    assert both.token_ids.tolist() == [[2, 2], [0, -1]]
    assert both.status.tolist() == [0, 0]
    alone = specker.verify(
        tokens[1:], row.expand(1, 2, 3), temperature=temperature[1:], uniforms=draws[1:], return_logprobs=True,
        return_accept_probs=True,
    )  # fmt: skip
    assert cases.sequence_of(both, 1) == cases.sequence_of(alone, 0)
    assert both.logprobs is not None
    assert both.logprobs[0].tolist() == [0.0, 0.0]
    assert both.accept_probs is not None
    assert both.accept_probs[0].tolist() == [1.0]


@fault("B53")
def test_greedy_in_a_mixed_batch_returns_ids(device: torch.device) -> None:
    drafted = torch.tensor([-8.0, -3.0, -2.0, -1.0, 0.0, 9.0, 1.0, 2.0], device=device)
    bonus = torch.zeros(8, device=device)
    bonus[7] = 5.0
    result = specker.verify(
        torch.tensor([[5], [5]], device=device),
        torch.stack([drafted, bonus]).expand(2, 2, 8),
        temperature=torch.tensor([0.0, 0.7], device=device),
        seed=0,
    )
    assert result.token_ids.tolist()[0] == [5, 7]


@fault("B54")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-4, 1e-12])
def test_a_tiny_temperature_on_half_precision_logits_takes_the_arg_max(
    temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    row = torch.tensor([11.06, 2.96, 2.88], device=device).to(dtype)
    assert cases.bonus_tokens(row, [0.0, 0.5, ALMOST_ONE], temperature=temperature) == [0, 0, 0]
    assert cases.token_probs(row, temperature=temperature).tolist() == [1.0, 0.0, 0.0]
    drawn = specker.sample(row.expand(4, 3), temperature=temperature, seed=0)
    assert drawn.token_ids.tolist() == [0] * 4
    assert drawn.status.tolist() == [0] * 4


@fault("B55")
@pytest.mark.parametrize("kind", ["number", torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9.9e-6, 9.999999e-6, 1e-5, 1.1e-5])
def test_sample_and_verify_agree_on_what_is_greedy(
    temperature: float, kind: str | torch.dtype, backend: str, device: torch.device
) -> None:
    if interpreted(backend) and (temperature not in (1e-5, 1.1e-5) or kind == torch.float64):
        pytest.skip("the values near the threshold are enough for the interpreter")
    batch = 3
    given = temperature if isinstance(kind, str) else torch.full((batch,), temperature, dtype=kind, device=device)
    greedy = (temperature if isinstance(kind, str) else float(torch.tensor(temperature, dtype=kind))) < 1e-5
    # A tie: greedy takes the lowest id whatever the random number, sampling takes either.
    row = torch.zeros(2, device=device)
    emission = specker.random.uniforms(torch.arange(batch), 0, specker.random.DRAFT_PURPOSE)[1]
    sampled = (emission >= 0.5).long()
    assert 0 < int(sampled.sum()) < batch
    drawn = specker.sample(row.expand(batch, 2), temperature=given, seed=0)
    assert drawn.token_ids.tolist() == ([0] * batch if greedy else sampled.tolist())
    verified = specker.verify(
        torch.zeros((batch, 1), dtype=torch.int64, device=device),
        row.expand(batch, 2, 2),
        temperature=given,
        uniforms=cases.uniforms([[(0.1, 0.9), (0.1, 0.9)]] * batch, device),
        return_accept_probs=True,
    )
    assert verified.token_ids.tolist() == [[0, 0 if greedy else 1]] * batch
    assert verified.accept_probs is not None
    assert verified.accept_probs.flatten().tolist() == [1.0 if greedy else 0.5] * batch
    # With the receipt of the draw: greedy, the draft is one-hot at id 0 as the target is.
    checked = specker.verify(
        drawn.token_ids.unsqueeze(-1),
        row.expand(batch, 2, 2),
        row.expand(batch, 1, 2),
        temperature=given,
        draft_receipt=specker.DraftReceipt.stack([drawn.receipt]),
        seed=0,
    )
    assert checked.num_accepted.tolist() == [1] * batch
    assert checked.status.tolist() == [0] * batch


@fault("B55")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 9.9e-6, 1e-5, 1.1e-5])
def test_a_draft_row_that_a_greedy_sequence_does_not_read_may_hold_anything(
    temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    given = torch.tensor([temperature], dtype=dtype, device=device)
    result = specker.verify(
        torch.tensor([[1]], device=device),
        torch.tensor([[[0.0, 1.0, 0.0]] * 2], device=device),
        torch.full((1, 1, 3), float("nan"), device=device),
        temperature=given,
        seed=0,
    )
    greedy = float(given[0]) < 1e-5
    assert result.status.tolist() == [0 if greedy else specker.Status.DRAFT_INVALID]
    assert result.token_ids.tolist() == [[1, 1] if greedy else [1, -1]]


@fault("B59")
def test_no_random_number_reaches_a_greedy_sequence(backend: str, device: torch.device) -> None:
    target = cases.random_rows(2, 3, 11).to(device)
    target[1] = target[0]
    draft = cases.random_rows(2, 2, 11, seed=1).to(device)
    best = target[0].argmax(-1)
    for tokens, emitted in ((best[:2], best.tolist()), ((best[:2] + 1) % 11, [int(best[0]), -1, -1])):
        for uniform in (0.0, ALMOST_ONE) if interpreted(backend) else (0.0, 0.3, 0.999, ALMOST_ONE):
            result = specker.verify(
                tokens.expand(2, 2),
                target,
                draft,
                temperature=torch.tensor([0.0, 1.0], device=device),
                uniforms=cases.uniforms([[(uniform, uniform)] * 3] * 2, device),
            )
            assert result.token_ids.tolist()[0] == emitted


@fault("B60")
def test_a_missing_extension_is_said_before_anything_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend != "cpp":
        pytest.skip("only the C++ extension can be missing from an installed package")
    monkeypatch.setattr(operators, "_EXTENSION", False)
    with (
        pytest.raises(specker.BackendUnavailableError, match=r"the C\+\+ extension specker\._C is not installed"),
        specker.backend("cpp"),
    ):
        pass


@fault("B60")
def test_sampling_reaches_more_than_the_arg_max(device: torch.device) -> None:
    row = torch.tensor([0.0, 0.1, 0.0], device=device)
    drawn = specker.sample(row.expand(12, 3), seed=0).token_ids
    assert set(drawn.tolist()) == {0, 1, 2}
    assert cases.bonus_tokens(row, [0.1, 0.5, 0.9]) == [0, 1, 2]
