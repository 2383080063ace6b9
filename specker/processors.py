"""transformers' logits processors and stopping criteria, called for each position with its sequence's own prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Processor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A transformers `LogitsProcessorList` or `LogitsProcessor`: `(1, length)` ids and `(1, vocab)` scores to scores."""
Criterion: TypeAlias = Callable[..., Any]
"""A transformers `StoppingCriteriaList` or `StoppingCriteria`: `(1, length)` ids and None to `(1,)` bool."""


def one_each(name: str, given: Any, batch: int) -> list[Any] | None:
    """Return one entry a sequence of what is given once for all, or once for each in a list or tuple; None for nothing.

    transformers' own lists are a single entry: they are called as a whole.

    Raises:
        TypeError: an entry cannot be called.
        ValueError: there is not one entry a sequence.

    Example:
        >>> one_each("stopping_criteria", None, batch=2) is None
        True
    """
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return None
    entries = [given] * batch if callable(given) else list(given)
    if len(entries) != batch:
        raise ValueError(f"{name}: expected one for all or one for each of {batch} sequences, got {len(entries)}")
    for entry in entries:
        if not callable(entry):
            raise TypeError(f"{name}: expected something to call, got {type(entry).__name__}")
    return entries


def process_rows(
    processors: Sequence[Processor],
    logits: torch.Tensor,
    sequences: Sequence[Sequence[int]],
    blocks: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Return the logits as the processors change them, each row seeing the tokens before it.

    Args:
        processors: one a sequence.
        logits: `(batch, rows, vocab)`; row j of a sequence stands behind the first j tokens of its block.
        sequences: the tokens before the block.
        blocks: the draft tokens; one more row than these counts, rows behind that are left as they are.

    Returns:
        `(batch, rows, vocab)` float32, what transformers' processors are written for.

    Example:
        >>> halve = lambda token_ids, scores: scores / 2
        >>> process_rows([halve], torch.tensor([[[2.0, 4.0]]]), [[7]], [[]])
        tensor([[[1., 2.]]])
    """
    processed = logits.to(torch.float32, copy=True)
    for row, (process, sequence, block) in enumerate(zip(processors, sequences, blocks, strict=True)):
        prefix = torch.tensor([[*sequence, *block]], device=logits.device)
        for step in range(min(len(block) + 1, logits.shape[1])):
            scores = processed[row, step : step + 1].clone()
            processed[row, step] = process(prefix[:, : len(sequence) + step], scores)[0]
    return processed


def cut_where_stopped(criterion: Criterion, sequence: Sequence[int], new_tokens: Sequence[int], device: Any) -> int:
    """Return behind how many of the new tokens the criterion first says stop; -1 where it never does.

    Asked after every token, as in plain decoding, so that no text runs on behind a stop inside a block.

    Example:
        >>> cut_where_stopped(lambda token_ids, _: token_ids[:, -1] == 4, [1], [3, 4, 5], "cpu")
        2
    """
    token_ids = torch.tensor([[*sequence, *new_tokens]], device=device)
    for count in range(1, len(new_tokens) + 1):
        if bool(torch.as_tensor(criterion(token_ids[:, : len(sequence) + count], None)).all()):
            return count
    return -1
