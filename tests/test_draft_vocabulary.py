"""Reduced draft vocabularies: as if the draft's columns had been added into the target's ids."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

import specker

from . import adjusted_rows, laws
from .adjusted_rows import BATCH, GAMMA, VOCAB, assert_same, make_rows, make_uniforms

generator = adjusted_rows.generator

MAPS = {
    "a permutation": [2, 0, 1],
    "two columns share an id": [1, 1, 0],
    "ids far apart": [69, 3, 40],
}


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("with_receipt", [False, True], ids=["rows", "receipt"])
@pytest.mark.parametrize("name", MAPS)
def test_a_reduced_draft_vocabulary_equals_its_dense_rows(
    name: str, with_receipt: bool, generator: torch.Generator
) -> None:
    target, uniforms = make_rows(generator, GAMMA + 1), make_uniforms(generator)
    draft = make_rows(generator, GAMMA, vocab=3) * 2
    ids = torch.tensor(MAPS[name])
    steps = [specker.sample(draft[:, step], temperature=0.8, seed=1, position=step) for step in range(GAMMA)]
    tokens = ids[torch.stack([step.token_ids for step in steps], dim=1)]
    dense = torch.zeros(BATCH, GAMMA, VOCAB).index_add_(-1, ids, (draft.double() / 0.8).softmax(-1).float())
    receipt = specker.DraftReceipt.stack([step.receipt for step in steps]) if with_receipt else None
    got = specker.verify(
        tokens, target, draft, draft_to_target_ids=ids, draft_receipt=receipt, temperature=0.8, uniforms=uniforms,
        return_accept_probs=True,
    )  # fmt: skip
    wanted = specker.verify(
        tokens, target, draft_probs=dense, temperature=0.8, uniforms=uniforms, return_accept_probs=True
    )
    assert_same(got, wanted)
    torch.testing.assert_close(got.accept_probs, wanted.accept_probs, rtol=1e-5, atol=1e-6)


@pytest.mark.law
@pytest.mark.usefixtures("on_backend")
def test_the_law_under_a_reduced_draft_vocabulary_is_exact(device: torch.device) -> None:
    # Columns 0 and 2 share target id 1: the draft's mass on it is 2/3, and ids 0 and 3 have none.
    rows = laws.Rows(
        (Fraction(1, 4), Fraction(1, 3), Fraction(5, 12), Fraction(0)),
        (Fraction(0), Fraction(2, 3), Fraction(1, 3), Fraction(0)),
    )
    columns = torch.tensor([1 / 2, 1 / 3, 1 / 6], device=device).log()

    def verify(
        tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor, **keywords: Any
    ) -> specker.VerifyResult:
        ids = torch.tensor([1, 2, 1], device=device)
        return specker.verify(tokens, target, columns.expand(*draft.shape[:2], 3), draft_to_target_ids=ids, **keywords)

    law = laws.enumerated_law(verify, rows, gamma=1, device=device)
    assert sum(law.values()) == 1
    for key, wanted in laws.joint_law(
        *(_repeated(probs, count) for probs, count in ((rows.target, 2), (rows.draft, 1))), gamma=1
    ).items():
        assert float(law.get(key, Fraction(0))) == pytest.approx(wanted, abs=1e-12)


def _repeated(probs: tuple[Fraction, ...], count: int) -> Any:
    return torch.tensor([[float(value) for value in probs]] * count, dtype=torch.float64).numpy()
