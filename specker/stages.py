"""Where the time of a decode loop goes: drafting, target passes, verification, everything else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch


class StageSeconds(NamedTuple):
    """Seconds of a run by stage: drafting, target passes, verification, everything else."""

    draft: float
    target: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self)


class StageClock:
    """Adds up the time of the stages of a loop, on a GPU without making the host wait.

    Example:
        >>> clock = StageClock(torch.device("cpu"))
        >>> with clock.stage("draft"):
        ...     pass
        >>> clock.seconds().target
        0.0
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start = time.perf_counter()
        self._seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the block for the stage "draft", "target" or "verify"."""
        if self._on_gpu:
            # The host runs ahead of a GPU, so the times are taken by the GPU and read at the end.
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            begin_seconds = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - begin_seconds

    def seconds(self) -> StageSeconds:
        """Return the time of each stage so far; on a GPU waits for it to finish."""
        if self._on_gpu:
            torch.cuda.synchronize()
        total = time.perf_counter() - self._start
        for name, begin, end in self._events:
            self._seconds[name] += begin.elapsed_time(end) / 1000
        self._events.clear()
        return StageSeconds(**self._seconds, other=max(total - sum(self._seconds.values()), 0.0))
