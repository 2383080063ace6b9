"""What one entry of the comparison is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import specker

from .cases import Case, Inputs
from .eager import PLAIN, Outcome

BASELINE = "eager"
FILTERED_BASELINE = "smart eager, filters"
COMPILED = "torch.compile of eager"

Call = Callable[[], Any]


class Provider(NamedTuple):
    """One way to verify a round."""

    name: str
    make: Callable[[Inputs], Call]
    """Returns the call that is timed; whatever it prepares is not."""
    read: Callable[[Any], Outcome] = lambda returned: Outcome(*returned)
    """Turns what the call returned into the decision, outside the time."""
    sampling: specker.Sampling = PLAIN
    seeded: bool = False
    """Whether it draws by specker's generator, so that it must give the reference's tokens and not only its law."""
    decides: bool = True
    """False for a yardstick, which reads the rows of specker's round and decides nothing."""
    draft_rows: bool = True
    """False for point-mass drafts, which have none."""
    receipt: bool = False
    max_batch: int | None = None
    obstacle: Callable[[torch.device], str] = lambda _: ""
    """Says why it cannot run here; an empty string means that it can."""

    @property
    def baseline(self) -> str:
        """Name of the eager provider under the same parameters."""
        return BASELINE if self.sampling == PLAIN else FILTERED_BASELINE

    def why_not(self, case: Case, device: torch.device) -> str:
        """Say why this case is skipped; an empty string means that it is not."""
        if self.max_batch is not None and case.batch > self.max_batch:
            return f"takes a batch of {self.max_batch}"
        return self.obstacle(device)
