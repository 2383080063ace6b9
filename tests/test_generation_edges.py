"""Corners of the decode loop: nothing to copy, half precision, a target that fails for one sequence of several."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import specker
from specker import InvalidInputError, decode
from specker.accounting import TokenBlock
from specker.cached_model import CachedModel
from specker.generation import Continuations, PromptLookup, SkipLayers, generate

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = tiny_models.tiny_llama(seed=1)
PROMPTS = [[3, 7, 7, 1, 3, 7], [5], [2, 9, 2, 11], [8, 8]]


def test_an_empty_lookup_is_plain_decoding() -> None:
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6]])
    stats = generate(TARGET, PromptLookup(min_ngram=3), prompt, temperature=0.0, max_new_tokens=1, gamma=4).stats
    assert (stats.drafted, stats.bonus, stats.target_passes, stats.overlap) == (0, 1, 1, None)
    nothing = generate(TARGET, Continuations([]), prompt, temperature=0.0, max_new_tokens=12, gamma=4)
    assert nothing.token_ids[0].tolist() == tiny_models.greedy(TARGET, prompt, 12)
    assert (nothing.stats.drafted, nothing.stats.target_passes) == (0, 12)


def test_an_end_as_first_draft_token_ends_one_sequence_and_no_other() -> None:
    texts = [tiny_models.greedy(TARGET, torch.tensor([prompt]), 12) for prompt in PROMPTS]
    eos = texts[1][0]
    # The target agrees with itself, so the end is an accepted draft token.
    result = generate(
        TARGET, TARGET, **tiny_models.left_padded(PROMPTS), temperature=0.0, max_new_tokens=12, eos_token_id=eos
    )
    assert result.token_ids[1].tolist() == [eos]
    assert result.stats.sequences[1].accepted == 1
    for text, token_ids in zip(texts, result.token_ids, strict=True):
        assert token_ids.tolist() == (text[: text.index(eos) + 1] if eos in text else text)


def test_room_for_one_token_only_drafts_nothing() -> None:
    batch = tiny_models.left_padded(PROMPTS)
    result = generate(TARGET, TARGET, **batch, temperature=0.0, max_new_tokens=1, gamma=[9, 1, 0, 4])
    assert result.stats.drafted == 0
    assert [len(token_ids) for token_ids in result.token_ids] == [1] * 4


class Poisoned(torch.nn.Module):
    """A model that returns NaN for a sequence once that has read a number of tokens."""

    def __init__(self, model: Any, sequence_token: int, num_healthy: int) -> None:
        super().__init__()
        self.model, self.config, self.generation_config = model, model.config, model.generation_config
        self.dtype, self.device = model.dtype, model.device
        self.sequence_token, self.num_healthy = sequence_token, num_healthy
        self.rows: torch.Tensor | None = None
        self.eval()

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> Any:
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        options = {name: past_key_values, "use_cache": use_cache}
        if position_ids is None:
            position_ids = (past_key_values.get_seq_length() + torch.arange(input_ids.shape[1])).expand_as(input_ids)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **options)
        poisoned = (position_ids.max(dim=1).values >= self.num_healthy) & self._mine(input_ids)
        output.logits[poisoned] = torch.nan
        return output

    def _mine(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            self.rows = (input_ids == self.sequence_token).any(dim=1)
        # The row before it ends first, and it moves up.
        return self.rows[-len(input_ids) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_fails_for_one_sequence_names_it_and_emits_no_garbage(temperature: float) -> None:
    prompts = [[1, 2], [4, 4, 4], [13, 4]]
    options: dict[str, Any] = {"gamma": 2, "temperature": temperature, "seed": 3, "max_new_tokens": 30}
    after_three = [lambda token_ids, _: token_ids.shape[1] >= 5, lambda *_: False, lambda *_: False]
    blocks: list[TokenBlock] = []
    with pytest.raises(InvalidInputError, match=r"^invalid input in sequence 2: a target row holds NaN[^\n]*$"):
        generate(
            Poisoned(TARGET, 13, 16), PromptLookup(), **tiny_models.left_padded(prompts),
            stopping_criteria=after_three, on_tokens=blocks.append, **options,
        )  # fmt: skip
    healthy = generate(TARGET, PromptLookup(), **tiny_models.left_padded(prompts), **options)
    for number, token_ids in enumerate(healthy.token_ids):
        emitted = [token for block in blocks if block.sequence == number for token in block.token_ids]
        assert 0 < len(emitted) < 20
        assert emitted == token_ids.tolist()[: len(emitted)]


def test_half_precision_may_part_from_plain_decoding_by_the_models_own_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Find a bfloat16 model whose text parts, and show that its rows differ there and verify keeps their arg-max."""
    calls: list[tuple[torch.Tensor, Any]] = []

    def recording(token_ids: torch.Tensor, target_logits: torch.Tensor, *rows: Any, **options: Any) -> Any:
        result = specker.verify(token_ids, target_logits, *rows, **options)
        calls.append((target_logits, result))
        return result

    monkeypatch.setattr(decode, "verify", recording)
    parted = 0
    # Sums long enough for a pass over several tokens to round otherwise, and rows flat enough for near ties.
    sizes: dict[str, Any] = {"vocab": 1000, "hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
    for seed in range(4):
        target = tiny_models.tiny_llama(seed=seed, **sizes).to(torch.bfloat16)
        prompt = torch.tensor([[3, 7, 7, 1]])
        plain = tiny_models.greedy(target, prompt, 40)
        calls.clear()
        tokens = (
            generate(target, SkipLayers((1,)), prompt, temperature=0.0, max_new_tokens=40, gamma=3)
            .token_ids[0]
            .tolist()
        )
        kept = [
            int(row.float().argmax()) for logits, result in calls for row in logits[0, : int(result.num_emitted[0])]
        ]
        # Whatever the model rounded, every token is the arg-max of the row that verify was given.
        assert tokens == kept[: len(tokens)]
        if tokens == plain:
            continue
        parted += 1
        place = next(index for index in range(40) if tokens[index] != plain[index])
        rows = torch.cat([logits[0, : int(result.num_emitted[0])] for logits, result in calls])
        ours, theirs = rows[place], _row_by_single_tokens(target, [*prompt[0].tolist(), *plain[:place]])
        assert not torch.equal(ours, theirs)
        # The two tokens were within the rounding of a pass of each other.
        assert float(ours[tokens[place]] - ours[plain[place]]) <= 2 * float((ours - theirs).abs().max())
    if parted == 0:
        pytest.skip("this processor rounds a pass over several tokens like one over a single token")


def _row_by_single_tokens(target: Any, token_ids: list[int]) -> torch.Tensor:
    cached = CachedModel(target, "target")
    with torch.no_grad():
        for token_id in token_ids:
            row = cached.advance([[token_id]])[0, 0]
    return row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_ragged_batches(dtype: torch.dtype) -> None:
    target = tiny_models.tiny_llama(seed=1).to(dtype)
    result = generate(
        target, tiny_models.noisy(target, 0.1), **tiny_models.left_padded(PROMPTS), max_new_tokens=20, seed=1
    )
    assert [len(token_ids) for token_ids in result.token_ids] == [20] * 4
    assert 0 < result.stats.accepted < result.stats.drafted


def test_a_key_value_buffer_that_grows_keeps_what_it_holds() -> None:
    # The first buffer has room for 64 tokens more than the prompts; this text needs it to grow twice.
    batch = tiny_models.left_padded(PROMPTS[:2])
    result = generate(TARGET, PromptLookup(), **batch, temperature=0.0, max_new_tokens=200, gamma=3)
    for prompt, token_ids in zip(PROMPTS[:2], result.token_ids, strict=True):
        assert token_ids.tolist() == tiny_models.greedy(TARGET, torch.tensor([prompt]), 200)
