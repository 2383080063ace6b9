"""Faults seen in other systems: vocabularies that differ, padded columns, masks."""

from __future__ import annotations

import math

import pytest
import torch

import specker
from specker import Status

from . import cases
from .cases import ALMOST_ONE, Round
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")


@fault("B93")
@pytest.mark.parametrize("vocabs", [(3, 4), (4, 3)], ids=["draft wider", "draft narrower"])
@pytest.mark.parametrize("rejects", [False, True], ids=["accepted", "rejected"])
def test_vocabularies_that_differ_are_refused_whatever_is_accepted(
    vocabs: tuple[int, int], rejects: bool, device: torch.device
) -> None:
    target_vocab, draft_vocab = vocabs
    target = torch.zeros((1, 2, target_vocab), device=device)
    target[..., 0] = -9.0 if rejects else 9.0
    tokens, draft = torch.tensor([[0]], device=device), torch.zeros((1, 1, draft_vocab), device=device)
    got = rf"expected shape \(1, 1, {target_vocab}\), got \(1, 1, {draft_vocab}\)"
    with pytest.raises(ValueError, match=f"draft_logits: {got}"):
        specker.verify(tokens, target, draft, seed=0)
    with pytest.raises(ValueError, match=f"draft_probs: {got}"):
        specker.verify(tokens, target, draft_probs=draft.softmax(-1), seed=0)


ROUNDS = [
    fault_case("B93", Round([3], [[0.2, 0.3, 0.5]] * 2, None, [(0.0, 0.4)] * 2, [1], Status.DRAFT_TOKEN_OUT_OF_RANGE)),
    *(
        fault_case(
            "B95", Round([token], [[0, 0, 1, 0]] * 2, [[0.25] * 4], [(0.0, emission)] * 2, [2]), f"{token}, {emission}"
        )
        for token in (0, 3)
        for emission in (0.0, 0.5, ALMOST_ONE)
    ),
    fault_case("B95", Round([2], [[0, 0, 1, 0]] * 2, [[0.25] * 4], [(ALMOST_ONE, 0.5)] * 2, [2, 2]), "allowed token"),
    fault_case(
        "B95",
        Round([1], [[0] * 4, [1, 0, 0, 0]], [[0.25] * 4], [(0.0, 0.5)] * 2, [], Status.TARGET_INVALID, num_accepted=0),
        "all masked",
    ),
    fault_case(
        "B95",
        Round([1], [[0, 1, 0, 0], [0] * 4], None, [(0.5, 0.5)] * 2, [1], Status.TARGET_INVALID, num_accepted=1),
        "bonus row all masked",
    ),
]


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_has_its_right_result(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B94")
def test_columns_sliced_away_are_never_drawn(device: torch.device) -> None:
    full = torch.zeros((2, 3, 16), device=device)
    full[..., 14] = 30.0
    target, draft = full[..., :13], full[:, :2, :13]
    for emission in (0.0, 0.5, ALMOST_ONE):
        draws = cases.uniforms([[(0.5, emission)] * 3] * 2, device)
        result = specker.verify(torch.tensor([[14, 0], [0, 14]], device=device), target, draft, uniforms=draws)
        emitted = [
            tokens[:length] for tokens, length in zip(result.token_ids.tolist(), result.num_emitted, strict=True)
        ]
        assert all(0 <= token < 13 for tokens in emitted for token in tokens)
        assert result.status.tolist() == [Status.DRAFT_TOKEN_OUT_OF_RANGE] * 2
    assert max(specker.sample(target[:, 0].expand(2, 13), seed=0).token_ids.tolist()) < 13
    assert cases.bonus_tokens(target[0, 0], [ALMOST_ONE]) == [12]


@fault("B95")
def test_masked_tokens_are_neither_accepted_nor_emitted(device: torch.device) -> None:
    # Odd ids are masked in the target only, as a grammar does after the draft has run.
    target, draft = cases.random_rows(12).to(device), cases.random_rows(12, seed=1).to(device)
    target[1::2] = -math.inf
    tokens = torch.arange(12, device=device).view(12, 1)
    result = specker.verify(
        tokens,
        target.expand(12, 2, 12),
        draft.expand(12, 1, 12),
        uniforms=cases.uniforms([[(0.0, 0.6)] * 2] * 12, device),
    )
    assert result.num_accepted.tolist() == [1, 0] * 6
    assert all(token % 2 == 0 for row in result.token_ids.tolist() for token in row if token >= 0)
    assert result.status.tolist() == [0] * 12


@fault("B96")
def test_acceptance_does_not_depend_on_the_order_of_the_vocabulary(device: torch.device) -> None:
    target, draft = cases.random_rows(3, 12), cases.random_rows(2, 12, seed=1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    where = order.argsort()
    tokens = torch.tensor([[3, 8], [0, 11]])

    def acceptance(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> specker.VerifyResult:
        return specker.verify(
            tokens.to(device), target.to(device).expand(2, 3, 12), draft.to(device).expand(2, 2, 12), top_k=7,
            top_p=0.9, seed=0, return_accept_probs=True,
        )  # fmt: skip

    plain = acceptance(tokens, target, draft)
    shuffled = acceptance(where[tokens], target[:, order], draft[:, order])
    assert shuffled.num_accepted.tolist() == plain.num_accepted.tolist()
    assert shuffled.accept_probs is not None
    assert plain.accept_probs is not None
    torch.testing.assert_close(shuffled.accept_probs, plain.accept_probs, rtol=1e-6, atol=0)


@fault("B97")
def test_emitted_tokens_can_be_fed_to_the_next_round(device: torch.device) -> None:
    vocab, gamma = 7, 3
    target = cases.random_rows(4, gamma + 1, vocab).to(device)
    tokens = torch.tensor([[-1, 2, 3], [1, 99, 3], [1, 2, -5], [0, 0, 0]], device=device)
    for step in range(3):
        result = specker.verify(tokens, target, seed=step, position=step)
        lengths = result.num_emitted.tolist()
        emitted = [row[:length] for row, length in zip(result.token_ids.tolist(), lengths, strict=True)]
        assert all(row and all(0 <= token < vocab for token in row) for row in emitted)
        # The last token of each sequence is found by its length and opens the next round.
        last = result.token_ids.gather(1, result.num_emitted.unsqueeze(-1) - 1)
        assert last.flatten().tolist() == [row[-1] for row in emitted]
        tokens = last.expand(4, gamma)
