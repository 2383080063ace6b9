"""The decode loop round the verifier, for batches of prompts on Hugging Face causal language models.

Each round drafts a block of tokens for every sequence, reads the blocks with one pass of the target, verifies them, and
takes back what was rejected. The first round reads the prompts and the first blocks in the same pass. Sequences accept
different numbers of tokens; `specker.slot_cache` tells how their caches stay right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from specker import checks
from specker.accounting import GenerationStats, SequenceStats, TokenBlock, cut_at_eos, token_kinds
from specker.adjustments import allowed_operand
from specker.cached_model import CachedModel, vocab_size
from specker.decode import Decoder, Outcome
from specker.drafts import Conditions, Continuations, Draft, EarlyExit, ModelDraft, PromptLookup, SkipLayers
from specker.gamma import AutoGamma, Gamma, Policy, RoundRecord, open_policy
from specker.model_drafter import open_drafter
from specker.processors import Criterion, Processor, cut_where_stopped, one_each
from specker.prompts import end_tokens, prompt_tokens
from specker.sampling import Sampling
from specker.stages import StageClock, StageSeconds

__all__ = [
    "AutoGamma",
    "Continuations",
    "Draft",
    "EarlyExit",
    "Gamma",
    "GenerationResult",
    "ModelDraft",
    "PromptLookup",
    "SkipLayers",
    "generate",
]


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
    gamma: Gamma = 4,
    max_new_tokens: int = 128,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    draft_sampling: Sampling | None = None,
    allowed_tokens: torch.Tensor | None = None,
    logits_processor: Processor | Sequence[Processor] | None = None,
    stopping_criteria: Criterion | Sequence[Criterion] | None = None,
    seed: int | torch.Tensor | None = None,
    eos_token_id: int | Collection[int] | None = None,
    on_tokens: Callable[[TokenBlock], None] | None = None,
) -> GenerationResult:
    """Continue prompts by speculative decoding, with exactly the target's distribution.

    Equivalent to, in distribution (and token for token where the temperature is 0 and the target's logits do not
    depend on how many tokens one pass reads: in half precision they often do, and near ties then fall otherwise by the
    model's own rounding, while every token stays the arg-max of the logits it was decided from), for each sequence by
    itself:

        target.generate(input_ids, do_sample=True, temperature=temperature, max_new_tokens=max_new_tokens)

    Args:
        target: a `PreTrainedModel` in evaluation mode. For a batch its attention has to be sdpa or eager.
        draft: a model with the same vocabulary, `ModelDraft(...)` for other models, `SkipLayers(...)`,
            `EarlyExit(...)`, `PromptLookup(...)` or `Continuations(...)`.
        input_ids: `(batch, length)` int64, the prompts.
        attention_mask: `(batch, length)` of 0 and 1, zeros on the left where a prompt is padded; None is no padding.
        gamma: draft tokens a round, >= 0; 0 is plain decoding. A number, one a sequence (a list or a `(batch,)` integer
            tensor), a schedule called with a sequence's `SequenceStats` before each round, or "auto" (or `AutoGamma`),
            the cost model's choice. A round never drafts more than can still be used.
        max_new_tokens: >= 1; every sequence stops there exactly.
        temperature: >= 0, a number or a `(batch,)` tensor; 0 is greedy. The draft draws with the same parameters.
        top_k: as in `specker.verify`.
        top_p: as in `specker.verify`.
        min_p: as in `specker.verify`.
        draft_sampling: the draft's own parameters where they shall differ.
        allowed_tokens: `(batch, words)` int32 bit mask of the tokens a sequence may give, as in `specker.verify`.
        logits_processor: a transformers `LogitsProcessorList`, applied before temperature and filters to every target
            row (and draft row of the same vocabulary) with the tokens of its own sequence up to there, draft tokens
            included and padding not: `(1, length)` ids and `(1, vocab)` float32 scores. One for all sequences, or a
            plain list with one for each. It must depend on its arguments alone: rejected tokens are seen too.
        stopping_criteria: a transformers `StoppingCriteriaList`, called behind every new token with `(1, length)` ids
            without padding and None for the scores; a sequence stops with the token for which it is true. One for
            all, or a plain list with one for each.
        seed: `(batch,)` int64, or an int s for seeds s + row, or None for seeds from torch's default generator.
        eos_token_id: one or several; None takes those of the target's generation config, `()` is none.
        on_tokens: called with each sequence's `TokenBlock` as soon as it is decided.

    Raises:
        TypeError: input_ids is not an int64 tensor, or draft, gamma or a hook is of no kind listed here.
        ValueError: an argument is out of range, or the vocabularies differ, or a model keeps no attention cache.
        InvalidInputError: a model returned NaN, infinity or nothing finite; no token of that round is emitted.

    Guarantees: the tokens of a sequence depend on its prompt, seed and parameters alone, not on its neighbours, as far
    as the models' logits do (gamma "auto" measures time, and then only their distribution does not); a sequence that
    ends with an end-of-sequence token ends with the first.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023,
    "Accelerating Large Language Model Decoding with Speculative Sampling".

    Example:
        >>> result = generate(target, PromptLookup(), input_ids, temperature=0.0)  # doctest: +SKIP
        >>> result.stats.tokens_per_target_pass  # doctest: +SKIP
        2.1
    """
    sequences = prompt_tokens(input_ids, attention_mask)
    batch, device = len(sequences), input_ids.device
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected a number >= 1, got {max_new_tokens}")
    policy = open_policy(gamma, batch)
    conditions = Conditions(
        Sampling(temperature, top_k, top_p, min_p),
        checks.seed_tensor(seed, batch, device),
        draft_sampling,
        allowed_tokens,
        one_each("logits_processor", logits_processor, batch),
    )
    _check_conditions(conditions, vocab_size(target))
    clock = StageClock(device)
    drafter = open_drafter(draft, target, batch)
    decoder = Decoder(CachedModel(target, "target", batch), drafter, sequences, conditions, clock)
    ends = _Ends(
        end_tokens(target, eos_token_id),
        one_each("stopping_criteria", stopping_criteria, batch),
        max_new_tokens,
        device,
    )
    starts = [len(sequence) for sequence in sequences]
    counters = [SequenceStats() for _ in sequences]
    target_passes = 0
    # Without the bookkeeping for gradients a pass takes a twentieth less of the processor.
    with torch.inference_mode():
        while decoder.active:
            _round(decoder, policy, sequences, counters, ends, clock, on_tokens)
            target_passes += 1
    new_tokens = [
        torch.tensor(sequence[start:], dtype=torch.int64, device=device)
        for sequence, start in zip(sequences, starts, strict=True)
    ]
    stats = GenerationStats(tuple(counters), target_passes, clock.seconds(), tuple(policy.choices))
    return GenerationResult(new_tokens, stats, conditions.seeds)


class _Ends(NamedTuple):
    """What ends a sequence."""

    token_ids: frozenset[int]
    criteria: list[Criterion] | None
    max_new_tokens: int
    device: torch.device

    def cut(
        self, number: int, sequence: Sequence[int], num_before: int, token_ids: list[int]
    ) -> tuple[list[int], bool]:
        """Return the tokens up to the end, if there is one among them, and whether there is."""
        token_ids = cut_at_eos(token_ids, self.token_ids)
        over = token_ids[-1] in self.token_ids or num_before + len(token_ids) >= self.max_new_tokens
        if self.criteria is not None:
            stop = cut_where_stopped(self.criteria[number], sequence, token_ids, self.device)
            if stop > 0:
                return token_ids[:stop], True
        return token_ids, over


def _round(
    decoder: Decoder,
    policy: Policy,
    sequences: Sequence[list[int]],
    counters: Sequence[SequenceStats],
    ends: _Ends,
    clock: StageClock,
    on_tokens: Callable[[TokenBlock], None] | None,
) -> None:
    """Run one round, append and count what it gives, and let go of the sequences that end."""
    active = decoder.active
    wanted = policy.choose(active, [counters[number] for number in active])
    room = [ends.max_new_tokens - counters[number].emitted - 1 for number in active]
    reads_prompt = counters[active[0]].rounds == 0
    # Reading the clock makes the host wait for a GPU.
    before = clock.seconds() if policy.measures else None
    outcomes = decoder.round(list(map(min, wanted, room)))
    if before is not None:
        policy.observe(_record(active, outcomes, before, clock.seconds(), reads_prompt=reads_prompt))
    going_on = []
    for row, (number, outcome) in enumerate(zip(active, outcomes, strict=True)):
        token_ids, over = ends.cut(number, sequences[number], counters[number].emitted, outcome.token_ids)
        kinds = token_kinds(len(token_ids), outcome.num_accepted, outcome.num_drafted)
        sequences[number].extend(token_ids)
        counters[number].record(outcome.num_drafted, kinds, outcome.accept_probs)
        going_on += [] if over else [row]
        if on_tokens is not None:
            on_tokens(TokenBlock(number, tuple(token_ids), kinds))
    decoder.retain(going_on)


def _record(
    active: Sequence[int],
    outcomes: Sequence[Outcome],
    before: StageSeconds,
    after: StageSeconds,
    *,
    reads_prompt: bool,
) -> RoundRecord:
    pass_seconds = after.target + after.verify - before.target - before.verify
    accept_probs = [outcome.accept_probs for outcome in outcomes]
    return RoundRecord(active, accept_probs, after.draft - before.draft, pass_seconds, reads_prompt)


def _check_conditions(conditions: Conditions, vocab: int) -> None:
    """Tell of bad parameters before the first pass of a model, not behind it."""
    batch, device = len(conditions.seeds), conditions.seeds.device
    checks.check_parameters(conditions.sampling, batch, vocab, device)
    if conditions.draft_sampling is not None:
        checks.check_parameters(conditions.draft_sampling, batch, vocab, device, "draft ")
    if conditions.allowed_tokens is not None:
        checks.check_tensor("allowed_tokens", conditions.allowed_tokens, (batch, "words"), (torch.int32,), device)
        allowed_operand("allowed_tokens", conditions.allowed_tokens, batch, 1, vocab, flat=False, device=device)
