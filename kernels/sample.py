"""Operator `sample`: one draft token a row on a GPU, a round without draft tokens under the drafting purpose."""

from __future__ import annotations

import torch

from . import contract
from .rounds import Inputs, Outputs, Parameters, run_round


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    bias_offsets: torch.Tensor | None,
    bias_token_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_tokens: torch.Tensor | None,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one draw a row; arguments and results as `specker.reference.sample`."""
    batch = logits.shape[0]
    token_ids = torch.empty((batch, 1), dtype=torch.int64, device=logits.device)
    status = torch.empty((batch,), dtype=torch.int32, device=logits.device)
    receipt = torch.empty((batch, 4), dtype=torch.float64, device=logits.device)
    parameters = Parameters(temperature, top_k, top_p, min_p)
    # The one row of a sequence is as far from the next as sequences are: its alignment is theirs.
    rows = logits.as_strided((batch, 1, logits.shape[1]), (logits.stride(0), logits.stride(0), logits.stride(1)))
    run_round(
        Inputs(
            token_ids, rows, None, None, None, None, parameters, Parameters(None, None, None, None),
            seed, position, None, (bias_offsets, bias_token_ids, bias_values, allowed_tokens), (None,) * 4,
            (None, None), batch, 0, False, contract.DRAFT_PURPOSE, False, False,
        ),
        Outputs(token_ids, None, None, status, None, None, None, receipt),
    )  # fmt: skip
    return token_ids.view(batch), status, receipt
