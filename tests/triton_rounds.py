"""Rounds for the interpreted kernels, and memory that shows what is read before it is written."""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import pytest
import torch

import specker

from .random_calls import CallMaker

WHY_NOT = specker.available_backends()["triton"] or (
    "kernels are compiled here, not interpreted" if torch.cuda.is_available() else ""
)
needs_interpreter = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the launchers allocate with NaN and absurd integers: what is not written, or read before, shows."""

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return poisoned_empty if name == "empty" else getattr(torch, name)

    for name in ("rounds", "sample", "verify"):
        monkeypatch.setattr(importlib.import_module(f"specker.kernels.{name}"), "torch", Poisoned())


def poisoned_empty(*arguments: Any, **options: Any) -> torch.Tensor:
    """Return what `torch.empty` does, filled with what nobody expects."""
    tensor = torch.empty(*arguments, **options)
    return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min + 5)


def plain_call(
    target: torch.Tensor, draft: torch.Tensor | None, tokens: torch.Tensor, **changes: Any
) -> dict[str, Any]:
    """Return the arguments of a round at temperature 1 with seeds, all outputs asked for."""
    one = torch.ones(1, dtype=torch.float64)
    call = dict.fromkeys(CallMaker(0).verify_call()) | {
        "draft_token_ids": tokens, "target": target, "draft": draft, "temperature": one, "draft_temperature": one,
        "seed": torch.arange(tokens.shape[0]), "position": torch.zeros(1, dtype=torch.int64),
        "max_num_draft_tokens": tokens.shape[1], "target_is_probs": False, "draft_is_probs": False,
        "return_logprobs": True, "return_accept_probs": True,
    }  # fmt: skip
    return call | changes


def random_rounds(vocab: int, dtype: torch.dtype, batch: int = 3, gamma: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(vocab)
    target = (torch.randn(batch, gamma + 1, vocab, generator=generator) * 3).to(dtype)
    draft = (target[:, :gamma].float() + torch.randn(batch, gamma, vocab, generator=generator)).to(dtype)
    tokens = torch.multinomial(draft.float().softmax(-1).view(-1, vocab), 1, generator=generator).view(batch, gamma)
    return plain_call(target, draft, tokens)
