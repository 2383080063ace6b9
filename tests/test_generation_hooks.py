"""Processors and criteria of transformers inside the loop: every row with its own prefix, every token asked about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from specker.generation import ModelDraft, PromptLookup, SkipLayers, generate
from specker.processors import cut_where_stopped, one_each, process_rows

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = tiny_models.tiny_llama(seed=1)
DRAFTS = {
    "close model": tiny_models.noisy(TARGET, 0.1),
    "greedy model": ModelDraft(tiny_models.noisy(TARGET, 0.1), greedy=True),
    "layers": SkipLayers((1,)),
    "lookup": PromptLookup(),
}
PROMPTS = [[3, 7, 7, 1, 3, 7], [5], [2, 9, 2]]


def processors() -> Any:
    return transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.7),
            transformers.NoRepeatNGramLogitsProcessor(2),
            transformers.NoBadWordsLogitsProcessor([[4], [11, 3]], eos_token_id=None),
        ]
    )


@pytest.mark.parametrize("draft", DRAFTS)
def test_processors_give_the_greedy_text_of_transformers(draft: str) -> None:
    result = generate(
        TARGET,
        DRAFTS[draft],
        **tiny_models.left_padded(PROMPTS),
        gamma=[4, 2, 3],
        temperature=0.0,
        max_new_tokens=25,
        logits_processor=processors(),
    )
    for prompt, token_ids in zip(PROMPTS, result.token_ids, strict=True):
        input_ids = torch.tensor([prompt])
        plain = TARGET.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=25, pad_token_id=0,
            repetition_penalty=1.7, no_repeat_ngram_size=2, bad_words_ids=[[4], [11, 3]],
        )  # fmt: skip
        assert token_ids.tolist() == plain[0, len(prompt) :].tolist()


def test_a_processor_sees_the_tokens_before_its_row_and_no_padding() -> None:
    seen: list[list[int]] = []

    def recording(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (1, 32)
        assert scores.dtype == torch.float32
        seen.append(token_ids[0].tolist())
        return scores

    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 9, "gamma": 3, "logits_processor": recording}
    result = generate(TARGET, PromptLookup(), **tiny_models.left_padded(PROMPTS), **options)
    for prompt, token_ids in zip(PROMPTS, result.token_ids, strict=True):
        text = prompt + token_ids.tolist()
        for length in range(len(prompt), len(text)):
            assert text[:length] in seen


def test_each_sequence_may_have_its_own_processor_and_criterion() -> None:
    def only(token: int) -> Any:
        return lambda _, scores: torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)

    def after(length: int) -> Any:
        return lambda token_ids, _: torch.tensor([token_ids.shape[1] >= length])

    result = generate(
        TARGET,
        DRAFTS["close model"],
        **tiny_models.left_padded(PROMPTS),
        logits_processor=[only(4), only(5), only(6)],
        stopping_criteria=[after(8), after(8), after(20)],
        max_new_tokens=12,
    )
    assert [token_ids.tolist() for token_ids in result.token_ids] == [[4] * 2, [5] * 7, [6] * 12]


def test_a_processor_that_a_draft_lacks_would_be_noticed() -> None:
    # The draft proposes what the processor forbids, and the verifier rejects it.
    def forbid(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, 32, 2), -torch.inf)

    for draft in DRAFTS.values():
        result = generate(TARGET, draft, **tiny_models.left_padded(PROMPTS), logits_processor=forbid, seed=1)
        assert all(token % 2 for token_ids in result.token_ids for token in token_ids.tolist())
    applied = generate(TARGET, TARGET, torch.tensor([[5]]), logits_processor=forbid, seed=1).stats
    assert applied.accepted == applied.drafted > 0


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("index", range(6))
def test_a_criterion_inside_a_block_ends_the_text_behind_its_token(draft: str, index: int) -> None:
    plain = tiny_models.greedy(TARGET, torch.tensor([PROMPTS[0]]), 7)
    stop = transformers.StoppingCriteriaList([lambda token_ids, _: token_ids[:, -1] == plain[index]])
    result = generate(
        TARGET, DRAFTS[draft], torch.tensor([PROMPTS[0]]), temperature=0.0, gamma=5, max_new_tokens=7,
        stopping_criteria=stop,
    )  # fmt: skip
    assert result.token_ids[0].tolist() == plain[: plain.index(plain[index]) + 1]
    assert result.stats.emitted == len(result.token_ids[0])


def test_transformers_own_criteria_work() -> None:
    criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(11)])
    result = generate(TARGET, TARGET, torch.tensor([PROMPTS[0]]), stopping_criteria=criteria, seed=1)
    assert len(result.token_ids[0]) == 5


def test_rows_are_processed_in_a_copy_and_rows_behind_the_block_stay() -> None:
    logits = torch.ones(2, 3, 4, dtype=torch.bfloat16)

    def add_length(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.add_(token_ids.shape[1])

    processed = process_rows([add_length] * 2, logits, [[1, 2], [3]], [[5, 6], []])
    assert processed.dtype == torch.float32
    assert processed[:, :, 0].tolist() == [[3.0, 4.0, 5.0], [2.0, 1.0, 1.0]]
    assert torch.equal(logits, torch.ones_like(logits))


def test_no_criterion_no_cut() -> None:
    assert cut_where_stopped(lambda *_: torch.tensor([False]), [1], [2, 3], "cpu") == -1
    assert cut_where_stopped(lambda *_: True, [1], [2, 3], "cpu") == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([print], ValueError, "logits_processor: expected one for all or one for each of 2 sequences, got 1"),
        ([print, 3], TypeError, "logits_processor: expected something to call, got int"),
    ],
    ids=str,
)
def test_hooks_that_cannot_be_used_are_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        one_each("logits_processor", given, 2)


def test_empty_lists_of_hooks_are_none() -> None:
    assert one_each("logits_processor", transformers.LogitsProcessorList(), 2) is None
    assert one_each("stopping_criteria", [], 2) is None
