"""What the adapters share: the operator `verify_into`, called on arguments that are checked by then."""

from __future__ import annotations

import torch

from specker import checks, operators
from specker.status import INVALID_ARGUMENT, raise_for_bits


def verify_into(
    output_token_ids: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    max_num_draft_tokens: int,
    *,
    next_tokens: torch.Tensor | None = None,
    next_siblings: torch.Tensor | None = None,
    cu_num_draft_tokens: torch.Tensor | None = None,
    cu_num_rows: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    accept_uniforms: torch.Tensor | None = None,
    emission_uniforms: torch.Tensor | None = None,
    target_is_probs: bool = False,
    draft_is_probs: bool = False,
    bonus_token_ids: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    padding: int = -1,
    output_places: torch.Tensor | None = None,
    passed_total: torch.Tensor | None = None,
    accepted_total: torch.Tensor | None = None,
    emitted_total: torch.Tensor | None = None,
    status_total: torch.Tensor | None = None,
) -> None:
    """Verify a round and write it into tensors of the caller's; a position of None is 0.

    Arguments as `specker.delivery.verify_into`.

    Raises:
        InvalidInputError: a value is out of range, on a CPU.
    """
    device = target.device
    if draft is not None and draft_token_ids.numel() == 0:
        draft = None
    if seed is not None and position is None:
        position = checks.scalar_tensor(0, torch.int64, device)
    status = operators.operator("verify_into", device)(
        draft_token_ids, target, draft, next_tokens, next_siblings, cu_num_draft_tokens, cu_num_rows, slots,
        temperature, seed, position, accept_uniforms, emission_uniforms, max_num_draft_tokens, target_is_probs,
        draft_is_probs, bonus_token_ids, places, padding, output_token_ids, output_places, passed_total, accepted_total,
        emitted_total, status_total,
    )  # fmt: skip
    if checks.host_readable(device):
        raise_for_bits(status, INVALID_ARGUMENT)
