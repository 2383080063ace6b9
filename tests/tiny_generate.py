"""`generate` of a tiny model on prompts of different lengths, with and without a loop of one's own."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from . import tiny_models

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
