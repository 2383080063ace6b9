"""Arguments of vLLM's functions: what is refused, and what is checked beyond what verify checks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from specker import checks


def refuse_other_rules(**options: object) -> None:
    """Raise if an option that asks for another acceptance rule is set; None and False leave it out.

    Raises:
        NotImplementedError: naming the option.

    Example:
        >>> refuse_other_rules(fly_window_size=None, synthetic_mode=False)
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name}: expected it unset, got one: specker keeps the target's distribution exactly and has no "
                "other acceptance rule"
            )


def check_lengths(
    num_draft_tokens: Sequence[int], cu_num_draft_tokens: torch.Tensor, max_spec_len: int, total: int
) -> None:
    """Raise if the lengths do not fit the rows, the width or (where its values may be looked at) the running totals.

    Raises:
        ValueError: naming the argument.
    """
    totals = list(itertools.accumulate(num_draft_tokens))
    if (totals[-1] if totals else 0) != total:
        raise ValueError(
            f"num_draft_tokens: expected a sum of {total}, the rows of target_logits, got {sum(num_draft_tokens)}"
        )
    if num_draft_tokens and not 0 <= min(num_draft_tokens) <= max(num_draft_tokens) <= max_spec_len:
        raise ValueError(
            f"num_draft_tokens: expected lengths in 0..max_spec_len = {max_spec_len}, got "
            f"{min(num_draft_tokens)}..{max(num_draft_tokens)}"
        )
    if checks.host_readable(cu_num_draft_tokens.device) and cu_num_draft_tokens.tolist() != totals:
        raise ValueError(
            f"cu_num_draft_tokens: expected the running totals {totals}, got {cu_num_draft_tokens.tolist()}"
        )


def bonus_tokens(bonus_token_ids: torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    """Return the bonus tokens as `(batch,)`.

    Raises:
        TypeError, ValueError: they are not `(batch, 1)` or `(batch,)` indices.
    """
    shape = (batch, 1) if isinstance(bonus_token_ids, torch.Tensor) and bonus_token_ids.dim() == 2 else (batch,)
    return checks.check_index("bonus_token_ids", bonus_token_ids, shape, device).reshape(batch)
