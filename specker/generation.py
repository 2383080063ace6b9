"""The decode loop round the verifier, for Hugging Face causal language models.

Each round drafts a block of tokens, reads it with one pass of the target, verifies it, and crops the caches of both
models to what was kept. The first round reads the prompt and the first block in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from specker import checks
from specker.accounting import (
    GenerationStats,
    SequenceStats,
    StageClock,
    TokenBlock,
    cut_at_eos,
    token_kinds,
)
from specker.cached_model import CachedModel, vocab_size
from specker.drafts import Drafter, PromptLookup, SkipLayers, open_drafter
from specker.sampling import Sampling
from specker.status import Status, raise_for_bits
from specker.verify import verify

__all__ = ["Draft", "GenerationResult", "PromptLookup", "SkipLayers", "generate"]

Draft = PromptLookup | SkipLayers | torch.nn.Module
"""What can draft: a model with the target's vocabulary is a `PreTrainedModel`."""

# A residual without mass is drawn from the target by the verifier: rounding, no fault of the caller's.
_FAULTS = ~int(Status.DRAFT_TOKEN_PLACEHOLDER | Status.RESIDUAL_EMPTY)


class GenerationResult(NamedTuple):
    """New tokens and counters.

    `token_ids` holds one 1-D int64 tensor a sequence, the new tokens only; `seed (batch,)` int64 repeats the run.
    """

    token_ids: list[torch.Tensor]
    stats: GenerationStats
    seed: torch.Tensor


def generate(
    target: Any,
    draft: Draft,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    gamma: int = 4,
    max_new_tokens: int = 128,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    seed: int | torch.Tensor | None = None,
    eos_token_id: int | Collection[int] | None = None,
    on_tokens: Callable[[TokenBlock], None] | None = None,
) -> GenerationResult:
    """Continue prompts by speculative decoding, with exactly the target's distribution.

    Equivalent to, in distribution (and token for token where the temperature is 0 and the target's logits do not
    depend on how many tokens one pass reads)::

        target.generate(input_ids, do_sample=True, temperature=temperature, max_new_tokens=max_new_tokens)

    Args:
        target: a `PreTrainedModel` in evaluation mode.
        draft: a model with the same vocabulary, `SkipLayers(...)` or `PromptLookup(...)`.
        input_ids: `(batch, length)` int64, the prompts; batch is 1 at present.
        attention_mask: `(batch, length)` of 0 and 1, zeros on the left where a prompt is padded.
        gamma: draft tokens a round, >= 0; 0 is plain decoding. A round never drafts more than can still be used.
        max_new_tokens: >= 1; generation stops there exactly.
        temperature: >= 0, a number or a `(batch,)` tensor; 0 is greedy. The draft draws with the same parameters.
        top_k: as in `specker.verify`.
        top_p: as in `specker.verify`.
        min_p: as in `specker.verify`.
        seed: `(batch,)` int64, or an int s for seeds s + row, or None for seeds from torch's default generator.
        eos_token_id: one or several; None takes those of the target's generation config, `()` is none.
        on_tokens: called with each sequence's `TokenBlock` as soon as it is decided.

    Raises:
        NotImplementedError: batch is above 1.
        TypeError: input_ids is not an int64 tensor, or draft is no draft.
        ValueError: an argument is out of range, or the vocabularies differ.
        InvalidInputError: a model returned NaN, infinity or nothing finite; no token of that round is emitted.

    Guarantees: the tokens of a sequence depend on its seed and prompt alone; the last token of a sequence is an
    end-of-sequence token if and only if one ended it.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023,
    "Accelerating Large Language Model Decoding with Speculative Sampling".

    Example:
        >>> result = generate(target, PromptLookup(), input_ids, temperature=0.0)  # doctest: +SKIP
        >>> result.stats.tokens_per_target_pass  # doctest: +SKIP
        2.1
    """
    sequences = _prompts(input_ids, attention_mask)
    if gamma < 0:
        raise ValueError(f"gamma: expected a number >= 0, got {gamma}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected a number >= 1, got {max_new_tokens}")
    sampling = Sampling(temperature, top_k, top_p, min_p)
    # Bad parameters are told before the first pass of a model, not behind it.
    checks.check_parameters(sampling, len(sequences), vocab_size(target), input_ids.device)
    seeds = checks.seed_tensor(seed, len(sequences), input_ids.device)
    clock = StageClock(input_ids.device)
    cached_target, drafter = CachedModel(target, "target"), open_drafter(draft, target, sampling, seeds)
    eos_token_ids = _eos_token_ids(target, eos_token_id)
    counters = [SequenceStats() for _ in sequences]
    starts = [len(sequence) for sequence in sequences]
    target_passes, active = 0, set(range(len(sequences)))
    while active:
        num_wanted = [min(gamma, max_new_tokens - stats.emitted - 1) for stats in counters]
        with torch.no_grad():
            rounds = _round(cached_target, drafter, sequences, num_wanted, sampling, seeds, clock)
        target_passes += 1
        for row, outcome in enumerate(rounds):
            token_ids = cut_at_eos(outcome.token_ids, eos_token_ids)
            block = TokenBlock(row, tuple(token_ids), token_kinds(len(token_ids), *outcome[1:]))
            sequences[row].extend(token_ids)
            counters[row].record(outcome.num_drafted, block.kinds)
            if token_ids[-1] in eos_token_ids or counters[row].emitted == max_new_tokens:
                active.remove(row)
            if on_tokens is not None:
                on_tokens(block)
    new_tokens = [
        torch.tensor(sequence[start:], dtype=torch.int64, device=input_ids.device)
        for sequence, start in zip(sequences, starts, strict=True)
    ]
    return GenerationResult(new_tokens, GenerationStats(tuple(counters), target_passes, clock.seconds()), seeds)


class _Outcome(NamedTuple):
    """What verification made of one sequence's draft."""

    token_ids: list[int]
    num_accepted: int
    num_drafted: int


def _round(
    target: CachedModel,
    drafter: Drafter,
    sequences: list[list[int]],
    num_wanted: list[int],
    sampling: Sampling,
    seeds: torch.Tensor,
    clock: StageClock,
) -> list[_Outcome]:
    """Draft, read, verify and crop once; the host waits for the device a single time, for the outcome."""
    with clock.stage("draft"):
        proposal = drafter.propose(sequences, num_wanted)
    with clock.stage("target"):
        gamma = proposal.token_ids.shape[1]
        unread = torch.tensor([sequence[target.num_cached :] for sequence in sequences], device=seeds.device)
        # No embedding takes the -1 that stands for a draft token that is missing.
        draft_inputs = proposal.token_ids.clamp(min=0)
        target_logits = target.advance(torch.cat([unread, draft_inputs], dim=1), num_logits=gamma + 1)
    with clock.stage("verify"):
        result = verify(
            proposal.token_ids,
            target_logits,
            proposal.logits,
            num_draft_tokens=proposal.num_draft_tokens,
            draft_receipt=proposal.receipt,
            seed=seeds,
            position=torch.tensor([len(sequence) for sequence in sequences], device=seeds.device),
            **sampling._asdict(),
        )
        counts = (result.num_accepted, proposal.num_draft_tokens, result.num_emitted)
        status = result.status | proposal.status
        table = torch.cat([torch.stack([*counts, status], dim=1), result.token_ids], dim=1).tolist()
        if any(row[3] & _FAULTS for row in table):
            raise_for_bits(status, _FAULTS)
    kept = [len(sequence) + row[0] for sequence, row in zip(sequences, table, strict=True)]
    target.keep(min(kept))
    drafter.keep(kept)
    return [_Outcome(row[4 : 4 + row[2]], row[0], row[1]) for row in table]


def _prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt without its padding."""
    checks.check_tensor("input_ids", input_ids, (None, None), (torch.int64,), None)
    batch, length = input_ids.shape
    if batch != 1:
        raise NotImplementedError(f"input_ids: expected a batch of 1 sequence, got {batch}; call generate for each")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    checks.check_tensor("attention_mask", attention_mask, (batch, length), (torch.int64, torch.int32, torch.bool), None)
    prompts = []
    for tokens, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
        num_tokens = sum(map(bool, mask))
        if not all(mask[length - num_tokens :]):
            raise ValueError("attention_mask: expected zeros on the left only, got zeros behind a one")
        if num_tokens == 0:
            raise ValueError("input_ids: expected prompts of at least one token, got an empty one")
        prompts.append(tokens[length - num_tokens :])
    return prompts


def _eos_token_ids(target: Any, eos_token_id: int | Collection[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        eos_token_id = target.generation_config.eos_token_id
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
