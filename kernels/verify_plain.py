"""Operator `verify_plain`: a round of logits under one law for target and draft, on a GPU."""

from __future__ import annotations

import torch

from .verify import verify


def verify_plain(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    draft_receipt: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Launch one round; arguments and results as `specker.reference.verify_plain`."""
    law, no_adjustment = (temperature, top_k, top_p, min_p), (None, None, None, None)
    return verify(
        draft_token_ids, target, draft, draft_receipt, None, None, None, *law, *law, *no_adjustment,
        *no_adjustment, None, None, seed, position, None, target.shape[1] - 1, False, False, False, False,
    )[:4]  # fmt: skip
