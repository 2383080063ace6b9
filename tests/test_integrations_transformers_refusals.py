"""`generate` with specker's loop: what it cannot keep, refused in words."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers

from specker.generation import PromptLookup
from specker.integrations.transformers import speculative

from . import tiny_models
from .tiny_generate import CACHE, CRITERIA, DRAFT, PROMPTS, TARGET, VOCAB, is_even, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, r"num_beams: expected None or 1 with speculative\(\), got 2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha: expected None or 0.0 with speculative\(\), got 0.6"),
        ({"dola_layers": "low"}, r"dola_layers: expected None with speculative\(\), got low"),
        ({"guidance_scale": 1.5}, r"guidance_scale: expected None or 1.0 with speculative\(\), got 1.5"),
        ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens: .* got 3; use speculative\(PromptLookup\(\)\)"),
        ({"assistant_early_exit": 1}, r"assistant_early_exit: .* got 1; use speculative\(EarlyExit\(num_layers\)\)"),
        ({"output_scores": True}, r"output_scores: expected None or False with speculative\(\), got True"),
        ({"output_logits": True}, r"output_logits: expected None or False with speculative\(\), got True"),
        ({"output_attentions": True}, r"output_attentions: expected None or False with speculative\(\), got True"),
        (
            {"output_hidden_states": True},
            r"output_hidden_states: expected None or False with speculative\(\), got True",
        ),
        ({"cache_implementation": "static"}, r"cache_implementation: expected .* with speculative\(\), got static"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(speculative(DRAFT), return_dict_in_generate=True, rows=slice(1, 2), **options)


def test_caches_that_hold_tokens_are_refused() -> None:
    cache = transformers.DynamicCache()
    TARGET(input_ids=PROMPTS[1:2, :3], use_cache=True, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"(cache|past_key_values): expected an empty one .* got one of 3 tokens"):
        run(speculative(DRAFT), rows=slice(1, 2), **{CACHE: cache})


def test_caches_of_another_kind_are_refused() -> None:
    cache = transformers.StaticCache(config=TARGET.config, max_cache_len=64)
    with pytest.raises(ValueError, match=r"(cache|past_key_values): expected none .* got a StaticCache"):
        run(speculative(DRAFT), rows=slice(1, 2), **{CACHE: cache})


def test_other_position_ids_are_refused() -> None:
    for wrong in (torch.arange(6)[None] + 1, torch.arange(7)[None], torch.arange(6).expand(2, 3, 6)):
        with pytest.raises(ValueError, match="position_ids: expected the number of tokens before each"):
            run(speculative(DRAFT), rows=slice(1, 2), position_ids=wrong)
    expected = run(rows=slice(1, 2))
    assert run(speculative(DRAFT), rows=slice(1, 2), position_ids=torch.arange(6)[None]).tolist() == expected.tolist()


def test_embeddings_are_refused() -> None:
    embeddings = TARGET.get_input_embeddings()(PROMPTS[1:2])
    with pytest.raises(ValueError, match=r"inputs_embeds: expected token ids with speculative\(\), got embeddings"):
        TARGET.generate(inputs_embeds=embeddings, max_new_tokens=3, custom_generate=speculative(DRAFT))


def direct(model: Any = TARGET, **model_kwargs: Any) -> Any:
    config = transformers.GenerationConfig(max_length=9)
    return speculative(DRAFT)(model, PROMPTS[1:2], [], [], config, **model_kwargs)


def test_model_inputs_that_the_loop_does_not_carry_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"token_type_ids: expected no such model input with speculative\(\), got Tensor"
    ):
        direct(token_type_ids=torch.zeros(1, 6))


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(
        vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match=r"expected a decoder with speculative\(\), got the encoder-decoder T5"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, custom_generate=speculative(PromptLookup()))


def test_a_length_without_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_length: expected a limit with speculative\(\), got none"):
        direct()


def test_processors_with_a_state_are_refused() -> None:
    config = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)
    with pytest.raises(ValueError, match=r"logits_processor: expected none with a state .* got SynthIDText"):
        run(speculative(DRAFT), do_sample=True, watermarking_config=config)


@pytest.mark.parametrize("option", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_processors_that_hold_the_prompts_take_one_sequence(option: str) -> None:
    value = 2 if option.endswith("size") else 1.5
    one = slice(1, 2)
    assert run(speculative(DRAFT), rows=one, **{option: value}).tolist() == run(rows=one, **{option: value}).tolist()
    with pytest.raises(ValueError, match=r"logits_processor: expected none .* got Encoder.* and a batch of 3"):
        run(speculative(DRAFT), **{option: value})


def test_sequences_that_end_apart_ask_for_a_padding_token() -> None:
    options = {"stopping_criteria": CRITERIA.StoppingCriteriaList([is_even]), "eos_token_id": None}
    with pytest.raises(ValueError, match="pad_token_id: expected one where sequences of a batch end at different"):
        run(speculative(DRAFT), model=tiny_models.tiny_llama(seed=1, vocab=VOCAB), pad_token_id=None, **options)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.25.1")
    with pytest.raises(ValueError, match=r"transformers: expected version 4\.57 to 5\.24, got 5\.25\.1"):
        run(speculative(DRAFT))
