"""The accept test of every draft position, as if all before it had been accepted."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specker.distribution import Distribution
from specker.layout import Layout
from specker.sampling import GREEDY_TEMPERATURE
from specker.status import Status


class Scored(NamedTuple):
    """Every draft position judged as if all before it had been accepted."""

    accepted: torch.Tensor
    accept_probs: torch.Tensor
    bits: torch.Tensor
    residual: torch.Tensor


def score(
    layout: Layout,
    target: Distribution,
    draft: Distribution | None,
    receipt: torch.Tensor | None,
    draft_temperature: torch.Tensor,
    mapped: bool,
    accept_uniforms: torch.Tensor,
    greedy: torch.Tensor,
) -> Scored:
    """Apply the accept test and find what a rejection would draw from."""
    gamma, vocab = layout.drafted.shape[-1], target.probs.shape[-1]
    token = layout.draft_token_ids
    in_range = (token >= 0) & (token < vocab)
    column = torch.where(in_range, token, 0).unsqueeze(-1)
    target_prob = target.probs[:, :gamma].gather(-1, column).squeeze(-1)
    draft_prob, draft_valid = _draft_prob(draft, receipt, column, draft_temperature, mapped, target_prob)
    # Multiplied, not divided, and strict: u = 0 never accepts a token without target mass.
    passes = (accept_uniforms[:, :gamma] * draft_prob < target_prob) | (target_prob >= draft_prob)
    passes = passes & (target_prob > 0) & (draft_valid | greedy)
    passes = torch.where(greedy, token == target.argmax[:, :gamma], passes)
    target_valid = target.valid[:, :gamma]
    accepted = layout.drafted & in_range & target_valid & passes

    sampled = in_range & ~greedy
    bits = torch.where(token == -1, int(Status.DRAFT_TOKEN_PLACEHOLDER), int(Status.DRAFT_TOKEN_OUT_OF_RANGE))
    bits = torch.where(in_range, 0, bits)
    bits = torch.where(sampled & ~draft_valid, int(Status.DRAFT_INVALID), bits)
    impossible = sampled & draft_valid & (draft_prob == 0)
    bits = torch.where(impossible, int(Status.DRAFT_TOKEN_IMPOSSIBLE), bits)
    bits = torch.where(target_valid, bits, int(Status.TARGET_INVALID)).to(torch.int32)

    ratio = torch.where(target_prob >= draft_prob, (target_prob > 0).double(), target_prob / draft_prob)
    ratio = torch.where(draft_valid, ratio, math.nan)
    ratio = torch.where(greedy, (token == target.argmax[:, :gamma]).double(), ratio)
    ratio = torch.where(target_valid, torch.where(in_range, ratio, 0.0), math.nan)
    accept_probs = torch.where(layout.drafted, ratio, 0.0)
    return Scored(accepted, accept_probs, bits, sampled & draft_valid)


def _draft_prob(
    draft: Distribution | None,
    receipt: torch.Tensor | None,
    column: torch.Tensor,
    temperature: torch.Tensor,
    mapped: bool,
    target_prob: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A receipt tells the mass of one draft column; a mapped token may have several.
    if receipt is not None and not mapped:
        token_logit, row_max, threshold, weight_sum = receipt.unbind(dim=-1)
        divisor = torch.where(temperature.double() < GREEDY_TEMPERATURE, 1.0, temperature.double()).unsqueeze(-1)
        prob = torch.exp((token_logit - row_max) / divisor) / weight_sum
        return torch.where(token_logit >= threshold, prob, 0.0), weight_sum > 0
    if draft is None:
        return torch.ones_like(target_prob), torch.ones_like(target_prob, dtype=torch.bool)
    valid = draft.valid if receipt is None else receipt[..., 3] > 0
    return draft.probs.gather(-1, column).squeeze(-1), valid
