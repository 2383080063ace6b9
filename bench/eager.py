"""A verify round in eager PyTorch, as decoders write it by hand: what everything else is compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch

import specker

PLAIN = specker.Sampling()
FILTERED = specker.Sampling(temperature=0.8, top_k=50, top_p=0.95)


class Outcome(NamedTuple):
    """What a round decided."""

    num_accepted: torch.Tensor
    """`(batch,)`, draft tokens kept."""
    token_ids: torch.Tensor
    """`(batch,)`, the recovered or bonus token."""


def eager_round(
    draft_token_ids: torch.Tensor, target_logits: torch.Tensor, draft_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify by softmax in float32, ratio, residual of the rejected row, multinomial."""
    return _decide(draft_token_ids, target_logits.float().softmax(-1), draft_logits.float().softmax(-1))


def smart_eager_filtered_round(
    draft_token_ids: torch.Tensor, target_logits: torch.Tensor, draft_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify under temperature 0.8, top-k 50 and top-p 0.95, by `topk` where others sort the whole row."""
    return _decide(draft_token_ids, _filtered(target_logits.float()), _filtered(draft_logits.float()))


def _filtered(logits: torch.Tensor) -> torch.Tensor:
    logits = logits / FILTERED.temperature
    best = logits.topk(min(int(FILTERED.top_k), logits.shape[-1]), dim=-1).values
    before = best.softmax(-1).cumsum(-1) - best.softmax(-1)
    last = (before < FILTERED.top_p).sum(-1, keepdim=True) - 1
    return logits.masked_fill(logits < best.gather(-1, last), float("-inf")).softmax(-1)


def _decide(
    draft_token_ids: torch.Tensor, target_probs: torch.Tensor, draft_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, gamma = draft_token_ids.shape
    picked = draft_token_ids.unsqueeze(-1)
    ratio = (target_probs[:, :gamma].gather(-1, picked) / draft_probs.gather(-1, picked)).squeeze(-1)
    accepted = torch.rand(batch, gamma, device=ratio.device) < ratio
    num_accepted = accepted.long().cumprod(dim=-1).sum(dim=-1)
    sequence = torch.arange(batch, device=ratio.device)
    row = target_probs[sequence, num_accepted]
    residual = (row - draft_probs[sequence, num_accepted.clamp(max=gamma - 1)]).clamp(min=0)
    mass = torch.where((num_accepted < gamma).unsqueeze(-1), residual, row)
    return num_accepted, torch.multinomial(mass, 1).squeeze(-1)
