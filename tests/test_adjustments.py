"""Logit bias and allowed-token masks: as if the rows themselves had been changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import specker
from specker import LogitBias, Status

from . import adjusted_rows
from .adjusted_rows import BATCH, GAMMA, VOCAB, WORDS, assert_same, make_bias, make_mask, make_rows, make_uniforms

generator = adjusted_rows.generator


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}], ids=["plain", "filtered"])
@pytest.mark.parametrize("by_row", [False, True], ids=["mask a sequence", "mask a row"])
def test_target_rows_are_adjusted_as_they_are_loaded(
    by_row: bool, filters: dict[str, Any], generator: torch.Generator
) -> None:
    target, draft, uniforms = make_rows(generator, GAMMA + 1), make_rows(generator, GAMMA), make_uniforms(generator)
    words, allowed = make_mask(generator, BATCH, GAMMA + 1) if by_row else make_mask(generator, BATCH)
    bias, dense = make_bias()
    tokens = torch.full((BATCH, GAMMA), 7)
    adjusted = (target + dense[:, None]).masked_fill(~(allowed if by_row else allowed[:, None]), -math.inf)
    keywords: dict[str, Any] = {"uniforms": uniforms, "return_logprobs": True, **filters}
    # Draft rows stay as they are; top-k of a draft row may lose token 7, whose bit both calls then set.
    got = specker.verify(tokens, target, draft, logit_bias=bias, allowed_tokens=words, **keywords)
    assert_same(got, specker.verify(tokens, adjusted, draft, **keywords))
    for row in range(BATCH):
        for position, token in enumerate(got.token_ids[row, : int(got.num_emitted[row])].tolist()):
            assert (allowed[row, position] if by_row else allowed[row])[token]


@pytest.mark.usefixtures("on_backend")
def test_draft_rows_are_adjusted_by_their_own_arguments(generator: torch.Generator) -> None:
    target, draft, uniforms = make_rows(generator, GAMMA + 1), make_rows(generator, GAMMA), make_uniforms(generator)
    words, allowed = make_mask(generator, BATCH, GAMMA)
    bias, dense = make_bias()
    adjusted = (draft + dense[:, None]).masked_fill(~allowed, -math.inf)
    tokens = torch.full((BATCH, GAMMA), 7)
    got = specker.verify(tokens, target, draft, draft_logit_bias=bias, draft_allowed_tokens=words, uniforms=uniforms)
    assert_same(got, specker.verify(tokens, target, adjusted, uniforms=uniforms))


@pytest.mark.usefixtures("on_backend")
def test_flat_form_takes_masks_a_sequence_and_a_row(generator: torch.Generator) -> None:
    bounds = torch.tensor([0, 2, 2, 3])
    target = torch.randn(6, VOCAB, generator=generator)
    draft = torch.randn(3, VOCAB, generator=generator)
    uniforms = torch.rand(6, 2, dtype=torch.float64, generator=generator)
    sequence_of = torch.tensor([0, 0, 0, 1, 2, 2])
    tokens = torch.tensor([7, 7, 7])
    flat: dict[str, Any] = {"cu_num_draft_tokens": bounds, "max_num_draft_tokens": 2, "uniforms": uniforms}
    words, allowed = make_mask(generator, BATCH)
    bias, dense = make_bias()
    adjusted = (target + dense[sequence_of]).masked_fill(~allowed[sequence_of], -math.inf)
    got = specker.verify_flat(tokens, target, draft, logit_bias=bias, allowed_tokens=words, **flat)
    assert_same(got, specker.verify_flat(tokens, adjusted, draft, **flat))
    words, allowed = make_mask(generator, 6)
    draft_words, draft_allowed = make_mask(generator, 3)
    got = specker.verify_flat(tokens, target, draft, allowed_tokens=words, draft_allowed_tokens=draft_words, **flat)
    masked = target.masked_fill(~allowed, -math.inf), draft.masked_fill(~draft_allowed, -math.inf)
    assert_same(got, specker.verify_flat(tokens, *masked, **flat))


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
    target, draft, uniforms = (
        make_rows(generator, 3).softmax(-1),
        make_rows(generator, 2).softmax(-1),
        make_uniforms(generator),
    )
    words, allowed = make_mask(generator, BATCH)
    bias, dense = make_bias()
    adjusted = (target * dense.exp()[:, None]).masked_fill(~allowed[:, None], 0.0)
    tokens = torch.full((BATCH, GAMMA), 7)
    got = specker.verify_from_probs(tokens, target, draft, logit_bias=bias, allowed_tokens=words, uniforms=uniforms)
    assert_same(got, specker.verify_from_probs(tokens, adjusted, draft, uniforms=uniforms))


@pytest.mark.usefixtures("on_backend")
def test_sample_and_its_receipt_see_the_adjusted_row(generator: torch.Generator) -> None:
    logits = torch.randn(BATCH, VOCAB, generator=generator)
    words, allowed = make_mask(generator, BATCH)
    bias, dense = make_bias()
    adjusted = (logits + dense).masked_fill(~allowed, -math.inf)
    got = specker.sample(logits, logit_bias=bias, allowed_tokens=words, top_p=0.9, seed=3)
    wanted = specker.sample(adjusted, top_p=0.9, seed=3)
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    torch.testing.assert_close(got.receipt.token_logit, wanted.receipt.token_logit, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.receipt.log_sum_exp, wanted.receipt.log_sum_exp, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("on_backend")
def test_receipts_of_adjusted_draws_verify_like_their_rows(generator: torch.Generator) -> None:
    target, draft, uniforms = make_rows(generator, GAMMA + 1), make_rows(generator, GAMMA), make_uniforms(generator)
    words, _ = make_mask(generator, BATCH)
    steps = [specker.sample(draft[:, step], allowed_tokens=words, seed=5, position=step) for step in range(GAMMA)]
    tokens = torch.stack([step.token_ids for step in steps], dim=1)
    keywords: dict[str, Any] = {
        "draft_allowed_tokens": words.unsqueeze(1).expand(-1, GAMMA, -1),
        "uniforms": uniforms,
    }
    receipt = specker.DraftReceipt.stack([step.receipt for step in steps])
    with_receipt = specker.verify(tokens, target, draft, draft_receipt=receipt, **keywords)
    assert_same(with_receipt, specker.verify(tokens, target, draft, **keywords))


@pytest.mark.usefixtures("on_backend")
def test_a_row_whose_every_token_is_forbidden_sets_its_status(generator: torch.Generator) -> None:
    words = torch.full((BATCH, WORDS), -1, dtype=torch.int32)
    words[1] = 0
    tokens = torch.full((BATCH, 0), 7)
    got = specker.verify(tokens, make_rows(generator, 1), allowed_tokens=words, seed=0)
    assert got.status.tolist() == [0, Status.TARGET_INVALID, 0]
    assert got.num_emitted.tolist() == [1, 0, 1]


@pytest.mark.usefixtures("on_backend")
def test_nan_behind_a_mask_does_no_harm(generator: torch.Generator) -> None:
    target = make_rows(generator, 1)
    target[:, :, 40] = math.nan
    words = torch.full((BATCH, WORDS), -1, dtype=torch.int32)
    words[:, 1] = ~(1 << 8)
    got = specker.verify(torch.full((BATCH, 0), 7), target, allowed_tokens=words, seed=0)
    assert got.status.tolist() == [0, 0, 0]


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_adjusted_rounds_compile_as_one_graph(generator: torch.Generator) -> None:
    target, draft = make_rows(generator, GAMMA + 1), make_rows(generator, GAMMA)
    words, _ = make_mask(generator, BATCH)
    bias, _ = make_bias()
    tokens = torch.full((BATCH, GAMMA), 7)

    def run(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
        drawn = specker.sample(draft[:, 0], allowed_tokens=words, logit_bias=bias, seed=4)
        verified = specker.verify(
            tokens, target, draft, logit_bias=bias, allowed_tokens=words, draft_allowed_tokens=words, seed=3
        )
        return torch.cat([verified.token_ids, drawn.token_ids.unsqueeze(1)], dim=1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(target, draft), run(target, draft))
