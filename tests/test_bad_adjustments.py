"""Biases, masks and maps that cannot be meant, refused in words."""

from __future__ import annotations

import math

import pytest
import torch

import specker
from specker import LogitBias

from . import adjusted_rows
from .adjusted_rows import BATCH, GAMMA, VOCAB, WORDS, make_rows

generator = adjusted_rows.generator

_ZERO = torch.zeros(1, dtype=torch.int64)
BAD = {
    "not a bias": ({"logit_bias": (1, 2)}, TypeError, "logit_bias: expected a LogitBias, got tuple"),
    "a sequence out of range": (
        {"logit_bias": LogitBias(_ZERO + 3, _ZERO, torch.zeros(1))},
        ValueError,
        r"logit_bias.sequence_ids: expected ids in 0..2, got 3",
    ),
    "a token out of range": (
        {"logit_bias": LogitBias(_ZERO, _ZERO - 1, torch.zeros(1))},
        ValueError,
        r"logit_bias.token_ids: expected ids in 0..69, got -1",
    ),
    "a NaN bias": (
        {"logit_bias": LogitBias(_ZERO, _ZERO, torch.tensor([math.nan]))},
        ValueError,
        "logit_bias.values: expected finite values or -inf, got",
    ),
    "more than a float32 holds, on probabilities": (
        {"logit_bias": LogitBias(_ZERO, _ZERO, torch.tensor([100.0]))},
        ValueError,
        "logit_bias.values: expected at most 80 on probabilities, got 100",
    ),
    "lists of unequal length": (
        {"logit_bias": LogitBias(_ZERO, torch.zeros(2, dtype=torch.int64), torch.zeros(1))},
        ValueError,
        r"logit_bias.token_ids: expected shape \(1,\), got \(2,\)",
    ),
    "a mask of booleans": (
        {"allowed_tokens": torch.ones(BATCH, VOCAB, dtype=torch.bool)},
        TypeError,
        "allowed_tokens: expected dtype int32, got bool",
    ),
    "a mask too narrow": (
        {"allowed_tokens": torch.ones(BATCH, 2, dtype=torch.int32)},
        ValueError,
        r"allowed_tokens: expected at least 3 words of 32 tokens, got shape \(3, 2\)",
    ),
    "a mask of other rows": (
        {"allowed_tokens": torch.ones(BATCH, 2, WORDS, dtype=torch.int32)},
        ValueError,
        r"allowed_tokens: expected shape \(3, 3, \*\), got \(3, 2, 3\)",
    ),
    "a strided mask": (
        {"allowed_tokens": torch.ones(BATCH, 2 * WORDS, dtype=torch.int32)[:, ::2]},
        ValueError,
        "allowed_tokens: expected a contiguous last axis",
    ),
    "a map of the wrong length": (
        {"draft_to_target_ids": torch.zeros(5, dtype=torch.int64)},
        ValueError,
        r"draft_to_target_ids: expected shape \(70,\), got \(5,\)",
    ),
    "a map outside the vocabulary": (
        {"draft_to_target_ids": torch.full((VOCAB,), VOCAB)},
        ValueError,
        "draft_to_target_ids: expected ids in 0..69, got 70",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_adjustments_raise_in_words(name: str, generator: torch.Generator) -> None:
    keywords, error, message = BAD[name]
    call = specker.verify_from_probs if "on probabilities" in name else specker.verify
    rows = make_rows(generator, 3).softmax(-1), make_rows(generator, 2).softmax(-1)
    with pytest.raises(error, match=message):
        call(torch.zeros(BATCH, GAMMA, dtype=torch.int64), *rows, seed=0, **keywords)


@pytest.mark.parametrize("name", ["draft_logit_bias", "draft_allowed_tokens", "draft_to_target_ids"])
def test_draft_adjustments_without_draft_rows_raise(name: str, generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected draft_logits with it, got None"):
        specker.verify(torch.zeros(BATCH, GAMMA, dtype=torch.int64), make_rows(generator, 3), **{name: _ZERO}, seed=0)


def test_final_draft_probabilities_refuse_what_would_change_them(generator: torch.Generator) -> None:
    probs = make_rows(generator, 2).softmax(-1)
    with pytest.raises(ValueError, match="draft_allowed_tokens: expected None with draft_probs, which are final"):
        specker.verify(
            torch.zeros(BATCH, GAMMA, dtype=torch.int64),
            make_rows(generator, 3),
            draft_probs=probs,
            draft_allowed_tokens=torch.ones(BATCH, WORDS, dtype=torch.int32),
            seed=0,
        )


def test_a_receipt_of_adjusted_rows_is_refused_on_plain_ones(generator: torch.Generator) -> None:
    draft = make_rows(generator, 1)
    words = torch.full((BATCH, WORDS), -1, dtype=torch.int32)
    drawn = specker.sample(draft[:, 0], allowed_tokens=words, seed=0)
    receipt = specker.DraftReceipt.stack([drawn.receipt])
    with pytest.raises(ValueError, match="expected one made without a logit bias or mask, got one with"):
        specker.verify(drawn.token_ids[:, None], make_rows(generator, 2), draft, draft_receipt=receipt, seed=0)
