"""Operator `verify`: one round of speculative verification on a GPU."""

from __future__ import annotations

import torch

from . import contract
from .rounds import Inputs, Outputs, Parameters, run_round


def verify(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    draft_receipt: torch.Tensor | None,
    num_draft_tokens: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    draft_index: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    draft_temperature: torch.Tensor,
    draft_top_k: torch.Tensor | None,
    draft_top_p: torch.Tensor | None,
    draft_min_p: torch.Tensor | None,
    bias_offsets: torch.Tensor | None,
    bias_token_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_tokens: torch.Tensor | None,
    draft_bias_offsets: torch.Tensor | None,
    draft_bias_token_ids: torch.Tensor | None,
    draft_bias_values: torch.Tensor | None,
    draft_allowed_tokens: torch.Tensor | None,
    draft_columns: torch.Tensor | None,
    draft_column_target_ids: torch.Tensor | None,
    seed: torch.Tensor | None,
    position: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    max_num_draft_tokens: int,
    target_is_probs: bool,
    draft_is_probs: bool,
    return_logprobs: bool,
    return_accept_probs: bool,
) -> tuple[torch.Tensor, ...]:
    """Launch one round; arguments and results as `specker.reference.verify`."""
    flat = cu_num_draft_tokens is not None
    batch = draft_token_ids.shape[0] if cu_num_draft_tokens is None else cu_num_draft_tokens.shape[0] - 1
    gamma = max_num_draft_tokens

    def output(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=target.device)

    logprobs = output(*((batch, gamma + 1) if return_logprobs else (0,)), dtype=torch.float32)
    accept_probs = output(*((batch, gamma) if return_accept_probs else (0,)), dtype=torch.float32)
    expected = output(batch if return_accept_probs else 0, dtype=torch.float32)
    token_ids, num_accepted, num_emitted = output(batch, gamma + 1), output(batch), output(batch)
    status = output(batch, dtype=torch.int32)
    run_round(
        Inputs(
            # A receipt tells the mass of one draft column, and a token may have several: the draft rows are read.
            draft_token_ids, target, draft, draft_receipt if draft_columns is None else None,
            cu_num_draft_tokens if flat else num_draft_tokens, draft_index,
            Parameters(temperature, top_k, top_p, min_p),
            Parameters(draft_temperature, draft_top_k, draft_top_p, draft_min_p),
            seed, position, uniforms, (bias_offsets, bias_token_ids, bias_values, allowed_tokens),
            (draft_bias_offsets, draft_bias_token_ids, draft_bias_values, draft_allowed_tokens),
            (draft_columns, draft_column_target_ids), batch, gamma, flat, contract.VERIFY_PURPOSE,
            target_is_probs, draft_is_probs,
        ),
        Outputs(
            token_ids, num_accepted, num_emitted, status, logprobs if return_logprobs else None,
            accept_probs if return_accept_probs else None, expected if return_accept_probs else None, None,
        ),
    )  # fmt: skip
    return token_ids, num_accepted, num_emitted, status, logprobs, accept_probs, expected
