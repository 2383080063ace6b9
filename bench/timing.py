"""The one timing method: providers interleaved, processor and wall time, medians with their 10-90 % range."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds a call of one provider took."""

    median: float
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""
    calls: int


def measure(
    calls: Mapping[str, Callable[[], object]], *, seconds: float, clock: Callable[[], float] = time.process_time
) -> dict[str, Timing]:
    """Time every call in turn, again and again, until about `seconds` have passed; warm-up rounds are not counted.

    Processor time (the default clock) is steady on a busy machine; the wall clock is what a user waits for. A GPU is
    synchronised around each call, so pass `time.perf_counter` there.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 5:
        for name, call in calls.items():
            _synchronise()
            start = clock()
            call()
            _synchronise()
            samples[name].append(clock() - start)
    return {name: _summary(values) for name, values in samples.items()}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(values: list[float]) -> Timing:
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Timing(statistics.median(values), tenths[0], tenths[-1], len(values))
