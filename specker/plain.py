"""The commonest round, without what the others cost: logits under one law for target and draft."""

from __future__ import annotations

import torch

from specker import checks, operators
from specker.rounds import VerifyResult, receipt_values
from specker.sample import DraftReceipt
from specker.sampling import Sampling
from specker.status import INVALID_ARGUMENT, raise_for_bits


def run_plain_round(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    draft_receipt: DraftReceipt | None,
    sampling: Sampling,
    seed: int | torch.Tensor | None,
    position: int | torch.Tensor | None,
) -> VerifyResult | None:
    """Verify tensors that are right at a glance; None is for `run_round` to judge."""
    if not _right_at_a_glance(draft_token_ids, target, draft) or (draft is None and draft_receipt is not None):
        return None
    device, (batch, rows, vocab) = target.device, target.shape
    parameters = checks.check_parameters(sampling, batch, vocab, device)
    receipt = receipt_values(draft_receipt, draft, (batch, rows - 1), sampling, False, device)
    seeds, positions = checks.seed_tensor(seed, batch, device), checks.position_tensor(position, batch, device)
    token_ids, num_accepted, num_emitted, status = operators.operator("verify_plain", device)(
        draft_token_ids, target, draft, receipt, *parameters, seeds, positions
    )
    if checks.has_tensor(sampling) and checks.host_readable(device):
        raise_for_bits(status, INVALID_ARGUMENT)
    return VerifyResult(token_ids, num_accepted, num_emitted, status, seeds)


def _right_at_a_glance(draft_token_ids: torch.Tensor, target: torch.Tensor, draft: torch.Tensor | None) -> bool:
    """Return whether the tensors fit, by one look at all of them; what is wrong is not told."""
    if type(target) is not torch.Tensor or type(draft_token_ids) is not torch.Tensor:
        return False
    shape, device = target.shape, target.device
    if len(shape) != 3 or 0 in shape or shape[1] == 1:
        return False
    batch, rows, vocab = shape
    if draft is not None and (
        type(draft) is not torch.Tensor
        or draft.shape != (batch, rows - 1, vocab)
        or draft.dtype not in checks.LOGIT_DTYPES
        or draft.device != device
        or not draft.is_contiguous()
    ):
        return False
    return (
        draft_token_ids.shape == (batch, rows - 1)
        and draft_token_ids.dtype in checks.INDEX_DTYPES
        and draft_token_ids.device == device
        and target.dtype in checks.LOGIT_DTYPES
        and target.is_contiguous()
    )
