"""One round of either form: argument checks, the operator call, the result."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specker import checks, operators
from specker.adjustments import (
    NO_ADJUSTMENT,
    Adjustment,
    LogitBias,
    allowed_operand,
    bias_operands,
    draft_vocabulary_operands,
)
from specker.sample import DraftReceipt
from specker.sampling import Sampling
from specker.status import INVALID_ARGUMENT, raise_for_bits


class Adjustments(NamedTuple):
    """What changes the rows of a round as they are loaded, under the names of the public arguments."""

    logit_bias: LogitBias | None = None
    allowed_tokens: torch.Tensor | None = None
    draft_logit_bias: LogitBias | None = None
    draft_allowed_tokens: torch.Tensor | None = None
    draft_to_target_ids: torch.Tensor | None = None


class VerifyResult(NamedTuple):
    """Tokens of one round. Shapes depend on (batch, gamma) alone; lengths decide what is valid, not the padding."""

    token_ids: torch.Tensor
    """`(batch, gamma + 1)` int64: accepted tokens, then one recovered or bonus token, then -1."""
    num_accepted: torch.Tensor
    """`(batch,)` int64, draft tokens kept."""
    num_emitted: torch.Tensor
    """`(batch,)` int64, valid entries of `token_ids`: num_accepted + 1, or num_accepted where a target row failed."""
    status: torch.Tensor
    """`(batch,)` int32 bit mask of `Status`; 0 is healthy."""
    seed: torch.Tensor
    """`(batch,)` int64, the seeds used; zeros where uniforms were injected."""
    logprobs: torch.Tensor | None = None
    """`(batch, gamma + 1)` float32, log-probability of each emitted token under the target; 0 past the end."""
    accept_probs: torch.Tensor | None = None
    """`(batch, gamma)` float32, min(1, target / draft) of every position; 0 past the length, NaN on invalid rows."""
    expected_accepted: torch.Tensor | None = None
    """`(batch,)` float32, sum of the running products of accept_probs: the mean of num_accepted."""

    def raise_for_status(self) -> None:
        """Wait for the status and raise InvalidInputError if any sequence was invalid (placeholders are not)."""
        raise_for_bits(self.status)


def run_round(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    max_num_draft_tokens: int | None,
    num_draft_tokens: torch.Tensor | None,
    sampling: Sampling,
    draft_sampling: Sampling | None,
    draft_receipt: DraftReceipt | None,
    draft_index: torch.Tensor | None,
    adjustments: Adjustments,
    seed: int | torch.Tensor | None,
    position: int | torch.Tensor | None,
    uniforms: torch.Tensor | None,
    return_logprobs: bool,
    return_accept_probs: bool,
    names: tuple[str, str],
    target_is_probs: bool,
    draft_is_probs: bool,
) -> VerifyResult:
    """Check the arguments of either form once and call the operator."""
    device = target.device
    vocab = target.shape[-1]
    if cu_num_draft_tokens is None:
        batch, rows = target.shape[0], target.shape[1]
        if rows == 0:
            raise ValueError(f"{names[0]}: expected gamma + 1 >= 1 rows a sequence, got shape {tuple(target.shape)}")
        gamma = rows - 1
        leading: tuple[int, ...] = (batch, gamma)
        uniform_shape: tuple[int, ...] = (batch, rows, 2)
    else:
        checks.check_index("cu_num_draft_tokens", cu_num_draft_tokens, (None,), device)
        batch = cu_num_draft_tokens.shape[0] - 1
        if batch < 0 or target.shape[0] < batch:
            raise ValueError(
                f"cu_num_draft_tokens: expected batch + 1 prefix sums for {target.shape[0]} target rows, "
                f"got shape {tuple(cu_num_draft_tokens.shape)}"
            )
        gamma = max_num_draft_tokens or 0
        leading = (target.shape[0] - batch,)
        uniform_shape = (target.shape[0], 2)
    checks.check_index("draft_token_ids", draft_token_ids, leading, device)
    if num_draft_tokens is not None:
        checks.check_index("num_draft_tokens", num_draft_tokens, (batch,), device)
    parameters = checks.check_parameters(sampling, batch, vocab, device)
    draft_parameters = parameters
    flat = cu_num_draft_tokens is not None
    draft_vocab, draft_to_target_ids = vocab, adjustments.draft_to_target_ids
    if draft is None:
        for name, value in (
            ("draft_sampling", draft_sampling),
            ("draft_receipt", draft_receipt),
            ("draft_index", draft_index),
            *zip(Adjustments._fields[2:], adjustments[2:], strict=True),
        ):
            if value is not None:
                raise ValueError(f"{name}: expected {names[1]} with it, got None")
    else:
        draft_vocab = _check_draft(
            draft, leading, None if draft_to_target_ids is not None else vocab, draft_index, device, names[1]
        )
        if draft_sampling is not None:
            if not isinstance(draft_sampling, Sampling):
                raise TypeError(f"draft_sampling: expected a Sampling, got {type(draft_sampling).__name__}")
            draft_parameters = checks.check_parameters(draft_sampling, batch, draft_vocab, device, "draft_sampling.")
    adjustment = Adjustment(
        *bias_operands("logit_bias", adjustments.logit_bias, batch, vocab, device),
        allowed_operand("allowed_tokens", adjustments.allowed_tokens, batch, uniform_shape[-2], vocab, flat, device),
    )
    draft_adjustment = Adjustment(
        *bias_operands("draft_logit_bias", adjustments.draft_logit_bias, batch, draft_vocab, device),
        allowed_operand(
            "draft_allowed_tokens", adjustments.draft_allowed_tokens, batch, leading[-1], draft_vocab, flat, device
        ),
    )
    columns = draft_vocabulary_operands(draft_to_target_ids, draft_vocab, vocab, device)
    draft_adjusted = adjustments.draft_logit_bias is not None or adjustments.draft_allowed_tokens is not None
    receipt = _receipt_values(draft_receipt, draft, leading, draft_sampling or sampling, draft_adjusted, device)
    if draft is not None and 0 in leading:
        draft, receipt, draft_index, draft_adjustment, columns = None, None, None, NO_ADJUSTMENT, (None, None)
    if uniforms is not None:
        if seed is not None or position is not None:
            raise ValueError("uniforms: expected neither seed nor position with it, got one")
        checks.check_tensor("uniforms", uniforms, uniform_shape, (torch.float64,), device)
        seeds, positions = None, None
    else:
        seeds = checks.seed_tensor(seed, batch, device)
        positions = checks.position_tensor(position, batch, device)
    token_ids, num_accepted, num_emitted, status, logprobs, accept_probs, expected_accepted = operators.operator(
        "verify", device
    )(
        draft_token_ids, target, draft, receipt, num_draft_tokens, cu_num_draft_tokens, draft_index, *parameters,
        *draft_parameters, *adjustment, *draft_adjustment, *columns, seeds, positions, uniforms, gamma,
        target_is_probs, draft_is_probs, return_logprobs, return_accept_probs,
    )  # fmt: skip
    if checks.host_readable(device):
        given = (num_draft_tokens, cu_num_draft_tokens, draft_index, uniforms)
        if any(value is not None for value in given) or checks.has_tensor(sampling + (draft_sampling or ())):
            raise_for_bits(status, INVALID_ARGUMENT)
    return VerifyResult(
        token_ids,
        num_accepted,
        num_emitted,
        status,
        torch.zeros_like(num_accepted) if seeds is None else seeds,
        logprobs if return_logprobs else None,
        accept_probs if return_accept_probs else None,
        expected_accepted if return_accept_probs else None,
    )


def _check_draft(
    draft: torch.Tensor,
    leading: tuple[int, ...],
    vocab: int | None,
    draft_index: torch.Tensor | None,
    device: torch.device,
    name: str,
) -> int:
    """Return the columns of the draft rows; `vocab` None admits any number of them."""
    shape: tuple[int | None, ...] = (*leading, vocab)
    if draft_index is not None:
        checks.check_index("draft_index", draft_index, (leading[0],), device)
        if leading[0] and isinstance(draft, torch.Tensor) and draft.shape[:1] == (0,):
            raise ValueError(
                f"draft_index: expected a leading row of the draft tensor, got {name} of shape {tuple(draft.shape)}"
            )
        shape = (None, *shape[1:])
    return checks.check_rows(name, draft, shape, device).shape[-1]


def _receipt_values(
    receipt: DraftReceipt | None,
    draft: torch.Tensor | None,
    leading: tuple[int, ...],
    sampling: Sampling,
    adjusted: bool,
    device: torch.device,
) -> torch.Tensor | None:
    if receipt is None or draft is None:
        return None
    if not isinstance(receipt, DraftReceipt):
        raise TypeError(f"draft_receipt: expected a DraftReceipt, got {type(receipt).__name__}")
    receipt.check(draft.shape[-1], draft.dtype, sampling, adjusted)
    return checks.check_tensor("draft_receipt", receipt.values, (*leading, 4), (torch.float64,), device)
