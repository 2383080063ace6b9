"""The verify step: which draft tokens to keep, and the one token that follows them."""

from __future__ import annotations

import torch

from specker import checks
from specker.adjustments import LogitBias
from specker.plain import run_plain_round
from specker.rounds import Adjustments, VerifyResult, run_round
from specker.sample import DraftReceipt
from specker.sampling import Sampling


def verify(
    draft_token_ids: torch.Tensor,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    num_draft_tokens: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    draft_sampling: Sampling | None = None,
    draft_receipt: DraftReceipt | None = None,
    draft_probs: torch.Tensor | None = None,
    draft_index: torch.Tensor | None = None,
    logit_bias: LogitBias | None = None,
    allowed_tokens: torch.Tensor | None = None,
    draft_logit_bias: LogitBias | None = None,
    draft_allowed_tokens: torch.Tensor | None = None,
    draft_to_target_ids: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
) -> VerifyResult:
    """Keep the longest prefix of draft tokens that leaves the target's distribution exact, and emit one token more.

    Equivalent to, for one sequence and no filter:

        target = torch.softmax(target_logits.double() / temperature, dim=-1)
        draft = torch.softmax(draft_logits.double() / temperature, dim=-1)
        ratio = (target[:gamma] / draft).gather(-1, draft_token_ids.unsqueeze(-1)).squeeze(-1)
        num_accepted = int((torch.rand(gamma) < ratio).long().cumprod(0).sum())
        row = target[num_accepted]
        if num_accepted < gamma:
            row = (row - draft[num_accepted]).clamp(min=0)
        token = torch.multinomial(row / row.sum(), 1)

    Args:
        draft_token_ids: `(batch, gamma)` int32 or int64; -1 is a placeholder that is always rejected.
        target_logits: `(batch, gamma + 1, vocab)` float32, bfloat16 or float16; last axis contiguous, other strides
            free (slices of a padded vocabulary are read in place).
        draft_logits: `(batch, gamma, vocab)`, likewise, of the rows that the draft tokens were really drawn from.
            None: point-mass drafts (n-gram, prompt lookup, arg-max drafts), accepted with the target's probability.
        num_draft_tokens: `(batch,)` integers in 0..gamma, for ragged rounds; None is gamma everywhere.
        temperature, top_k, top_p, min_p: as in `sample`, for target and draft rows alike.
        draft_sampling: the draft's own parameters where they differ.
        draft_receipt: stacked receipts of the draws; draft rows are then read only where a residual is drawn.
        draft_probs: `(batch, gamma, vocab)` final probabilities that the draft tokens were drawn from, in place of
            draft_logits; the draft's temperature and filters do not apply.
        draft_index: `(batch,)` integers: which leading row of the draft tensor belongs to each sequence.
        logit_bias: values added to single target logits before temperature and filters.
        allowed_tokens: int32 bit mask of the tokens a target row may give, bit `token % 32` of word `token // 32`;
            `(batch, words)` for all rows of a sequence or `(batch, gamma + 1, words)` for each.
        draft_logit_bias, draft_allowed_tokens: the same on draft rows, `(batch, gamma, words)` for each; give them if
            and only if the draft tokens were drawn with them.
        draft_to_target_ids: `(draft_vocab,)` integers, the target id of each draft column, for drafts with a reduced
            vocabulary: `draft_logits` then has draft_vocab columns, `draft_token_ids` stay target ids, and the mass of
            columns that share a target id is added.
        seed: `(batch,)` int64, one stream a sequence; an int s means s + row; None draws seeds by torch's generator.
        position: `(batch,)` int64 or int, absolute index in the sequence of the first draft token; None is 0, and
            then the seed has to change between rounds.
        uniforms: `(batch, gamma + 1, 2)` float64 in [0, 1) in place of the generator: [..., 0] accepts, [..., 1] emits.
        return_logprobs: fill `logprobs`.
        return_accept_probs: fill `accept_probs` and `expected_accepted`; scores every position.

    Returns:
        VerifyResult.

    Raises:
        TypeError, ValueError: an argument has the wrong rank, shape, dtype or device, or a value out of range (values
            of device tensors are judged by the kernel and told in `status`).
        BackendUnavailableError: the forced backend cannot serve these tensors.

    Guarantees: the emitted tokens have exactly the target's distribution; a sequence's result depends on its own rows,
        seed and position alone; equal tokens on every backend; inputs are never modified; no host synchronisation
        for device tensors; nothing vocabulary-sized is allocated (the eager reference aside).

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

    Example:
        >>> logits = torch.tensor([[[9.0, 0.0], [0.0, 9.0]]])
        >>> verify(torch.tensor([[0]]), logits, temperature=0.0).token_ids
        tensor([[0, 1]])
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if (
        num_draft_tokens is None and draft_sampling is None and draft_probs is None and draft_index is None
        and logit_bias is None and allowed_tokens is None and draft_logit_bias is None and draft_allowed_tokens is None
        and draft_to_target_ids is None and uniforms is None and not return_logprobs and not return_accept_probs
    ):  # fmt: skip
        result = run_plain_round(draft_token_ids, target_logits, draft_logits, draft_receipt, sampling, seed, position)
        if result is not None:
            return result
    target = checks.check_rows("target_logits", target_logits, ("batch", "gamma + 1", "vocab"), None)
    draft, draft_sampling, names = _draft_rows(
        draft_logits, draft_probs, draft_sampling, draft_receipt, draft_logit_bias, draft_allowed_tokens
    )
    return run_round(
        draft_token_ids, target, draft, None, None, num_draft_tokens, sampling, draft_sampling,
        draft_receipt, draft_index,
        Adjustments(logit_bias, allowed_tokens, draft_logit_bias, draft_allowed_tokens, draft_to_target_ids),
        seed, position, uniforms, return_logprobs, return_accept_probs, names, False, draft_probs is not None,
    )  # fmt: skip


def verify_from_probs(
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    *,
    num_draft_tokens: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    draft_sampling: Sampling | None = None,
    draft_index: torch.Tensor | None = None,
    logit_bias: LogitBias | None = None,
    allowed_tokens: torch.Tensor | None = None,
    draft_logit_bias: LogitBias | None = None,
    draft_allowed_tokens: torch.Tensor | None = None,
    draft_to_target_ids: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
) -> VerifyResult:
    """Verify on rows of probabilities, for engines that hold those.

    Equivalent to:

        verify(draft_token_ids, target_probs.log(), draft_probs.log(), ...)

    without the logarithms and the copies. Arguments, result and guarantees are those of `verify`, except that
    `target_probs` and `draft_probs` hold non-negative finite rows with a positive sum, not necessarily normalised.
    Temperature and filters mean the same as on logits. Whether values are logits or probabilities is never guessed.

    Raises:
        TypeError, ValueError: as `verify`.

    Source: Leviathan et al. 2023, algorithm 1.

    Example:
        >>> probs = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> verify_from_probs(torch.tensor([[1]]), probs).token_ids
        tensor([[1, 0]])
    """
    target = checks.check_rows("target_probs", target_probs, ("batch", "gamma + 1", "vocab"), None)
    return run_round(
        draft_token_ids, target, draft_probs, None, None, num_draft_tokens,
        Sampling(temperature, top_k, top_p, min_p), draft_sampling, None, draft_index,
        Adjustments(logit_bias, allowed_tokens, draft_logit_bias, draft_allowed_tokens, draft_to_target_ids),
        seed, position, uniforms, return_logprobs, return_accept_probs, ("target_probs", "draft_probs"), True, True,
    )  # fmt: skip


def verify_flat(
    draft_token_ids: torch.Tensor,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    cu_num_draft_tokens: torch.Tensor,
    max_num_draft_tokens: int,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    draft_sampling: Sampling | None = None,
    draft_receipt: DraftReceipt | None = None,
    draft_probs: torch.Tensor | None = None,
    draft_index: torch.Tensor | None = None,
    logit_bias: LogitBias | None = None,
    allowed_tokens: torch.Tensor | None = None,
    draft_logit_bias: LogitBias | None = None,
    draft_allowed_tokens: torch.Tensor | None = None,
    draft_to_target_ids: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
) -> VerifyResult:
    """Verify rows that lie behind one another, the form of serving engines; the same kernels as `verify`.

    Arguments, result and guarantees are those of `verify`, except:

    Args:
        draft_token_ids: `(total,)`, the draft tokens of all sequences.
        target_logits: `(total + batch, vocab)`, each sequence's bonus row right behind its other rows; or
            `(total, vocab)` without bonus rows, for engines that draw bonus tokens elsewhere: a sequence that keeps all
            its draft tokens then emits nothing more.
        draft_logits, draft_probs: `(total, vocab)`; with draft_index `(slots, max_num_draft_tokens, vocab)`.
        draft_index: `(batch,)` integers: which slot of the draft tensor holds the rows of each sequence.
        draft_receipt: one of `(total, 4)` values.
        cu_num_draft_tokens: `(batch + 1,)` int32 or int64 prefix sums of the lengths, starting with 0; rows behind the
            last one are padding.
        max_num_draft_tokens: the longest length allowed; fixes the width of the result.
        uniforms: `(total + batch, 2)`, one pair a target row.
        allowed_tokens: `(batch, words)`, or `(total + batch, words)` for each target row.
        draft_allowed_tokens: `(total, words)`.

    Raises:
        TypeError, ValueError: as `verify`.

    Source: Leviathan et al. 2023, algorithm 1.

    Example:
        >>> logits = torch.tensor([[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]])
        >>> bounds = torch.tensor([0, 1, 1])
        >>> verify_flat(
        ...     torch.tensor([0]), logits, cu_num_draft_tokens=bounds, max_num_draft_tokens=1, temperature=0.0
        ... ).token_ids
        tensor([[ 0,  1],
                [ 1, -1]])
    """
    target = checks.check_rows("target_logits", target_logits, ("rows", "vocab"), None)
    draft, draft_sampling, names = _draft_rows(
        draft_logits, draft_probs, draft_sampling, draft_receipt, draft_logit_bias, draft_allowed_tokens
    )
    if isinstance(max_num_draft_tokens, bool) or not isinstance(max_num_draft_tokens, int) or max_num_draft_tokens < 0:
        raise ValueError(f"max_num_draft_tokens: expected an int >= 0, got {max_num_draft_tokens!r}")
    return run_round(
        draft_token_ids, target, draft, cu_num_draft_tokens, max_num_draft_tokens, None,
        Sampling(temperature, top_k, top_p, min_p), draft_sampling, draft_receipt, draft_index,
        Adjustments(logit_bias, allowed_tokens, draft_logit_bias, draft_allowed_tokens, draft_to_target_ids),
        seed, position, uniforms, return_logprobs, return_accept_probs, names, False, draft_probs is not None,
    )  # fmt: skip


def _draft_rows(
    draft_logits: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    draft_sampling: Sampling | None,
    draft_receipt: DraftReceipt | None,
    draft_logit_bias: LogitBias | None,
    draft_allowed_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor | None, Sampling | None, tuple[str, str]]:
    """Return the draft rows, their parameters and the argument names for messages."""
    if draft_probs is None:
        return draft_logits, draft_sampling, ("target_logits", "draft_logits")
    for name, value in (
        ("draft_logits", draft_logits),
        ("draft_sampling", draft_sampling),
        ("draft_receipt", draft_receipt),
        ("draft_logit_bias", draft_logit_bias),
        ("draft_allowed_tokens", draft_allowed_tokens),
    ):
        if value is not None:
            raise ValueError(f"{name}: expected None with draft_probs, which are final, got {type(value).__name__}")
    return draft_probs, Sampling(), ("target_logits", "draft_probs")
