"""What a decode loop is given: the tokens of each prompt, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from specker import checks


def prompt_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt without its padding.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: a shape is wrong, a prompt is empty, or its padding is not on the left.

    Example:
        >>> prompt_tokens(torch.tensor([[0, 0, 7], [4, 5, 6]]), torch.tensor([[0, 0, 1], [1, 1, 1]]))
        [[7], [4, 5, 6]]
    """
    checks.check_tensor("input_ids", input_ids, ("batch", "length"), (torch.int64,), None)
    batch, length = input_ids.shape
    if batch == 0:
        raise ValueError("input_ids: expected at least one sequence, got none")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    checks.check_tensor("attention_mask", attention_mask, (batch, length), (torch.int64, torch.int32, torch.bool), None)
    prompts = []
    for tokens, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
        num_tokens = sum(map(bool, mask))
        if not all(mask[length - num_tokens :]):
            raise ValueError("attention_mask: expected zeros on the left only, got zeros behind a one")
        if num_tokens == 0:
            raise ValueError("input_ids: expected prompts of at least one token, got an empty one")
        prompts.append(tokens[length - num_tokens :])
    return prompts


def end_tokens(target: Any, eos_token_id: int | Collection[int] | None) -> frozenset[int]:
    """Return the tokens that end a text: those given, or for None those of the target's generation config.

    Example:
        >>> sorted(end_tokens(None, [2, 0]))
        [0, 2]
    """
    if eos_token_id is None:
        eos_token_id = target.generation_config.eos_token_id
    if eos_token_id is None:
        return frozenset()
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else map(int, eos_token_id))
