"""specker's decode loop as a function for `model.generate(..., custom_generate=...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specker.accounting import TokenBlock
from specker.drafts import Draft
from specker.gamma import Gamma
from specker.generation import GenerationResult, generate
from specker.integrations.transformers.criteria import split_criteria
from specker.integrations.transformers.processing import split_processors
from specker.integrations.transformers.settings import check_cache, check_config, check_model_inputs
from specker.integrations.transformers.versions import installed_version
from specker.packages import require


def speculative(
    draft_model: Draft,
    *,
    gamma: Gamma = 4,
    seed: int | torch.Tensor | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    on_result: Callable[[GenerationResult], None] | None = None,
) -> SpeculativeGenerate:
    """Return what makes `model.generate` decode speculatively, with exactly the law it would have without.

    Equivalent to, in distribution (and token for token with `do_sample=False` where the model's logits do not depend
    on how many tokens one pass reads):

        model.generate(input_ids, do_sample=True, temperature=0.8, repetition_penalty=1.2)

    called as:

        model.generate(input_ids, ..., custom_generate=speculative(draft_model))

    for batches too, which transformers' own assisted generation refuses.

    `temperature`, `top_k`, `top_p` and `min_p` are applied as the verifier loads the logits. The other settings that
    `generate` turns into logits processors, and processors given by the user, run as the processors they are: one
    position at a time, with the tokens before it. Ends of text, `max_length`, `max_new_tokens`, `max_time` and stopping
    criteria hold after every token.

    Args:
        draft_model: what drafts, as in `specker.generation.generate`: a model with the same vocabulary, `SkipLayers`,
            `PromptLookup`, ...
        gamma: draft tokens a round, as in `specker.generation.generate`.
        seed: as in `specker.generation.generate`; None draws seeds from torch's default generator, so that
            `torch.manual_seed` repeats a call.
        tokenizer: needed where `generate` is given `stop_strings`, which it takes from its own arguments only.
        streamer: a transformers streamer, for one sequence. Give it here and not to `generate`, which does not pass
            it on.
        on_result: called with the result and the counters of each call.

    Returns:
        A function for the argument `custom_generate`. It returns what `generate` returns: `(batch, length)` token ids,
        prompts first, shorter sequences padded on the right; with `return_dict_in_generate` the `sequences` of a
        `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: from `generate`, for what cannot be kept: beams and other searches, `guidance_scale`, scores,
            logits, attentions or hidden states in the output, static or quantised caches, a cache that holds tokens,
            model inputs besides ids and mask, processors with a state, or a version of transformers this was not made
            for.
        InvalidInputError: from `generate`, where a model returned NaN, infinity or nothing finite.

    Guarantees: the law of `model.generate` with the same generation config, processors and criteria; logits processors
        and stopping criteria of the user must depend on their arguments alone, since they see tokens that are later
        rejected; a sequence of a batch ends where its own criteria end it.

    Source: Leviathan et al. 2023; Chen et al. 2023.

    Example:
        >>> model.generate(input_ids, do_sample=True, custom_generate=speculative(draft))  # doctest: +SKIP
    """
    return SpeculativeGenerate(draft_model, gamma, seed, tokenizer, streamer, on_result)


@dataclasses.dataclass(frozen=True)
class SpeculativeGenerate:
    """A decoding function in the form that transformers calls; made by `speculative`, whose arguments it holds."""

    draft_model: Draft
    gamma: Gamma
    seed: int | torch.Tensor | None
    tokenizer: Any
    streamer: Any
    on_result: Callable[[GenerationResult], None] | None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        stop_strings: str | Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Continue the prompts; called by `model.generate` with everything prepared."""
        installed_version()
        batch, width = input_ids.shape
        check_config(generation_config)
        attention_mask = check_model_inputs(model, input_ids, model_kwargs)
        check_cache(model_kwargs)
        padding = _padding(input_ids, attention_mask)
        sampling, processors = split_processors(logits_processor, padding, generation_config.do_sample)
        ends = split_criteria(stopping_criteria, padding, self._stop_string_criteria(stop_strings))
        if self.streamer is not None:
            if batch > 1:
                raise ValueError(f"streamer: expected one sequence with it, got a batch of {batch}")
            self.streamer.put(input_ids.cpu())
        try:
            result = generate(
                model,
                self.draft_model,
                input_ids.to(model.device),
                attention_mask=None if attention_mask is None else attention_mask.to(model.device),
                gamma=self.gamma,
                max_new_tokens=ends.max_length - width,
                logits_processor=processors,
                stopping_criteria=ends.criteria,
                seed=self.seed,
                eos_token_id=ends.eos_token_ids,
                on_tokens=None if self.streamer is None else self._stream,
                **sampling._asdict(),
            )
        finally:
            # Also where a model fails: somebody may be waiting for the end of the stream.
            if self.streamer is not None:
                self.streamer.end()
        if self.on_result is not None:
            self.on_result(result)
        sequences = _padded(input_ids, result.token_ids, getattr(generation_config, "_pad_token_tensor", None))
        if generation_config.return_dict_in_generate:
            return require("transformers.generation.utils").GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _stream(self, block: TokenBlock) -> None:
        self.streamer.put(torch.tensor(block.token_ids))

    def _stop_string_criteria(self, stop_strings: str | Sequence[str] | None) -> list[Any]:
        if stop_strings is None:
            return []
        if self.tokenizer is None:
            raise ValueError("stop_strings: expected a tokenizer with it: speculative(..., tokenizer=tokenizer)")
        criterion = require("transformers.generation.stopping_criteria").StopStringCriteria
        return [criterion(tokenizer=self.tokenizer, stop_strings=stop_strings)]


def _padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the padding on the left of each prompt, `(1, count)` ids each, which processors are used to see."""
    if attention_mask is None:
        return [row[None, :0] for row in input_ids]
    counts = (input_ids.shape[1] - attention_mask.sum(dim=1)).tolist()
    return [row[None, :count] for row, count in zip(input_ids, counts, strict=True)]


def _padded(
    prompts: torch.Tensor, new_tokens: Sequence[torch.Tensor], pad_token_id: torch.Tensor | None
) -> torch.Tensor:
    """Return prompts and new tokens as one tensor on the prompts' device."""
    longest = max(map(len, new_tokens))
    rows = list(new_tokens)
    if any(len(tokens) < longest for tokens in new_tokens):
        if pad_token_id is None:
            raise ValueError("pad_token_id: expected one where sequences of a batch end at different lengths, got None")
        pad = torch.nn.functional.pad
        rows = [pad(tokens, (0, longest - len(tokens)), value=int(pad_token_id)) for tokens in new_tokens]
    return torch.cat([prompts, torch.stack(rows).to(prompts.device)], dim=1)
