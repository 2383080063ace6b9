"""`generate` with specker's loop: greedy equality with plain generation, what comes back, what is refused."""

from __future__ import annotations

import doctest
import importlib
import inspect
import itertools
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specker import InvalidInputError, Sampling
from specker.generation import EarlyExit, GenerationResult, PromptLookup, SkipLayers
from specker.integrations.transformers import speculative
from specker.integrations.transformers.processing import split_processors

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, EOS, PAD = 32, 9, 0
TARGET = tiny_models.tiny_llama(seed=1, vocab=VOCAB, eos=EOS)
DRAFT = tiny_models.tiny_llama(seed=2, vocab=VOCAB, layers=1)
PROMPTS = torch.tensor([[PAD, PAD, 3, 7, 7, 1], [5, 6, 5, 6, 5, 6], [PAD, PAD, PAD, PAD, PAD, 8]])
MASK = (PROMPTS != PAD).long()
# transformers 5.18 renamed the argument.
CACHE = "cache" if "cache" in inspect.signature(TARGET.forward).parameters else "past_key_values"
PROCESSORS = importlib.import_module("transformers.generation.logits_process")
CRITERIA = importlib.import_module("transformers.generation.stopping_criteria")


def run(custom_generate: Any = None, *, model: Any = TARGET, rows: slice = slice(None), **options: Any) -> Any:
    settings = {
        "attention_mask": MASK[rows],
        "do_sample": False,
        "max_new_tokens": 20,
        "pad_token_id": PAD,
        "custom_generate": custom_generate,
        **options,
    }
    return model.generate(PROMPTS[rows], **settings)


def count_on(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    liked = (token_ids[:, -1:] + token_ids.shape[1]) % VOCAB
    return scores.scatter_add(1, liked, torch.full_like(scores[:, :1], 3.0))


def is_even(token_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
    return (token_ids[:, -1] % 2 == 0) & (token_ids[:, -2] % 2 == 0)


def is_long(token_ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:
    """End at a length that counts the padding."""
    return torch.full((len(token_ids),), token_ids.shape[1] >= 11)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no EOS": {"eos_token_id": None},
    "EOS list": {"eos_token_id": [EOS, 4, 13]},
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "one new token": {"max_new_tokens": 1},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 16},
    "bad_words_ids": {"bad_words_ids": [[3], [7, 7], [1, 2]]},
    "suppress_tokens": {"suppress_tokens": [7, 8], "begin_suppress_tokens": [1]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5)},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "user's processor": {"logits_processor": PROCESSORS.LogitsProcessorList([count_on])},
    "user's filter": {"logits_processor": PROCESSORS.LogitsProcessorList([PROCESSORS.TopKLogitsWarper(5)])},
    "user's criterion": {"stopping_criteria": CRITERIA.StoppingCriteriaList([is_even])},
    "two criteria": {"stopping_criteria": CRITERIA.StoppingCriteriaList([is_even, is_long])},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: range(row, VOCAB, 1 + row + len(ids) % 2)
    },
}
DRAFTS = {"model": DRAFT, "itself": TARGET, "layers": SkipLayers((1,)), "exit": EarlyExit(1), "lookup": PromptLookup()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_output_is_that_of_plain_generation(setting: str) -> None:
    expected = run(**SETTINGS[setting])
    assert run(speculative(DRAFT), **SETTINGS[setting]).tolist() == expected.tolist()


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_output_is_that_of_plain_generation_for_every_draft(draft: str, gamma: int) -> None:
    options = {"repetition_penalty": 1.6, "min_new_tokens": 5}
    assert run(speculative(DRAFTS[draft], gamma=gamma), **options).tolist() == run(**options).tolist()


def test_a_sampling_call_repeats_under_the_seed_of_torch_and_under_its_own() -> None:
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 3}
    torch.manual_seed(3)
    first = run(speculative(DRAFT), **options)
    torch.manual_seed(3)
    assert run(speculative(DRAFT), **options).tolist() == first.tolist()
    assert len({tuple(row) for row in first.tolist()}) == len(first) == 9
    assert run(speculative(DRAFT, seed=4), **options).tolist() == run(speculative(DRAFT, seed=4), **options).tolist()


def test_the_result_comes_as_a_dictionary_where_asked_for() -> None:
    results: list[GenerationResult] = []
    output = run(speculative(DRAFT, gamma=3, on_result=results.append), return_dict_in_generate=True)
    assert output.sequences.tolist() == run().tolist()
    assert output.scores is None
    assert results[0].stats.emitted == sum(len(tokens) for tokens in results[0].token_ids)
    assert max(len(tokens) for tokens in results[0].token_ids) == output.sequences.shape[1] - PROMPTS.shape[1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_models.save_folder(
        tiny_models.tiny_llama(1, vocab=tiny_models.BYTE_VOCAB), tmp_path_factory.mktemp("bytes")
    )
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def bytes_call(bytewise: Any, custom_generate: Any = None, **options: Any) -> Any:
    target = tiny_models.tiny_llama(1, vocab=tiny_models.BYTE_VOCAB)
    inputs = bytewise("rain", return_tensors="pt")
    letters = set(bytewise("abcdefghijklmnopqrstuvwxyz").input_ids)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "pad_token_id": 0,
        "custom_generate": custom_generate,
        # A text of bytes that make no characters has no strings to stop at.
        "suppress_tokens": sorted(set(range(tiny_models.BYTE_VOCAB)) - letters),
    }
    return target.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **{**settings, **options})


def test_stop_strings_end_the_text(tokenizer: Any) -> None:
    text = tokenizer.decode(bytes_call(tokenizer)[0, 4:].tolist())
    stop = text[6:8]
    expected = bytes_call(tokenizer, stop_strings=[stop], tokenizer=tokenizer)
    assert expected.shape[1] < 24
    draft = tiny_models.tiny_llama(1, vocab=tiny_models.BYTE_VOCAB)
    for custom_generate, options in (
        (speculative(draft, gamma=7, tokenizer=tokenizer), {"stop_strings": [stop]}),
        (
            speculative(draft, gamma=7),
            {
                "stopping_criteria": CRITERIA.StoppingCriteriaList(
                    [CRITERIA.StopStringCriteria(tokenizer=tokenizer, stop_strings=[stop])]
                )
            },
        ),
    ):
        assert bytes_call(tokenizer, custom_generate, **options).tolist() == expected.tolist()


def test_stop_strings_ask_for_a_tokenizer(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="stop_strings: expected a tokenizer with it"):
        bytes_call(tokenizer, speculative(PromptLookup()), stop_strings=["x"])


class Recorder:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_every_token_and_the_end() -> None:
    streamer = Recorder()
    tokens = run(speculative(DRAFT, streamer=streamer), rows=slice(1, 2))
    assert streamer.pieces[0] == PROMPTS[1].tolist()
    assert [*itertools.chain(*streamer.pieces)] == tokens[0].tolist()
    assert streamer.ended == 1


def test_a_text_streamer_of_another_thread_gets_the_text(tokenizer: Any) -> None:
    expected = tokenizer.decode(bytes_call(tokenizer)[0, 4:].tolist())
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    draft = tiny_models.tiny_llama(2, vocab=tiny_models.BYTE_VOCAB)
    thread = threading.Thread(target=bytes_call, args=[tokenizer, speculative(draft, streamer=streamer)])
    thread.start()
    assert "".join(streamer) == expected
    thread.join(timeout=60)


def test_the_stream_ends_where_the_model_fails() -> None:
    broken = tiny_models.tiny_llama(seed=1, vocab=VOCAB)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    streamer = Recorder()
    with pytest.raises(InvalidInputError, match="a target row holds NaN"):
        run(speculative(PromptLookup(), streamer=streamer), model=broken, rows=slice(1, 2), do_sample=True)
    assert streamer.ended == 1


def test_a_streamer_takes_one_sequence() -> None:
    with pytest.raises(ValueError, match="streamer: expected one sequence with it, got a batch of 3"):
        run(speculative(DRAFT, streamer=Recorder()))


FILTERS = [
    PROCESSORS.TemperatureLogitsWarper(0.7),
    PROCESSORS.TopKLogitsWarper(9),
    PROCESSORS.TopPLogitsWarper(0.9),
    PROCESSORS.MinPLogitsWarper(0.05),
]
NO_PADDING = [torch.zeros(1, 0, dtype=torch.int64)]


def test_filters_in_the_order_of_the_verifier_are_left_to_it() -> None:
    sampling, processors = split_processors([*FILTERS, PROCESSORS.LogitNormalization()], NO_PADDING, do_sample=True)
    assert (sampling, processors) == (Sampling(0.7, 9, 0.9, 0.05), None)
    assert split_processors(FILTERS[1:3], NO_PADDING, do_sample=True) == (Sampling(1.0, 9, 0.9, 0.0), None)


@pytest.mark.parametrize(
    ("prepared", "num_run", "sampling"),
    [
        ([FILTERS[2], FILTERS[1]], 1, Sampling(top_k=9)),
        ([FILTERS[1], FILTERS[0], FILTERS[2]], 1, Sampling(0.7, top_p=0.9)),
        ([FILTERS[0], count_on, FILTERS[2]], 2, Sampling(top_p=0.9)),
        ([FILTERS[0], PROCESSORS.TopPLogitsWarper(0.9, min_tokens_to_keep=2)], 2, Sampling()),
        ([PROCESSORS.TopPLogitsWarper(0.9, filter_value=-3.0), FILTERS[3]], 1, Sampling(min_p=0.05)),
    ],
)
def test_other_filters_run_as_they_are(prepared: list[Any], num_run: int, sampling: Sampling) -> None:
    applied, rows = split_processors(prepared, NO_PADDING, do_sample=True)
    assert applied == sampling
    assert rows is not None
    assert [*rows[0].processors] == prepared[:num_run]


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


def test_a_prefix_function_is_asked_about_the_prompt_of_each_sequence() -> None:
    options = {
        "do_sample": True,
        "num_return_sequences": 2,
        "max_new_tokens": 4,
        "prefix_allowed_tokens_fn": lambda prompt, _token_ids: [10 + prompt],
    }
    # Versions number the sequences of one prompt differently.
    expected = run(**options).tolist()
    assert len({row[-1] for row in expected}) >= 3
    assert run(speculative(DRAFT), **options).tolist() == expected


def test_the_code_of_the_readme_runs() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL) if "accelerate" in code)
    names: dict[str, Any] = {
        "model": TARGET,
        "draft_model": DRAFT,
        "inputs": {"input_ids": PROMPTS[1:2], "attention_mask": MASK[1:2], "max_length": 16, "pad_token_id": PAD},
    }
    exec(block, names)
    assert names["counts"].rounds > 0


@pytest.mark.parametrize("name", ["acceptance", "criteria", "processing", "settings", "versions"])
def test_examples_of_the_documentation_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"specker.integrations.transformers.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
