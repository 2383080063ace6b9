"""transformers' prepared stopping criteria: the ends that the decode loop knows, and the others for each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specker.packages import require


class Ends(NamedTuple):
    """What ends the sequences of a call."""

    max_length: int
    """Tokens of a sequence with its prompt and padding."""
    eos_token_ids: frozenset[int]
    criteria: list[RowCriteria] | None
    """One a sequence."""


@dataclasses.dataclass(frozen=True)
class RowCriteria:
    """The criteria of one sequence, which see its padding in front as they do in plain decoding.

    Example:
        >>> three = lambda token_ids, _: token_ids.shape[1] == 3
        >>> RowCriteria([three], torch.tensor([[0, 0]]))(torch.tensor([[5]]))
        True
    """

    criteria: Sequence[Any]
    padding: torch.Tensor
    """`(1, count)` int64."""

    def __call__(self, token_ids: torch.Tensor, scores: Any = None) -> bool:
        """Return whether any criterion ends the sequence behind `token_ids (1, length)`."""
        if self.padding.shape[1]:
            token_ids = torch.cat([self.padding.to(token_ids.device), token_ids], dim=1)
        return any(bool(torch.as_tensor(criterion(token_ids, scores)).all()) for criterion in self.criteria)


def split_criteria(prepared: Sequence[Any], padding: Sequence[torch.Tensor], more: Sequence[Any] = ()) -> Ends:
    """Return the ends among transformers' prepared criteria.

    Args:
        prepared: transformers' list.
        padding: of each sequence.
        more: criteria that transformers was not told about.

    Raises:
        ValueError: there is no limit to the length.

    Example:
        >>> split_criteria(prepared, padding).max_length  # doctest: +SKIP
        20
    """
    module = require("transformers.generation.stopping_criteria")
    lengths, eos_token_ids, others = [], set(), list(more)
    for criterion in prepared:
        if type(criterion) is module.MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        elif type(criterion) is module.EosTokenCriteria:
            eos_token_ids.update(torch.as_tensor(criterion.eos_token_id).reshape(-1).tolist())
        else:
            others.append(criterion)
    if not lengths:
        raise ValueError("max_length: expected a limit with speculative(), got none; set max_new_tokens")
    criteria = [RowCriteria(others, tokens) for tokens in padding] if others else None
    return Ends(min(lengths), frozenset(eos_token_ids), criteria)
