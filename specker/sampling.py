"""The parameters of one sampling distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy: the one predicate, in every backend."""


Parameters = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""temperature, top_k, top_p, min_p as the operators take them; None is an identity."""


class Sampling(NamedTuple):
    """Temperature and filters of one distribution, in the order in which they apply.

    Each is a Python number for the whole batch or a `(batch,)` tensor. `temperature` below 1e-5 (0 is the usual
    way to say it) or `top_p` of 0 is greedy; `top_k <= 0`, `top_p >= 1` and `min_p = 0` are exact identities.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95)
        Sampling(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0)
    """

    temperature: float | torch.Tensor = 1.0
    top_k: int | torch.Tensor = 0
    top_p: float | torch.Tensor = 1.0
    min_p: float | torch.Tensor = 0.0
