"""Batches in which everything is wrong somewhere mean the same on every backend, to the last status bit."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

import specker
from specker import DraftReceipt, Sampling, checks

from .cases import interpreted

BATCH, GAMMA, VOCAB = 6, 3, 11


class Messy(NamedTuple):
    """A batch with NaN, infinite and masked rows, placeholders, ids out of range, and every kind of parameter."""

    tokens: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor
    sampling: dict[str, torch.Tensor]
    draft_sampling: Sampling
    num_draft_tokens: torch.Tensor
    uniforms: torch.Tensor


def messy(seed: int, device: torch.device) -> Messy:
    """Return a batch, the same one for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def chance(rate: float) -> bool:
        return float(torch.rand(1, generator=generator)) < rate

    def some(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randperm(BATCH, generator=generator)].to(device)

    target = 2 * torch.randn(BATCH, GAMMA + 1, VOCAB, generator=generator)
    draft = target[:, :GAMMA] + torch.randn(BATCH, GAMMA, VOCAB, generator=generator)
    tokens = draft.argmax(-1)
    for rows in (target, draft):
        for row in rows.flatten(0, 1):
            ids = torch.randperm(VOCAB, generator=generator)
            if chance(0.3):
                row[ids[:4]] = -math.inf
            for rate, index, value in ((0.08, ids[:1], math.nan), (0.04, ids[:1], math.inf), (0.04, ids, -math.inf)):
                if chance(rate):
                    row[index] = value
    for row in tokens:
        for position in range(GAMMA):
            for rate, token in ((0.15, position), (0.08, -1), (0.06, VOCAB + position)):
                if chance(rate):
                    row[position] = token
    return Messy(
        tokens.to(device),
        target.to(device),
        draft.to(device),
        {
            "temperature": some(0.0, 1.0, 0.7, 1e-7, 1.5, 1.0),
            "top_k": some(0, 3, 20, 1, 5, 0),
            "top_p": some(1.0, 0.9, 0.5, 0.0, 1.2, 0.99),
            "min_p": some(0.0, 0.05, 0.3, 0.0, 0.0, 1.0),
        },
        Sampling(some(0.0, 1.0, 0.7, 1.0, 2.0, 0.5), some(5, 0, 2, 0, 9, 0)),
        torch.randint(0, GAMMA + 1, (BATCH,), generator=generator).to(device),
        torch.rand(BATCH, GAMMA + 1, 2, dtype=torch.float64, generator=generator).to(device),
    )


FORMS = ["plain", "filtered", "draft sampling", "point mass", "draft probs", "probs", "receipt"]


def verify(batch: Messy, form: str) -> specker.VerifyResult:
    """Verify a batch in one of the forms."""
    options: dict[str, Any] = {"num_draft_tokens": batch.num_draft_tokens, "uniforms": batch.uniforms}
    options |= {"return_logprobs": True, "return_accept_probs": True}
    options |= {"temperature": batch.sampling["temperature"]} if form == "plain" else batch.sampling
    if form == "probs":
        return specker.verify_from_probs(batch.tokens, batch.target.exp(), batch.draft.exp(), **options)
    if form == "point mass":
        return specker.verify(batch.tokens, batch.target, **options)
    if form == "draft probs":
        return specker.verify(batch.tokens, batch.target, draft_probs=batch.draft.softmax(-1), **options)
    if form == "draft sampling":
        options["draft_sampling"] = batch.draft_sampling
    if form == "receipt":
        steps = [specker.sample(batch.draft[:, step], seed=5, position=step, **batch.sampling) for step in range(GAMMA)]
        tokens = torch.stack([step.token_ids for step in steps], dim=1)
        options["draft_receipt"] = DraftReceipt.stack([step.receipt for step in steps])
        return specker.verify(tokens, batch.target, batch.draft, **options)
    return specker.verify(batch.tokens, batch.target, batch.draft, **options)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("form", FORMS)
def test_a_messy_batch_means_what_the_reference_says(form: str, backend: str, device: torch.device) -> None:
    if backend == "reference":
        pytest.skip("the reference is what the others are compared with")
    for seed in range(1 if interpreted(backend) else 20):
        got = verify(messy(seed, device), form)
        with specker.backend("reference"):
            wanted = verify(messy(seed, torch.device("cpu")), form)
        for name in ("token_ids", "num_accepted", "num_emitted", "status"):
            assert getattr(got, name).tolist() == getattr(wanted, name).tolist(), (seed, name)
        for name in ("logprobs", "accept_probs", "expected_accepted"):
            torch.testing.assert_close(
                getattr(got, name).cpu(), getattr(wanted, name), rtol=3e-5, atol=1e-6, equal_nan=True
            )


def test_a_call_in_inference_mode_leaves_nothing_behind_that_autograd_refuses() -> None:
    checks._cached_scalar.cache_clear()
    checks._cached_parameters.cache_clear()
    logits = torch.randn(1, 2, 5)
    with torch.inference_mode():
        specker.verify(torch.tensor([[1]]), logits, temperature=0.625, top_k=2, seed=1)
    parameters = checks.check_parameters(Sampling(0.625, 2), 1, 5, torch.device("cpu"))
    kept = [parameter for parameter in parameters if parameter is not None]
    assert len(kept) == 2
    assert not any(parameter.is_inference() for parameter in kept)
