"""Rows whose entries have every order of bits: the C++ kernels compare logits as integers, which signs turn round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import specker

from .differential import run

pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["cpp"]), reason=specker.available_backends()["cpp"] or "never"
)
# Two whole shards and one that ends in the middle of a chunk.
VOCAB = 2 * 4096 + 700
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 3, VOCAB, generator=generator) * 2.5


def _zero_at_most(generator: torch.Generator) -> torch.Tensor:
    rows = _normal(generator)
    return rows - rows.amax(-1, keepdim=True)


def _negative_zeros(generator: torch.Generator) -> torch.Tensor:
    rows = -_normal(generator).abs()
    return torch.where(rows > -1.0, torch.tensor(-0.0), rows)


def _late_sign(generator: torch.Generator) -> torch.Tensor:
    rows = _normal(generator).log_softmax(-1)
    rows[..., 3000], rows[..., VOCAB - 1] = 2.0, 3.0
    return rows


def _first_chunk_positive(generator: torch.Generator) -> torch.Tensor:
    rows = -_normal(generator).abs()
    rows[..., 5], rows[..., 4096 + 5], rows[..., 8192 + 5] = 1.0, 0.5, 0.25
    return rows


def _mostly_masked(generator: torch.Generator) -> torch.Tensor:
    rows = _normal(generator)
    rows[..., 40:8500] = -torch.inf
    return rows


ROWS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "both signs": _normal,
    "log-probabilities: negative": lambda generator: _normal(generator).log_softmax(-1),
    "the largest is 0": _zero_at_most,
    "negative zeros": _negative_zeros,
    "a positive entry behind negative ones": _late_sign,
    "positive in the first chunk of a shard only": _first_chunk_positive,
    "positive, the bound below which nothing weighs too": lambda generator: _normal(generator) + 240.0,
    "far below zero": lambda generator: _normal(generator) - 240.0,
    "mostly masked": _mostly_masked,
}


def _call(rows: torch.Tensor, dtype: torch.dtype, temperature: float, seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    target = rows.to(dtype)
    draft = (rows[:, :2] + torch.randn(4, 2, VOCAB, generator=generator) * 0.5).to(dtype)
    law = (draft.double() / temperature).softmax(-1).view(-1, VOCAB)
    scale = torch.full((1,), temperature, dtype=torch.float64)
    names = ("draft_receipt", "num_draft_tokens", "cu_num_draft_tokens", "draft_index", "top_k", "top_p", "min_p",
             "draft_top_k", "draft_top_p", "draft_min_p", "bias_offsets", "bias_token_ids", "bias_values",
             "allowed_tokens", "draft_bias_offsets", "draft_bias_token_ids", "draft_bias_values",
             "draft_allowed_tokens", "draft_columns", "draft_column_target_ids", "uniforms")  # fmt: skip
    return dict.fromkeys(names, None) | {
        "draft_token_ids": torch.multinomial(law, 1, generator=generator).view(4, 2), "target": target, "draft": draft,
        "temperature": scale, "draft_temperature": scale, "seed": torch.arange(4) + 4 * seed,
        "position": torch.zeros(1, dtype=torch.int64), "max_num_draft_tokens": 2, "target_is_probs": False,
        "draft_is_probs": False, "return_logprobs": True, "return_accept_probs": True,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_in_any_order_of_bits_agree_with_the_reference(kind: str, temperature: float, dtype: torch.dtype) -> None:
    for seed in range(4):
        call = _call(ROWS[kind](torch.Generator().manual_seed(seed)), dtype, temperature, seed)
        for changes in ({}, {"return_accept_probs": False}):
            outcome, expected = run("cpp", call, **changes), run("reference", call, **changes)
            for name in ("token_ids", "num_accepted", "status"):
                assert torch.equal(outcome[name], expected[name]), name
            assert torch.allclose(outcome["logprobs"], expected["logprobs"], atol=2e-5, rtol=2e-6)
            assert torch.allclose(outcome["accept_probs"], expected["accept_probs"], atol=5e-6)


@pytest.mark.parametrize("signed", [False, True], ids=["NaN", "NaN with a sign"])
@pytest.mark.parametrize("place", [3, 2000, 4096, 8191, VOCAB - 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["both signs", "log-probabilities: negative", "mostly masked"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_nan_of_any_sign_makes_its_row_invalid(
    kind: str, dtype: torch.dtype, place: int, signed: bool, temperature: float
) -> None:
    for tensor, bit in (("target", specker.Status.TARGET_INVALID), ("draft", specker.Status.DRAFT_INVALID)):
        call = _call(ROWS[kind](torch.Generator().manual_seed(place)), dtype, 1.0, place)
        call["temperature"] = torch.full((1,), temperature, dtype=torch.float64)
        rows = call[tensor]
        assert isinstance(rows, torch.Tensor)
        words = rows.view(torch.int32 if dtype == torch.float32 else torch.int16)
        # Conversions between dtypes may drop the sign, so it is set in the bits.
        words[1, 0, place] = -1 if signed else torch.iinfo(words.dtype).max
        assert bool(rows[1, 0, place].isnan())
        for changes in ({"return_accept_probs": True}, {"return_accept_probs": False}):
            outcome, expected = run("cpp", call, **changes), run("reference", call, **changes)
            assert torch.equal(outcome["status"], expected["status"])
            assert torch.equal(outcome["token_ids"], expected["token_ids"])
            if tensor == "target" or temperature > 0:
                assert outcome["status"].tolist()[1] & bit
