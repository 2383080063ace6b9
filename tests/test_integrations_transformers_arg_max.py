"""Drafts of transformers that are arg-max tokens beside logits: verified as the point masses they are."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch

from specker.integrations.transformers import accelerate

from . import acceptance_step, laws
from .acceptance_step import DRAFT_LOGITS, GAMMA, PROMPT, TARGET_LOGITS, UTILS, set_version

pytestmark = pytest.mark.usefixtures("one_thread")
seeded_and_clean = acceptance_step.seeded_and_clean

ERROR_RATE = 1e-6
GENERATORS = importlib.import_module("transformers.generation.candidate_generator")


class ArgMaxGenerator:
    """Drafts the arg-max of its logits, and reports the logits: what one generator of transformers does."""

    def get_candidates(self, input_ids: torch.Tensor, drafts: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not drafts:
            return input_ids, None
        return torch.cat([input_ids, DRAFT_LOGITS.argmax(dim=-1)[None]], dim=1), DRAFT_LOGITS[None]


def argmax_p_value(runs: int) -> float:
    """Return the p-value of the first token of rounds that start with the generator's drafts."""
    counts: Counter[str] = Counter()
    for _ in range(runs):
        candidate_input_ids, logits = ArgMaxGenerator().get_candidates(PROMPT)
        tokens, _ = UTILS._speculative_sampling(candidate_input_ids, logits, GAMMA, TARGET_LOGITS[None])
        counts[str(tokens[0, 0].item())] += 1
    probs = TARGET_LOGITS[0].double().softmax(dim=-1).tolist()
    return laws.p_value(counts, {str(token): value for token, value in enumerate(probs) if value})


@pytest.mark.law
def test_arg_max_drafts_are_verified_as_point_masses(monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerate():
        # The class is not one that the block knows: its logits are taken at their word, and the law is lost.
        assert argmax_p_value(1000) < ERROR_RATE
    monkeypatch.setattr(GENERATORS, "SinglePositionMultiTokenCandidateGenerator", ArgMaxGenerator, raising=False)
    before = ArgMaxGenerator.get_candidates
    with accelerate():
        assert argmax_p_value(1000) > ERROR_RATE
        assert ArgMaxGenerator().get_candidates(PROMPT, drafts=False)[1] is None
    assert ArgMaxGenerator.get_candidates is before


def test_drafts_with_the_wrong_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = type("MTPCandidateGenerator", (ArgMaxGenerator,), {"get_candidates": ArgMaxGenerator.get_candidates})
    monkeypatch.setattr(GENERATORS, "MTPCandidateGenerator", generator, raising=False)
    set_version(monkeypatch, "5.14.1")
    with accelerate(), pytest.raises(ValueError, match=r"use_mtp: expected transformers 5\.16 or later"):
        generator().get_candidates(PROMPT)
    set_version(monkeypatch, "5.16.0")
    with accelerate():
        assert torch.equal(generator().get_candidates(PROMPT)[1], DRAFT_LOGITS[None])
