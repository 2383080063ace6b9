"""Logit bias, allowed-token masks and reduced draft vocabularies: as if the rows themselves had been changed."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

import specker
from specker import LogitBias, Status

from . import laws

BATCH, GAMMA, VOCAB = 3, 2, 70
WORDS = 3


@pytest.fixture
def generator() -> torch.Generator:
    """Return a generator of fixed seed."""
    return torch.Generator().manual_seed(4)


def _rows(generator: torch.Generator, count: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(BATCH, count, vocab, generator=generator)


def _mask(generator: torch.Generator, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed words, the same as booleans a token); token 7 is always allowed."""
    allowed = torch.rand(*leading, WORDS * 32, generator=generator) < 0.5
    allowed[..., 7] = True
    bits = (allowed.reshape(*leading, WORDS, 32).long() << torch.arange(32)).sum(-1)
    words = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return words, allowed[..., :VOCAB]


def _bias() -> tuple[LogitBias, torch.Tensor]:
    """Return an unsorted bias with duplicates and a ban, and the dense values to add."""
    bias = LogitBias(
        torch.tensor([2, 0, 0, 2, 0], dtype=torch.int32),
        torch.tensor([69, 33, 0, 69, 33]),
        torch.tensor([1.5, -2.0, 4.0, 0.25, -1.0]),
    )
    dense = torch.zeros(BATCH, VOCAB)
    dense[2, 69], dense[0, 33], dense[0, 0] = 1.75, -3.0, 4.0
    return bias, dense


def _uniforms(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(BATCH, GAMMA + 1, 2, dtype=torch.float64, generator=generator)


def _assert_same(got: specker.VerifyResult, wanted: specker.VerifyResult) -> None:
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    assert got.status.tolist() == wanted.status.tolist()
    if got.logprobs is not None and wanted.logprobs is not None:
        torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}], ids=["plain", "filtered"])
@pytest.mark.parametrize("by_row", [False, True], ids=["mask a sequence", "mask a row"])
def test_target_rows_are_adjusted_as_they_are_loaded(
    by_row: bool, filters: dict[str, Any], generator: torch.Generator
) -> None:
    target, draft, uniforms = _rows(generator, GAMMA + 1), _rows(generator, GAMMA), _uniforms(generator)
    words, allowed = _mask(generator, BATCH, GAMMA + 1) if by_row else _mask(generator, BATCH)
    bias, dense = _bias()
    tokens = torch.full((BATCH, GAMMA), 7)
    adjusted = (target + dense[:, None]).masked_fill(~(allowed if by_row else allowed[:, None]), -math.inf)
    keywords: dict[str, Any] = {"uniforms": uniforms, "return_logprobs": True, **filters}
    # Draft rows stay as they are; top-k of a draft row may lose token 7, whose bit both calls then set.
    got = specker.verify(tokens, target, draft, logit_bias=bias, allowed_tokens=words, **keywords)
    _assert_same(got, specker.verify(tokens, adjusted, draft, **keywords))
    for row in range(BATCH):
        for position, token in enumerate(got.token_ids[row, : int(got.num_emitted[row])].tolist()):
            assert (allowed[row, position] if by_row else allowed[row])[token]


@pytest.mark.usefixtures("on_backend")
def test_draft_rows_are_adjusted_by_their_own_arguments(generator: torch.Generator) -> None:
    target, draft, uniforms = _rows(generator, GAMMA + 1), _rows(generator, GAMMA), _uniforms(generator)
    words, allowed = _mask(generator, BATCH, GAMMA)
    bias, dense = _bias()
    adjusted = (draft + dense[:, None]).masked_fill(~allowed, -math.inf)
    tokens = torch.full((BATCH, GAMMA), 7)
    got = specker.verify(tokens, target, draft, draft_logit_bias=bias, draft_allowed_tokens=words, uniforms=uniforms)
    _assert_same(got, specker.verify(tokens, target, adjusted, uniforms=uniforms))


@pytest.mark.usefixtures("on_backend")
def test_flat_form_takes_masks_a_sequence_and_a_row(generator: torch.Generator) -> None:
    bounds = torch.tensor([0, 2, 2, 3])
    target = torch.randn(6, VOCAB, generator=generator)
    draft = torch.randn(3, VOCAB, generator=generator)
    uniforms = torch.rand(6, 2, dtype=torch.float64, generator=generator)
    sequence_of = torch.tensor([0, 0, 0, 1, 2, 2])
    tokens = torch.tensor([7, 7, 7])
    flat: dict[str, Any] = {"cu_num_draft_tokens": bounds, "max_num_draft_tokens": 2, "uniforms": uniforms}
    words, allowed = _mask(generator, BATCH)
    bias, dense = _bias()
    adjusted = (target + dense[sequence_of]).masked_fill(~allowed[sequence_of], -math.inf)
    got = specker.verify_flat(tokens, target, draft, logit_bias=bias, allowed_tokens=words, **flat)
    _assert_same(got, specker.verify_flat(tokens, adjusted, draft, **flat))
    words, allowed = _mask(generator, 6)
    draft_words, draft_allowed = _mask(generator, 3)
    got = specker.verify_flat(tokens, target, draft, allowed_tokens=words, draft_allowed_tokens=draft_words, **flat)
    masked = target.masked_fill(~allowed, -math.inf), draft.masked_fill(~draft_allowed, -math.inf)
    _assert_same(got, specker.verify_flat(tokens, *masked, **flat))


@pytest.mark.usefixtures("on_backend")
def test_flat_draft_masks_are_one_a_row_even_where_rows_and_sequences_are_as_many() -> None:
    bounds, tokens = torch.tensor([0, 2, 2]), torch.tensor([0, 2])
    words = torch.tensor([[0b0011], [0b1100]], dtype=torch.int32)
    flat = specker.verify_flat(
        tokens, torch.zeros(4, 8), torch.zeros(2, 8), cu_num_draft_tokens=bounds, max_num_draft_tokens=2,
        draft_allowed_tokens=words, return_accept_probs=True, seed=0,
    )  # fmt: skip
    padded = specker.verify(
        tokens[None], torch.zeros(1, 3, 8), torch.zeros(1, 2, 8), draft_allowed_tokens=words[None],
        return_accept_probs=True, seed=0,
    )  # fmt: skip
    assert flat.accept_probs is not None
    assert padded.accept_probs is not None
    assert flat.accept_probs[0].tolist() == padded.accept_probs[0].tolist() == [0.25, 0.25]


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_entries_out_of_range_reach_no_kernel_in_a_trace() -> None:
    def draw(token: int) -> torch.Tensor:
        bias = LogitBias(torch.tensor([1, 1, 3]), torch.tensor([0, 2, token]), torch.full((3,), 50.0))
        return specker.sample(torch.zeros(4, 40), logit_bias=bias, seed=1).token_ids

    traced = torch.compile(draw, fullgraph=True, backend="eager")
    assert traced(-79).tolist() == traced(10**6).tolist()
    assert int(traced(-79)[1]) in (0, 2)


@pytest.mark.usefixtures("on_backend")
def test_probabilities_are_multiplied_and_masked(generator: torch.Generator) -> None:
    target, draft, uniforms = _rows(generator, 3).softmax(-1), _rows(generator, 2).softmax(-1), _uniforms(generator)
    words, allowed = _mask(generator, BATCH)
    bias, dense = _bias()
    adjusted = (target * dense.exp()[:, None]).masked_fill(~allowed[:, None], 0.0)
    tokens = torch.full((BATCH, GAMMA), 7)
    got = specker.verify_from_probs(tokens, target, draft, logit_bias=bias, allowed_tokens=words, uniforms=uniforms)
    _assert_same(got, specker.verify_from_probs(tokens, adjusted, draft, uniforms=uniforms))


@pytest.mark.usefixtures("on_backend")
def test_sample_and_its_receipt_see_the_adjusted_row(generator: torch.Generator) -> None:
    logits = torch.randn(BATCH, VOCAB, generator=generator)
    words, allowed = _mask(generator, BATCH)
    bias, dense = _bias()
    adjusted = (logits + dense).masked_fill(~allowed, -math.inf)
    got = specker.sample(logits, logit_bias=bias, allowed_tokens=words, top_p=0.9, seed=3)
    wanted = specker.sample(adjusted, top_p=0.9, seed=3)
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    torch.testing.assert_close(got.receipt.token_logit, wanted.receipt.token_logit, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.receipt.log_sum_exp, wanted.receipt.log_sum_exp, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("on_backend")
def test_receipts_of_adjusted_draws_verify_like_their_rows(generator: torch.Generator) -> None:
    target, draft, uniforms = _rows(generator, GAMMA + 1), _rows(generator, GAMMA), _uniforms(generator)
    words, _ = _mask(generator, BATCH)
    steps = [specker.sample(draft[:, step], allowed_tokens=words, seed=5, position=step) for step in range(GAMMA)]
    tokens = torch.stack([step.token_ids for step in steps], dim=1)
    keywords: dict[str, Any] = {
        "draft_allowed_tokens": words.unsqueeze(1).expand(-1, GAMMA, -1),
        "uniforms": uniforms,
    }
    receipt = specker.DraftReceipt.stack([step.receipt for step in steps])
    with_receipt = specker.verify(tokens, target, draft, draft_receipt=receipt, **keywords)
    _assert_same(with_receipt, specker.verify(tokens, target, draft, **keywords))


@pytest.mark.usefixtures("on_backend")
def test_a_row_whose_every_token_is_forbidden_sets_its_status(generator: torch.Generator) -> None:
    words = torch.full((BATCH, WORDS), -1, dtype=torch.int32)
    words[1] = 0
    tokens = torch.full((BATCH, 0), 7)
    got = specker.verify(tokens, _rows(generator, 1), allowed_tokens=words, seed=0)
    assert got.status.tolist() == [0, Status.TARGET_INVALID, 0]
    assert got.num_emitted.tolist() == [1, 0, 1]


@pytest.mark.usefixtures("on_backend")
def test_nan_behind_a_mask_does_no_harm(generator: torch.Generator) -> None:
    target = _rows(generator, 1)
    target[:, :, 40] = math.nan
    words = torch.full((BATCH, WORDS), -1, dtype=torch.int32)
    words[:, 1] = ~(1 << 8)
    got = specker.verify(torch.full((BATCH, 0), 7), target, allowed_tokens=words, seed=0)
    assert got.status.tolist() == [0, 0, 0]


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
    target, uniforms = _rows(generator, GAMMA + 1), _uniforms(generator)
    draft = _rows(generator, GAMMA, vocab=3) * 2
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
    _assert_same(got, wanted)
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


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_adjusted_rounds_compile_as_one_graph(generator: torch.Generator) -> None:
    target, draft = _rows(generator, GAMMA + 1), _rows(generator, GAMMA)
    words, _ = _mask(generator, BATCH)
    bias, _ = _bias()
    tokens = torch.full((BATCH, GAMMA), 7)

    def run(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        drawn = specker.sample(draft[:, 0], allowed_tokens=words, logit_bias=bias, seed=4)
        verified = specker.verify(
            tokens, target, draft, logit_bias=bias, allowed_tokens=words, draft_allowed_tokens=words, seed=3
        )
        return torch.cat([verified.token_ids, drawn.token_ids.unsqueeze(1)], dim=1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(target, draft), run(target, draft))


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
        r"logit_bias.token_ids: expected shape \(1\), got \(2,\)",
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
        r"draft_to_target_ids: expected shape \(70\), got \(5,\)",
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
    rows = _rows(generator, 3).softmax(-1), _rows(generator, 2).softmax(-1)
    with pytest.raises(error, match=message):
        call(torch.zeros(BATCH, GAMMA, dtype=torch.int64), *rows, seed=0, **keywords)


@pytest.mark.parametrize("name", ["draft_logit_bias", "draft_allowed_tokens", "draft_to_target_ids"])
def test_draft_adjustments_without_draft_rows_raise(name: str, generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected draft_logits with it, got None"):
        specker.verify(torch.zeros(BATCH, GAMMA, dtype=torch.int64), _rows(generator, 3), **{name: _ZERO}, seed=0)


def test_final_draft_probabilities_refuse_what_would_change_them(generator: torch.Generator) -> None:
    probs = _rows(generator, 2).softmax(-1)
    with pytest.raises(ValueError, match="draft_allowed_tokens: expected None with draft_probs, which are final"):
        specker.verify(
            torch.zeros(BATCH, GAMMA, dtype=torch.int64),
            _rows(generator, 3),
            draft_probs=probs,
            draft_allowed_tokens=torch.ones(BATCH, WORDS, dtype=torch.int32),
            seed=0,
        )


def test_a_receipt_of_adjusted_rows_is_refused_on_plain_ones(generator: torch.Generator) -> None:
    draft = _rows(generator, 1)
    words = torch.full((BATCH, WORDS), -1, dtype=torch.int32)
    drawn = specker.sample(draft[:, 0], allowed_tokens=words, seed=0)
    receipt = specker.DraftReceipt.stack([drawn.receipt])
    with pytest.raises(ValueError, match="expected one made without a logit bias or mask, got one with"):
        specker.verify(drawn.token_ids[:, None], _rows(generator, 2), draft, draft_receipt=receipt, seed=0)
