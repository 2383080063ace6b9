"""What is compared: eager PyTorch, the same compiled, other packages' functions, a yardstick, and specker's forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import specker

from . import weigh
from .cases import Inputs
from .eager import FILTERED, PLAIN, Outcome, eager_round, smart_eager_filtered_round
from .peers import PEERS
from .provider import BASELINE, COMPILED, FILTERED_BASELINE, Call, Provider


def _eager(function: Callable[..., Any]) -> Callable[[Inputs], Call]:
    return lambda inputs: lambda: function(*inputs[:3])


def _compiled(inputs: Inputs) -> Call:
    graph = _graph(inputs.target_logits.shape, inputs.target_logits.dtype, inputs.target_logits.device)
    return lambda: graph(*inputs[:3])


@functools.lru_cache(maxsize=1)
def _graph(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:  # noqa: ARG001
    """Return a graph for one shape, as a server would compile it; the gate and the timing share it."""
    # Without the reset a limit on graphs would silently end compiling.
    torch.compiler.reset()
    return torch.compile(eager_round, dynamic=False)


def _specker(sampling: specker.Sampling, *, draft_rows: bool = True, receipt: bool = False) -> Callable[[Inputs], Call]:
    parameters = {} if sampling == PLAIN else sampling._asdict()

    def make(inputs: Inputs) -> Call:
        rows = inputs[:3] if draft_rows else inputs[:2]
        options: dict[str, Any] = {"seed": inputs.seed, **parameters}
        if receipt:
            options["draft_receipt"] = inputs.receipt
        return lambda: specker.verify(*rows, **options)

    return make


def _specker_outcome(result: specker.VerifyResult) -> Outcome:
    last = result.num_accepted.unsqueeze(-1)
    return Outcome(result.num_accepted, result.token_ids.gather(-1, last).squeeze(-1))


def _form(name: str, sampling: specker.Sampling, *, draft_rows: bool = True, receipt: bool = False) -> Provider:
    make = _specker(sampling, draft_rows=draft_rows, receipt=receipt)
    return Provider(name, make, _specker_outcome, sampling, seeded=True, draft_rows=draft_rows, receipt=receipt)


OURS = (
    _form("specker", PLAIN),
    _form("specker, receipt", PLAIN, receipt=True),
    _form("specker, point mass", PLAIN, draft_rows=False),
    _form("specker, filters", FILTERED),
    _form("specker, filters, receipt", FILTERED, receipt=True),
)
EAGER = (
    Provider(BASELINE, _eager(eager_round)),
    Provider(COMPILED, _compiled),
    Provider(FILTERED_BASELINE, _eager(smart_eager_filtered_round), sampling=FILTERED),
)
YARDSTICKS = (Provider(weigh.YARDSTICK, weigh.weigh, decides=False, obstacle=weigh.obstacle),)
SWEPT = (BASELINE, FILTERED_BASELINE, "specker", "specker, receipt", "specker, filters")
"""The providers of the scaling pictures."""


def all_providers() -> tuple[Provider, ...]:
    """Return every provider, whether it can run here or not, in the order of the tables."""
    return (*EAGER[:2], *PEERS, *YARDSTICKS, *OURS[:3], EAGER[2], *OURS[3:])
