"""`generate` with specker's loop has the law of `generate` without, setting by setting.

The law is enumerated with what transformers itself prepared: its processors and its stopping criteria are asked about
every prefix. The sample is one call for a batch of equal prompts.
"""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from specker.generation import PromptLookup
from specker.integrations.transformers import speculative

from . import laws, tiny_models

pytestmark = [pytest.mark.law, pytest.mark.usefixtures("one_thread")]
ERROR_RATE = 1e-6
VOCAB, EOS, PAD, LENGTH = 6, 4, 5, 3
RUNS = 800
# Padded in front: what sees the prefix sees the padding too, in plain decoding and here.
PROMPT, MASK = [PAD, 1, 2, 1], [0, 1, 1, 1]
TARGET = tiny_models.tiny_llama(seed=11, vocab=VOCAB, eos=EOS)
DRAFT = tiny_models.tiny_llama(seed=12, vocab=VOCAB, layers=1)
PROCESSORS = importlib.import_module("transformers.generation.logits_process")
CRITERIA = importlib.import_module("transformers.generation.stopping_criteria")


class Prepared(NamedTuple):
    """What transformers hands to a decoding function."""

    processors: Any
    criteria: Any
    config: Any


def prepare(options: dict[str, Any]) -> Prepared:
    seen: list[Prepared] = []

    def capture(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> Any:
        seen.append(Prepared(logits_processor, stopping_criteria, generation_config))
        return input_ids

    call(1, capture, options)
    return seen[0]


def call(runs: int, custom_generate: Any, options: dict[str, Any]) -> torch.Tensor:
    settings = {"do_sample": True, "max_new_tokens": LENGTH, "pad_token_id": PAD, "top_k": 0, **options}
    result: torch.Tensor = TARGET.generate(
        torch.tensor([PROMPT] * runs),
        attention_mask=torch.tensor([MASK] * runs),
        custom_generate=custom_generate,
        **settings,
    )
    return result


def enumerated_law(options: dict[str, Any]) -> dict[str, float]:
    """Return the probability of each continuation, from transformers' own processors and criteria."""
    prepared = prepare(options)
    law: dict[str, float] = {}
    open_texts: list[tuple[list[int], float]] = [([], 1.0)]
    while open_texts:
        prefixes = torch.tensor([PROMPT + text for text, _ in open_texts])
        mask = torch.tensor([MASK + [1] * len(text) for text, _ in open_texts])
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = TARGET(input_ids=prefixes, attention_mask=mask, position_ids=positions).logits[:, -1].float()
        longer: list[tuple[list[int], float]] = []
        for row, (text, weight) in enumerate(open_texts):
            probs = prepared.processors(prefixes[row : row + 1], logits[row : row + 1]).double().softmax(dim=-1)[0]
            for token in probs.nonzero()[:, 0].tolist():
                grown, mass = [*text, token], weight * float(probs[token])
                over = prepared.criteria(torch.tensor([PROMPT + grown]), None)
                if bool(torch.as_tensor(over).all()):
                    law[text_key(grown)] = mass
                else:
                    longer.append((grown, mass))
        open_texts = longer
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    return law


def text_key(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def sampled(options: dict[str, Any], law: dict[str, float], draft: Any = DRAFT) -> Counter[str]:
    """Return the continuations of one call, without the padding behind them."""
    tokens = call(RUNS, speculative(draft, gamma=2, seed=7), options)[:, len(PROMPT) :].tolist()
    counts: Counter[str] = Counter()
    for row in tokens:
        # The padding token can be drawn too, so the law says where a text ends; behind that there is only padding.
        text = next((row[:end] for end in range(1, LENGTH) if text_key(row[:end]) in law), row)
        counts[text_key(text if set(row[len(text) :]) <= {PAD} else row)] += 1
    return counts


def shift(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Favour the token that follows the last one, counting: a user's processor that needs the right prefix."""
    liked = (token_ids[:, -1:] + token_ids.shape[1]) % VOCAB
    return scores.scatter_add(1, liked, torch.full_like(scores[:, :1], 1.5))


def ends_in_two_equal(token_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return token_ids[:, -1] == token_ids[:, -2]


def letters() -> Any:
    """Return a tokenizer that gives each token a letter."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate("abcdef")}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "typical_p behind filters": {"top_p": 0.95, "typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "watermarking_config": {"watermarking_config": transformers.WatermarkingConfig(bias=2.0)},
    "renormalize_logits": {"top_k": 4, "renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 1.8, "top_p": 0.95},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 2},
    "min_length": {"min_length": len(PROMPT) + 1},
    "bad_words_ids": {"bad_words_ids": [[0], [2, 3]]},
    "suppress_tokens": {"suppress_tokens": [1], "begin_suppress_tokens": [3]},
    "sequence_bias": {"sequence_bias": [[[2], 1.5], [[1, 3], -2.0]]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: [0, 1, 4] if ids[-1] % 2 else [2, 3, 4]},
    "user's processor": {"logits_processor": [shift]},
    "EOS list": {"eos_token_id": [EOS, 0]},
    "max_length": {"max_length": len(PROMPT) + 2, "max_new_tokens": None},
    "stop string": {"stopping_criteria": [CRITERIA.StopStringCriteria(letters(), ["bc", "d"])]},
    "user's criterion": {"stopping_criteria": [ends_in_two_equal]},
}


def with_lists(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the lists that transformers wants."""
    lists = {
        "logits_processor": PROCESSORS.LogitsProcessorList,
        "stopping_criteria": CRITERIA.StoppingCriteriaList,
    }
    return {name: lists[name](value) if name in lists else value for name, value in options.items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_law_is_that_of_plain_generation(setting: str) -> None:
    options = with_lists(SETTINGS[setting])
    law = enumerated_law(options)
    assert laws.p_value(sampled(options, law), law) > ERROR_RATE


def test_the_law_holds_for_point_masses_and_penalties() -> None:
    options = {"repetition_penalty": 1.8, "temperature": 0.8}
    law = enumerated_law(options)
    assert laws.p_value(sampled(options, law, PromptLookup()), law) > ERROR_RATE


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "plain"])
def test_the_test_sees_a_setting_that_is_not_kept(setting: str) -> None:
    law = enumerated_law(with_lists(SETTINGS[setting]))
    assert laws.p_value(sampled({}, law), law) < ERROR_RATE


def test_the_test_sees_processors_that_miss_the_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("specker.integrations.transformers.processing")
    see = module.RowProcessor.__call__

    def shortsighted(self: Any, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = len(PROMPT) - self.padding.shape[1]
        result: torch.Tensor = see(self, token_ids[:, :length], scores)
        return result

    options = with_lists(SETTINGS["user's processor"])
    law = enumerated_law(options)
    monkeypatch.setattr(module.RowProcessor, "__call__", shortsighted)
    assert laws.p_value(sampled(options, law), law) < ERROR_RATE


def test_the_test_sees_processors_that_miss_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("specker.integrations.transformers.decoding")
    options = with_lists(SETTINGS["user's processor"])
    law = enumerated_law(options)
    monkeypatch.setattr(module, "_padding", lambda input_ids, _mask: [row[None, :0] for row in input_ids])
    assert laws.p_value(sampled(options, law), law) < ERROR_RATE
