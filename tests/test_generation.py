"""The decode loop: greedy equality with transformers, lengths, ends, callbacks, counters, bad input."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

import specker
from specker import InvalidInputError
from specker.accounting import TokenBlock, TokenKind
from specker.cached_model import CachedModel
from specker.generation import PromptLookup, SkipLayers, generate

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = tiny_models.tiny_llama(seed=1)
DRAFTS = {
    "model": tiny_models.tiny_llama(seed=2, layers=1),
    "same model": TARGET,
    "opposite model": tiny_models.opposite(TARGET),
    "layers": SkipLayers((1,)),
    "lookup": PromptLookup(),
}
PROMPT = torch.tensor([[3, 7, 7, 1, 3, 7]])


def greedy_tokens(draft: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    result = generate(TARGET, draft, prompt, temperature=0.0, **options)
    tokens: list[int] = result.token_ids[0].tolist()
    return tokens


@pytest.mark.parametrize("prompt", [PROMPT, torch.tensor([[5]])], ids=["six tokens", "one token"])
@pytest.mark.parametrize("gamma", [0, 1, 4, 9])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_output_equals_transformers(draft: str, gamma: int, prompt: torch.Tensor) -> None:
    expected = tiny_models.greedy(TARGET, prompt, 23)
    assert greedy_tokens(DRAFTS[draft], prompt, gamma=gamma, max_new_tokens=23) == expected


def test_a_cache_that_keeps_rejected_tokens_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedModel, "keep", lambda self, num_tokens: None)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert greedy_tokens(DRAFTS["opposite model"], gamma=4, max_new_tokens=23) == tiny_models.greedy(
            TARGET, PROMPT, 23
        )


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("draft", DRAFTS)
def test_max_new_tokens_is_kept_exactly_and_no_draft_goes_beyond_it(draft: str, max_new_tokens: int) -> None:
    result = generate(TARGET, DRAFTS[draft], PROMPT, temperature=0.0, gamma=4, max_new_tokens=max_new_tokens)
    assert result.token_ids[0].tolist() == tiny_models.greedy(TARGET, PROMPT, max_new_tokens)
    # One token of each round comes from the target, so drafts for the last one would be wasted.
    assert result.stats.drafted <= max_new_tokens - 1 + 4 * result.stats.recovered


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("index", range(7))
def test_an_end_of_sequence_token_inside_a_block_ends_the_text(draft: str, index: int) -> None:
    eos = tiny_models.greedy(TARGET, PROMPT, 7)[index]
    expected = tiny_models.greedy(TARGET, PROMPT, 23, eos=eos)
    assert expected[-1] == eos
    assert greedy_tokens(DRAFTS[draft], gamma=4, max_new_tokens=23, eos_token_id=eos) == expected
    elsewhere = min(set(range(32)) - set(expected))
    assert greedy_tokens(DRAFTS[draft], gamma=4, max_new_tokens=23, eos_token_id=[elsewhere, eos]) == expected


def test_the_end_of_sequence_tokens_come_from_the_generation_config() -> None:
    eos = tiny_models.greedy(TARGET, PROMPT, 3)[2]
    target = tiny_models.tiny_llama(seed=1, eos=eos)
    assert target.generation_config.eos_token_id == eos
    ended = generate(target, PromptLookup(), PROMPT, temperature=0.0, max_new_tokens=9)
    assert ended.token_ids[0].tolist() == tiny_models.greedy(TARGET, PROMPT, 9, eos=eos)
    unending = generate(target, PromptLookup(), PROMPT, temperature=0.0, max_new_tokens=9, eos_token_id=())
    assert len(unending.token_ids[0]) == 9


def test_a_draft_that_always_agrees_needs_one_pass_for_gamma_plus_one_tokens() -> None:
    stats = generate(TARGET, TARGET, PROMPT, temperature=0.0, gamma=4, max_new_tokens=23).stats
    assert (stats.target_passes, stats.rounds) == (math.ceil(23 / 5), math.ceil(23 / 5))
    assert (stats.drafted, stats.accepted, stats.recovered, stats.bonus) == (18, 18, 0, 5)
    assert stats.acceptance_by_position == [1.0] * 4


def test_a_draft_that_never_agrees_needs_one_pass_a_token() -> None:
    stats = generate(TARGET, DRAFTS["opposite model"], PROMPT, temperature=0.0, gamma=4, max_new_tokens=23).stats
    assert (stats.target_passes, stats.accepted, stats.recovered, stats.bonus) == (23, 0, 22, 1)
    assert stats.acceptance_by_position == [0.0] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_callback_and_the_counters_tell_the_same_story(draft: str, temperature: float) -> None:
    blocks: list[TokenBlock] = []
    result = generate(
        TARGET,
        DRAFTS[draft],
        PROMPT,
        gamma=3,
        max_new_tokens=30,
        temperature=temperature,
        seed=5,
        on_tokens=blocks.append,
    )
    stats = result.stats
    kinds = [kind for block in blocks for kind in block.kinds]
    assert [token for block in blocks for token in block.token_ids] == result.token_ids[0].tolist()
    assert all(block.sequence == 0 and len(block.kinds) == len(block.token_ids) for block in blocks)
    assert all(kind is TokenKind.ACCEPTED for block in blocks for kind in block.kinds[:-1])
    assert [kinds.count(kind) for kind in TokenKind] == [stats.accepted, stats.recovered, stats.bonus]
    assert stats.emitted == stats.accepted + stats.recovered + stats.bonus == 30
    assert stats.rounds == stats.target_passes == len(blocks)
    assert sum(stats.sequences[0].drafted_by_position) == stats.drafted
    assert sum(stats.sequences[0].accepted_by_position) == stats.accepted
    assert stats.accepted_per_round == pytest.approx(stats.accepted / len(blocks))
    assert stats.tokens_per_target_pass == pytest.approx(30 / len(blocks))


def test_seconds_are_split_without_rest() -> None:
    seconds = generate(TARGET, DRAFTS["model"], PROMPT, max_new_tokens=12, seed=1).stats.seconds
    assert min(seconds.draft, seconds.target, seconds.verify) > 0
    assert seconds.other >= 0
    assert seconds.total == pytest.approx(seconds.draft + seconds.target + seconds.verify + seconds.other)


def test_drafts_behind_an_accepted_end_are_not_counted_as_output() -> None:
    eos = tiny_models.greedy(TARGET, PROMPT, 2)[1]
    stats = generate(TARGET, TARGET, PROMPT, temperature=0.0, gamma=4, max_new_tokens=23, eos_token_id=eos).stats
    assert (stats.drafted, stats.accepted, stats.recovered, stats.bonus, stats.emitted) == (4, 2, 0, 0, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_left_padding_changes_nothing(dtype: torch.dtype) -> None:
    padded = torch.cat([torch.full((1, 3), 9), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]).to(dtype)
    options: dict[str, Any] = {"max_new_tokens": 15, "seed": 3}
    plain = generate(TARGET, DRAFTS["model"], PROMPT, **options).token_ids[0]
    assert torch.equal(generate(TARGET, DRAFTS["model"], padded, attention_mask=mask, **options).token_ids[0], plain)


def test_the_seed_returned_repeats_the_run_and_another_seed_does_not() -> None:
    first = generate(TARGET, DRAFTS["model"], PROMPT, max_new_tokens=25)
    again = generate(TARGET, DRAFTS["model"], PROMPT, max_new_tokens=25, seed=first.seed)
    other = generate(TARGET, DRAFTS["model"], PROMPT, max_new_tokens=25, seed=first.seed + 1)
    assert torch.equal(first.token_ids[0], again.token_ids[0])
    assert not torch.equal(first.token_ids[0], other.token_ids[0])


def test_each_round_uses_the_position_of_its_first_draft_token(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[int] = []

    def recording(*arguments: Any, **options: Any) -> Any:
        positions.append(int(options["position"]))
        return specker.verify(*arguments, **options)

    monkeypatch.setattr("specker.decode.verify", recording)
    blocks: list[TokenBlock] = []
    generate(TARGET, DRAFTS["model"], PROMPT, gamma=3, max_new_tokens=20, seed=1, on_tokens=blocks.append)
    lengths = [PROMPT.shape[1] + sum(len(block.token_ids) for block in blocks[:index]) for index in range(len(blocks))]
    assert positions == lengths


@pytest.mark.parametrize("sliding_window", [4, 64])
@pytest.mark.parametrize("draft", ["lookup", "layers"])
def test_a_sliding_window_is_rolled_back_rightly(draft: str, sliding_window: int) -> None:
    target = tiny_models.tiny_mistral(seed=4, sliding_window=sliding_window)
    result = generate(target, DRAFTS[draft], PROMPT, temperature=0.0, gamma=3, max_new_tokens=25)
    assert result.token_ids[0].tolist() == tiny_models.greedy(target, PROMPT, 25)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "got LlamaForCausalLM with linear_attention"),
        ({"is_encoder_decoder": True}, "got LlamaForCausalLM with a state or an encoder"),
    ],
    ids=str,
)
def test_a_model_whose_state_cannot_be_taken_back_is_refused(change: dict[str, Any], words: str) -> None:
    target = tiny_models.tiny_llama(seed=1)
    for name, value in change.items():
        object.__setattr__(target.config, name, value)
    with pytest.raises(ValueError, match=f"target: expected a decoder of attention layers, .* {words}"):
        generate(target, PromptLookup(), PROMPT)


def test_another_architecture_decodes_greedily_as_transformers_does() -> None:
    target = tiny_models.tiny_gpt2()
    result = generate(target, DRAFTS["model"], PROMPT, temperature=0.0, gamma=3, max_new_tokens=20)
    assert result.token_ids[0].tolist() == tiny_models.greedy(target, PROMPT, 20)


class Broken(torch.nn.Module):
    """A language model whose logits are NaN once it has read a number of tokens."""

    def __init__(self, model: Any, num_healthy: int) -> None:
        super().__init__()
        self.model, self.config, self.generation_config = model, model.config, model.generation_config
        self.num_left = num_healthy
        self.device = model.device
        self.eval()

    def forward(self, input_ids: torch.Tensor, cache: Any, use_cache: bool) -> Any:
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        output = self.model(input_ids=input_ids, use_cache=use_cache, **{name: cache})
        self.num_left -= input_ids.shape[1]
        if self.num_left < 0:
            output.logits = output.logits * math.nan
        return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_fails_is_told_and_emits_nothing_more(temperature: float) -> None:
    blocks: list[TokenBlock] = []
    with pytest.raises(InvalidInputError, match="target row holds NaN"):
        generate(Broken(TARGET, 20), DRAFTS["model"], PROMPT, temperature=temperature, seed=1, on_tokens=blocks.append)
    reference = generate(TARGET, DRAFTS["model"], PROMPT, temperature=temperature, seed=1).token_ids[0].tolist()
    tokens = [token for block in blocks for token in block.token_ids]
    assert 0 < len(tokens) < 20
    assert tokens == reference[: len(tokens)]


def test_a_draft_that_fails_is_told() -> None:
    with pytest.raises(InvalidInputError, match="draft row holds NaN"):
        generate(TARGET, Broken(TARGET, 20), PROMPT, seed=1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_ids": PROMPT[:0]}, ValueError, "input_ids: expected at least one sequence, got none"),
        ({"input_ids": PROMPT.float()}, TypeError, "input_ids: expected dtype int64, got float32"),
        ({"input_ids": PROMPT[0]}, ValueError, r"input_ids: expected shape \(batch, length\), got \(6,\)"),
        ({"input_ids": PROMPT[:, :0]}, ValueError, "at least one token, got an empty one"),
        ({"attention_mask": torch.zeros_like(PROMPT)}, ValueError, "at least one token, got an empty one"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}, ValueError, "zeros on the left only"),
        ({"attention_mask": torch.ones(1, 5, dtype=torch.int64)}, ValueError, "attention_mask: expected shape"),
        ({"gamma": -1}, ValueError, "gamma: expected a number >= 0, got -1"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected a number >= 1, got 0"),
        ({"temperature": -1.0}, ValueError, "temperature: expected .*, got -1.0"),
        ({"temperature": math.nan}, ValueError, "temperature: expected .*, got nan"),
        ({"seed": 1.5}, TypeError, "seed: expected .*, got float"),
        ({"draft": "lookup"}, TypeError, "draft: expected a model, ModelDraft, .*, got str"),
        ({"draft": tiny_models.tiny_llama(seed=1, vocab=31)}, ValueError, "vocabulary of 32 tokens, got 31"),
        ({"draft": tiny_models.tiny_llama(seed=1).train()}, ValueError, "draft: expected a model in evaluation mode"),
        ({"target": tiny_models.tiny_llama(seed=1).train()}, ValueError, "target: expected a model in evaluation mode"),
        ({"draft": SkipLayers((2, 0))}, ValueError, r"expected numbers in 0..1, got \[2\]"),
        ({"draft": SkipLayers((1, 0))}, ValueError, "at least one of 2 layers to stay, got all"),
        (
            {"draft": tiny_models.tiny_llama(seed=1).to("meta")},
            ValueError,
            "expected a model on cpu .*, got one on meta",
        ),
        ({"target": tiny_models.tiny_gpt2(), "draft": SkipLayers((0,))}, ValueError, "ModuleList `layers`, got GPT2"),
        ({"draft": PromptLookup(2, 3)}, ValueError, "expected 1 <= min_ngram <= max_ngram, got min_ngram 3"),
    ],
)
def test_bad_arguments_are_refused_in_words(options: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"target": TARGET, "draft": PromptLookup(), "input_ids": PROMPT, **options}
    with pytest.raises(error, match=words):
        generate(**arguments)
