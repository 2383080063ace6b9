"""The law of the decode loop at temperature 1, against the enumerated law of a target with a vocabulary of 5."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

import specker
from specker import drafts, model_drafter
from specker.generation import PromptLookup, SkipLayers, generate

from . import laws, tiny_models

pytestmark = [pytest.mark.law, pytest.mark.usefixtures("one_thread")]
ERROR_RATE = 1e-6
EOS = 4
LENGTH = 4
RUNS, BATCH = 4000, 200
PROMPT = [1, 2, 1]
TARGET = tiny_models.tiny_llama(seed=11, vocab=5, layers=2)
DRAFTS = {
    "model": tiny_models.tiny_llama(seed=12, vocab=5, layers=1),
    "layers": SkipLayers((1,)),
    "lookup": PromptLookup(),
}
LAW = tiny_models.continuation_law(TARGET, PROMPT, LENGTH, EOS)


def smallest_p_value(draft: Any) -> float:
    """Return the smaller p-value of two tests: of whole continuations, and of their last two tokens."""
    texts: Counter[str] = Counter()
    for seed in range(0, RUNS, BATCH):
        prompts = torch.tensor([PROMPT]).expand(BATCH, -1)
        result = generate(TARGET, draft, prompts, gamma=2, max_new_tokens=LENGTH, seed=seed, eos_token_id=EOS)
        texts.update(",".join(map(str, token_ids.tolist())) for token_ids in result.token_ids)
    ends: Counter[str] = Counter()
    law_of_ends: defaultdict[str, float] = defaultdict(float)
    for text, count in texts.items():
        ends[",".join(text.split(",")[-2:])] += count
    for text, weight in LAW.items():
        law_of_ends[",".join(text.split(",")[-2:])] += weight
    return min(laws.p_value(texts, LAW), laws.p_value(ends, law_of_ends))


def test_the_enumerated_law_sums_to_one() -> None:
    assert sum(LAW.values()) == pytest.approx(1.0, abs=1e-9)
    assert len(LAW) == 4**4 + 4**3 + 4**2 + 4 + 1


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_loop_has_the_law_of_the_target(draft: str) -> None:
    assert smallest_p_value(DRAFTS[draft]) > ERROR_RATE / 2


def test_the_test_has_power_against_a_draft_at_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    class Misreported(model_drafter.ModelDrafter):
        """Says that it drew at half the temperature it drew at."""

        def propose(self, *arguments: Any) -> drafts.Proposal:
            proposal = super().propose(*arguments)
            return proposal._replace(logits=None if proposal.logits is None else 2 * proposal.logits, receipt=None)

    monkeypatch.setattr(model_drafter, "ModelDrafter", Misreported)
    assert smallest_p_value(DRAFTS["model"]) < ERROR_RATE / 2


def test_the_test_has_power_against_positions_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeating(*arguments: Any, **options: Any) -> Any:
        return specker.verify(*arguments, **{**options, "position": 0})

    monkeypatch.setattr("specker.decode.verify", repeating)
    assert smallest_p_value(DRAFTS["lookup"]) < ERROR_RATE / 2
