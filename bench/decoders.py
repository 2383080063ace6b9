"""What bench_generate times: plain decoding, transformers' assisted generation, and specker, on one pair of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from specker.cached_model import vocab_size
from specker.generation import Draft, PromptLookup, generate
from specker.layers import skip_layers

GAMMA = 4
MAX_NGRAM = 3
MODES: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "top_p": 0.9}}
"""Greedy, and drawn with the filter that costs most where it sorts."""

PROMPTS = (
    "Repeat this word for word: The lighthouse keeper climbed the stairs at dusk, lit the lamp and wound the clock.",
    "What is a rainbow?",
    "List the months of the year.",
    "Summarise in one sentence: Bees visit flowers for nectar. They carry pollen along, and so the plants set seed.",
    "Write a short letter to a friend about a walk in the woods.",
    "Correct the spelling: The qick brown fox jumpd over the lazy dog and ran into the forrest.",
    "Why is the sky blue?",
    "Give three tips for growing tomatoes on a balcony.",
)
"""Eight prompts: two that are copied from, the others answered freely."""


class Decoded(NamedTuple):
    """What one call gave: the new tokens of each prompt, target passes, and draft tokens where they are known."""

    token_ids: list[list[int]]
    target_passes: int
    drafted: int | None = None
    accepted: int | None = None


class Prompts(NamedTuple):
    """A batch of encoded prompts, padded on the left."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    def only(self, rows: slice) -> Prompts:
        """Return some of the prompts, without padding that all of them have."""
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        start = int(mask.any(dim=0).int().argmax())
        return Prompts(ids[:, start:], mask[:, start:])


Decoder = Callable[[Prompts, int, int], Decoded]
"""From prompts, new tokens and a seed."""


class Pair:
    """The target, the drafts made of it, and every way to decode with them.

    Args:
        model: a `PreTrainedModel`; it no longer ends texts, so that all decoders give equally many tokens.
        skipped_layers: which the layer-skipping draft leaves out.
    """

    def __init__(self, model: Any, skipped_layers: Sequence[int]) -> None:
        self.model = model
        # An id that no row has, because transformers 4.57 cannot look up prompts without one.
        model.generation_config.eos_token_id = vocab_size(model)
        self._assistant = skip_layers(model, skipped_layers)
        # Without these, transformers would stop drafting by itself, and by another rule than gamma.
        config = self._assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = GAMMA, "constant"
        config.assistant_confidence_threshold = 0.0
        self._passes = 0

    def decoders(self, mode: str, draft: str, batch: int) -> dict[str, Decoder]:
        """Return the decoders of one row of the table by name; transformers assists one sequence at a time only."""
        drafts: dict[str, Draft] = {"lookup": PromptLookup(max_ngram=MAX_NGRAM), "layers": self._assistant}
        help_of: dict[str, dict[str, Any]] = {
            "lookup": {"prompt_lookup_num_tokens": GAMMA, "max_matching_ngram_size": MAX_NGRAM},
            "layers": {"assistant_model": self._assistant},
        }
        found = {
            "plain": self._transformers(mode, {}),
            "assisted": self._transformers(mode, help_of[draft]),
            "specker": self._specker(mode, drafts[draft]),
        }
        if batch > 1:
            del found["assisted"]
        return found

    def _transformers(self, mode: str, assistance: dict[str, Any]) -> Decoder:
        sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, **MODES[mode]}
        if mode == "greedy":
            sampling = {"do_sample": False}

        def decode(prompts: Prompts, new_tokens: int, seed: int) -> Decoded:
            torch.manual_seed(seed)
            with self._counted():
                output = self.model.generate(
                    prompts.input_ids,
                    attention_mask=prompts.attention_mask,
                    max_new_tokens=new_tokens,
                    pad_token_id=0,
                    **sampling,
                    **assistance,
                )
            return Decoded(output[:, prompts.input_ids.shape[1] :].tolist(), self._passes)

        return decode

    def _specker(self, mode: str, draft: Draft) -> Decoder:
        def decode(prompts: Prompts, new_tokens: int, seed: int) -> Decoded:
            parameters: dict[str, Any] = MODES[mode]
            result = generate(
                self.model, draft, prompts.input_ids, attention_mask=prompts.attention_mask, gamma=GAMMA,
                max_new_tokens=new_tokens, seed=seed, eos_token_id=(), **parameters,
            )  # fmt: skip
            stats = result.stats
            token_ids = [tokens.tolist() for tokens in result.token_ids]
            return Decoded(token_ids, stats.target_passes, stats.drafted, stats.accepted)

        return decode

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the passes of the target: a hook costs the same few microseconds whoever runs it."""
        self._passes = 0

        def count(*_: Any) -> None:
            self._passes += 1

        handle = self.model.register_forward_hook(count)
        try:
            yield
        finally:
            handle.remove()
