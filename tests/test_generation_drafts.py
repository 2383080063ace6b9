"""The law of the loop for every kind of draft, against the enumerated law of a target with a vocabulary of 5."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import specker
from specker import Sampling
from specker.drafts import Conditions
from specker.generation import Continuations, EarlyExit, ModelDraft, PromptLookup, generate
from specker.model_drafter import ModelDrafter
from specker.sample import SampleResult

from . import laws, tiny_models

ERROR_RATE = 1e-6
EOS, LENGTH = 4, 3
TARGET = tiny_models.tiny_llama(seed=11, vocab=5)
# Prompts of different lengths, each many times in a batch.
PROMPTS = [[1, 2, 1], [3], [0, 0, 2, 3, 1]]
LAWS = [tiny_models.continuation_law(TARGET, prompt, LENGTH, EOS) for prompt in PROMPTS]
BATCH, BATCHES = 96, 25
SMALL = tiny_models.tiny_llama(seed=12, vocab=3, layers=1)
WIDE = tiny_models.tiny_llama(seed=13, vocab=9, layers=1)
HEADED = tiny_models.tiny_llama(seed=14, vocab=5, layers=1)
HEADED.lm_head = torch.nn.Linear(16, 4, bias=False)
DRAFTS: dict[str, Any] = {
    "greedy model": ModelDraft(tiny_models.noisy(TARGET, 0.2), greedy=True),
    "smaller padded vocabulary": ModelDraft(SMALL, padded_vocabulary=True),
    "larger padded vocabulary": ModelDraft(WIDE, padded_vocabulary=True),
    "reduced vocabulary": ModelDraft(SMALL, draft_to_target_ids=torch.tensor([4, 1, 3]), unknown_token_id=2),
    "reduced vocabulary, two columns for one id": ModelDraft(SMALL, draft_to_target_ids=torch.tensor([2, 0, 2])),
    "reduced head": ModelDraft(HEADED, draft_to_target_ids=torch.tensor([0, 2, 3, 4])),
    "early exit": EarlyExit(1),
    "continuations": Continuations([[1, 2, 3], [0, 4], [3, 3, 3], [1, 1]]),
    "lookup": PromptLookup(max_ngram=2),
}

pytestmark = [pytest.mark.law, pytest.mark.usefixtures("one_thread")]


def smallest_p_value(draft: Any, **options: Any) -> float:
    """Return the smallest p-value over the prompts, of texts drawn in batches that mix them."""
    texts: list[Counter[str]] = [Counter() for _ in PROMPTS]
    batch = tiny_models.left_padded([PROMPTS[row % 3] for row in range(BATCH)])
    gammas = [row % 4 for row in range(BATCH)]
    for turn in range(BATCHES):
        result = generate(
            TARGET, draft, **batch, gamma=gammas, max_new_tokens=LENGTH, seed=turn * BATCH, eos_token_id=EOS, **options
        )
        for row, token_ids in enumerate(result.token_ids):
            texts[row % 3][",".join(map(str, token_ids.tolist()))] += 1
    return min(laws.p_value(counts, law) for counts, law in zip(texts, LAWS, strict=True))


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_mixed_batch_has_the_law_of_the_target(draft: str) -> None:
    assert smallest_p_value(DRAFTS[draft]) > ERROR_RATE / len(DRAFTS)


def test_a_draft_with_its_own_parameters_leaves_the_law_alone() -> None:
    draft = tiny_models.noisy(TARGET, 0.3)
    assert smallest_p_value(draft, draft_sampling=Sampling(temperature=0.6, top_k=3)) > ERROR_RATE


def test_the_test_has_power_against_a_soft_distribution_of_an_arg_max_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ModelDrafter.propose

    def arg_max(_: ModelDrafter, row: torch.Tensor, position: torch.Tensor, conditions: Conditions) -> SampleResult:
        return specker.sample(row, temperature=0.0, seed=conditions.seeds, position=position)

    monkeypatch.setattr(ModelDrafter, "_draw", arg_max)
    monkeypatch.setattr(ModelDrafter, "propose", lambda *arguments: right(*arguments)._replace(receipt=None))
    assert smallest_p_value(tiny_models.noisy(TARGET, 0.2)) < ERROR_RATE


def test_the_test_has_power_against_a_wrong_map_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ModelDrafter.propose

    def shifted(self: ModelDrafter, *arguments: Any) -> Any:
        proposal = right(self, *arguments)
        if proposal.draft_to_target_ids is None:
            return proposal
        return proposal._replace(draft_to_target_ids=proposal.draft_to_target_ids.roll(1), receipt=None)

    monkeypatch.setattr(ModelDrafter, "propose", shifted)
    assert smallest_p_value(DRAFTS["reduced vocabulary"]) < ERROR_RATE


def test_a_draft_reads_the_tokens_it_has_and_a_stand_in_for_others() -> None:
    drafter = ModelDrafter(DRAFTS["reduced vocabulary"], vocab=5, batch=1)
    assert drafter._readable([4, 1, 3, 0, 2]) == [0, 1, 2, 2, 2]
    assert ModelDrafter(DRAFTS["reduced head"], vocab=5, batch=1)._readable([4, 1, 0]) == [4, 1, 0]


def test_continuations_are_copied_while_they_agree() -> None:
    target = tiny_models.tiny_llama(seed=1)
    prompt = torch.tensor([[3, 7, 7]])
    plain = tiny_models.greedy(target, prompt, 20)
    options: dict[str, Any] = {"gamma": 4, "temperature": 0.0, "max_new_tokens": 20}
    right = generate(target, Continuations([plain]), prompt, **options)
    assert right.token_ids[0].tolist() == plain
    assert (right.stats.target_passes, right.stats.accepted) == (4, 16)
    wrong = [*plain[:7], (plain[7] + 1) % 32, *plain[8:]]
    parted = generate(target, Continuations([wrong]), prompt, **options)
    assert parted.token_ids[0].tolist() == plain
    assert parted.stats.recovered == 1
    assert parted.stats.sequences[0].rounds_by_drafted[0] == 12


@pytest.mark.parametrize(
    ("draft", "error", "words"),
    [
        (SMALL, ValueError, "vocabulary of 5 tokens, got 3; .* ModelDraft"),
        (ModelDraft(SMALL, draft_to_target_ids=torch.tensor([0, 5, 1])), ValueError, r"ids in 0..4, got 0..5"),
        (ModelDraft(SMALL, draft_to_target_ids=torch.tensor([0.0])), ValueError, "one-dimensional int64 tensor"),
        (
            ModelDraft(SMALL, padded_vocabulary=True, draft_to_target_ids=torch.tensor([0, 1, 2])),
            ValueError,
            "padded_vocabulary: expected False with draft_to_target_ids",
        ),
        (
            ModelDraft(SMALL, draft_to_target_ids=torch.tensor([0, 1])),
            ValueError,
            "one id for each of 3 draft columns, got 2",
        ),
        (ModelDraft(None), TypeError, "draft: expected a model, .*, got NoneType"),
        (EarlyExit(0), ValueError, "early exit: expected a number of layers in 1..2, got 0"),
        (EarlyExit(3), ValueError, "early exit: expected a number of layers in 1..2, got 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_drafts_that_do_not_fit_are_refused(draft: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        generate(TARGET, draft, torch.tensor([[1]]))
