"""The acceptance step that transformers' assisted generation finds in its module, and rows to call it with."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

UTILS = importlib.import_module("transformers.generation.utils")
PROMPT = torch.tensor([[1, 2, 1]])
GAMMA = 2
TARGET_LOGITS = torch.tensor([[0.3, -0.5, -torch.inf, 0.8], [0.0, 1.0, 0.5, -1.0], [1.0, 0.0, -1.0, 0.2]])
DRAFT_LOGITS = torch.tensor([[-0.6, 0.4, 0.3, -torch.inf], [1.0, 0.2, -0.3, 0.1]])


@pytest.fixture(autouse=True)
def seeded_and_clean() -> Iterator[None]:
    """Seed torch, and see that every test leaves transformers' function where it was."""
    before = UTILS._speculative_sampling
    torch.manual_seed(1)
    yield
    assert UTILS._speculative_sampling is before


def call_step(draft_token_ids: torch.Tensor, **options: Any) -> tuple[list[int], int]:
    """Call the acceptance step that transformers finds in its module, behind a prompt of three tokens."""
    candidate_input_ids = torch.cat([PROMPT, draft_token_ids[None]], dim=1)
    gamma = len(draft_token_ids)
    tokens, num_matches = UTILS._speculative_sampling(
        candidate_input_ids, DRAFT_LOGITS[None, :gamma], gamma, TARGET_LOGITS[None, : gamma + 1], **options
    )
    assert tokens.dtype == torch.int64
    assert len(tokens) == 1
    return tokens[0].tolist(), int(num_matches)


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    # transformers exchanges its own entry among the modules once it has loaded a model.
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", version)
