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
    """`(batch,)` int64, valid entries of `token_ids`: num_accepted + 1, or num_accepted where a target row failed or
    there is no bonus row to draw from."""
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
    device, vocab = target.device, target.shape[-1]
    shape = _shape(draft_token_ids, target, cu_num_draft_tokens, max_num_draft_tokens, names[0])
    if num_draft_tokens is not None:
        checks.check_index("num_draft_tokens", num_draft_tokens, (shape.batch,), device)
    draft_vocab = vocab
    if draft is None:
        rest = zip(Adjustments._fields[2:], adjustments[2:], strict=True)
        _check_no_draft(
            names[1],
            ("draft_sampling", draft_sampling),
            ("draft_receipt", draft_receipt),
            ("draft_index", draft_index),
            *rest,
        )
    else:
        reduced = adjustments.draft_to_target_ids is not None
        draft_vocab = _check_draft(draft, shape, None if reduced else vocab, draft_index, device, names[1])
    parameters = checks.check_parameters(sampling, shape.batch, vocab, device)
    draft_parameters = parameters
    if draft_sampling is not None:
        if not isinstance(draft_sampling, Sampling):
            raise TypeError(f"draft_sampling: expected a Sampling, got {type(draft_sampling).__name__}")
        draft_parameters = checks.check_parameters(draft_sampling, shape.batch, draft_vocab, device, "draft_sampling.")
    adjustment, draft_adjustment, columns = _operands(
        adjustments, shape, vocab, draft_vocab, target_is_probs, draft_is_probs, device
    )
    changed = adjustments.draft_logit_bias is not None or adjustments.draft_allowed_tokens is not None
    receipt = receipt_values(draft_receipt, draft, shape.drafted, draft_sampling or sampling, changed, device)
    if draft is not None and 0 in shape.drafted:
        draft, receipt, draft_index, draft_adjustment, columns = None, None, None, NO_ADJUSTMENT, (None, None)
    seeds, positions = _random_numbers(seed, position, uniforms, shape, device)
    token_ids, num_accepted, num_emitted, status, logprobs, accept_probs, expected_accepted = operators.operator(
        "verify", device
    )(
        draft_token_ids, target, draft, receipt, num_draft_tokens, cu_num_draft_tokens, draft_index, *parameters,
        *draft_parameters, *adjustment, *draft_adjustment, *columns, seeds, positions, uniforms, shape.gamma,
        target_is_probs, draft_is_probs, return_logprobs, return_accept_probs,
    )  # fmt: skip
    judged = num_draft_tokens is not None or cu_num_draft_tokens is not None or draft_index is not None
    judged = judged or uniforms is not None or checks.has_tensor(sampling)
    if (judged or checks.has_tensor(draft_sampling)) and checks.host_readable(device):
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


class _Shape(NamedTuple):
    """Sizes of a round; `drafted` and `targets` are the leading axes of draft and target rows."""

    batch: int
    gamma: int
    drafted: tuple[int, ...]
    targets: tuple[int, ...]


def _shape(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor | None,
    max_num_draft_tokens: int | None,
    name: str,
) -> _Shape:
    if cu_num_draft_tokens is None:
        batch, rows = target.shape[0], target.shape[1]
        if rows == 0:
            raise ValueError(f"{name}: expected gamma + 1 >= 1 rows a sequence, got shape {tuple(target.shape)}")
        if isinstance(draft_token_ids, torch.Tensor) and draft_token_ids.shape == (batch, rows):
            raise ValueError(
                f"{name}: expected gamma + 1 = {rows + 1} rows a sequence, the last behind all {rows} draft tokens, "
                f"got shape {tuple(target.shape)}"
            )
        shape = _Shape(batch, rows - 1, (batch, rows - 1), (batch, rows))
    else:
        shape = _flat_shape(draft_token_ids, target, cu_num_draft_tokens, max_num_draft_tokens)
    checks.check_index("draft_token_ids", draft_token_ids, shape.drafted, target.device)
    return shape


def _flat_shape(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    max_num_draft_tokens: int | None,
) -> _Shape:
    checks.check_index("cu_num_draft_tokens", cu_num_draft_tokens, ("batch + 1",), target.device)
    batch, rows = cu_num_draft_tokens.shape[0] - 1, target.shape[0]
    gamma = max_num_draft_tokens or 0
    if batch >= 0 and isinstance(draft_token_ids, torch.Tensor) and draft_token_ids.shape == (rows,):
        return _Shape(batch, gamma, (rows,), (rows,))
    if batch < 0 or rows < batch:
        raise ValueError(
            f"cu_num_draft_tokens: expected batch + 1 prefix sums for {rows} target rows, "
            f"got shape {tuple(cu_num_draft_tokens.shape)}"
        )
    return _Shape(batch, gamma, (rows - batch,), (rows,))


def _operands(
    adjustments: Adjustments,
    shape: _Shape,
    vocab: int,
    draft_vocab: int,
    target_is_probs: bool,
    draft_is_probs: bool,
    device: torch.device,
) -> tuple[Adjustment, Adjustment, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return target and draft adjustments and the columns of a reduced vocabulary as the operator takes them."""
    bias, allowed, draft_bias, draft_allowed, draft_to_target_ids = adjustments
    # The common round is not to pay for what it does not use.
    biased, masked = bias is not None or draft_bias is not None, allowed is not None or draft_allowed is not None
    if not biased and not masked and draft_to_target_ids is None:
        return NO_ADJUSTMENT, NO_ADJUSTMENT, (None, None)
    batch, flat = shape.batch, len(shape.targets) == 1
    target = Adjustment(
        *bias_operands("logit_bias", bias, batch, vocab, target_is_probs, device),
        allowed_operand("allowed_tokens", allowed, batch, shape.targets[-1], vocab, flat, device),
    )
    draft = NO_ADJUSTMENT
    if draft_bias is not None or draft_allowed is not None:
        draft = Adjustment(
            *bias_operands("draft_logit_bias", draft_bias, batch, draft_vocab, draft_is_probs, device),
            allowed_operand(
                "draft_allowed_tokens",
                draft_allowed,
                batch,
                shape.drafted[-1],
                draft_vocab,
                flat,
                device,
                a_row_each=flat,
            ),
        )
    return target, draft, draft_vocabulary_operands(draft_to_target_ids, draft_vocab, vocab, device)


def _random_numbers(
    seed: int | torch.Tensor | None,
    position: int | torch.Tensor | None,
    uniforms: torch.Tensor | None,
    shape: _Shape,
    device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (seeds, positions), or None for each where uniforms are injected."""
    if uniforms is None:
        return checks.seed_tensor(seed, shape.batch, device), checks.position_tensor(position, shape.batch, device)
    if seed is not None or position is not None:
        raise ValueError("uniforms: expected neither seed nor position with it, got one")
    checks.check_tensor("uniforms", uniforms, (*shape.targets, 2), (torch.float64,), device)
    return None, None


def _check_no_draft(draft_name: str, *given: tuple[str, object]) -> None:
    for name, value in given:
        if value is not None:
            raise ValueError(f"{name}: expected {draft_name} with it, got None")


def _check_draft(
    draft: torch.Tensor,
    round_shape: _Shape,
    vocab: int | None,
    draft_index: torch.Tensor | None,
    device: torch.device,
    name: str,
) -> int:
    """Return the columns of the draft rows; `vocab` None admits any number of them."""
    shape: tuple[int | str, ...] = (*round_shape.drafted, "draft_vocab" if vocab is None else vocab)
    if draft_index is not None:
        checks.check_index("draft_index", draft_index, (round_shape.batch,), device)
        if round_shape.batch and isinstance(draft, torch.Tensor) and draft.shape[:1] == (0,):
            raise ValueError(
                f"draft_index: expected a leading row of the draft tensor, got {name} of shape {tuple(draft.shape)}"
            )
        shape = ("rows", round_shape.gamma, shape[-1])
    return checks.check_rows(name, draft, shape, device).shape[-1]


def receipt_values(
    receipt: DraftReceipt | None,
    draft: torch.Tensor | None,
    leading: tuple[int, ...],
    sampling: Sampling,
    adjusted: bool,
    device: torch.device,
) -> torch.Tensor | None:
    """Return the numbers of the receipts as the operators take them."""
    if receipt is None or draft is None:
        return None
    if not isinstance(receipt, DraftReceipt):
        raise TypeError(f"draft_receipt: expected a DraftReceipt, got {type(receipt).__name__}")
    receipt.check(draft.shape[-1], draft.dtype, sampling, adjusted)
    return checks.check_tensor("draft_receipt", receipt.values, (*leading, 4), (torch.float64,), device)
