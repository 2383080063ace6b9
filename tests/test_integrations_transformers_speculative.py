"""`generate` with specker's loop: greedy equality with plain generation, and what comes back."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specker import Sampling
from specker.generation import EarlyExit, GenerationResult, PromptLookup, SkipLayers
from specker.integrations.transformers import speculative
from specker.integrations.transformers.processing import split_processors

from .tiny_generate import CRITERIA, DRAFT, EOS, MASK, PAD, PROCESSORS, PROMPTS, TARGET, VOCAB, count_on, is_even, run

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("name", ["acceptance", "criteria", "processing", "settings", "versions"])
def test_examples_of_the_documentation_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"specker.integrations.transformers.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
