"""The one timing method: providers interleaved, warm and cold caches apart, medians with their 10-90 % range."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

MIN_CALLS = 5


class Timing(NamedTuple):
    """Seconds a call of one provider took."""

    median: float
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""
    calls: int


class Timings(NamedTuple):
    """Both states of the caches."""

    warm: Timing
    """The call before was the same."""
    cold: Timing
    """A buffer larger than the last-level cache was read in between."""


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    evict: Callable[[], object],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    min_calls: int = MIN_CALLS,
) -> dict[str, Timings]:
    """Time every call in turn, again and again, until about `seconds` have passed; warm-up rounds are not counted.

    In each turn a call runs untimed, then timed (warm), then `evict` runs and the call is timed again (cold).
    Processor time (`time.process_time`) is steady on a busy machine, the wall clock is what a user waits for. An
    accelerator is synchronised round each call and needs the wall clock.
    """
    warm: dict[str, list[float]] = {name: [] for name in calls}
    cold: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        turns = 0
        while time.perf_counter() < end or turns < min_calls:
            for name, call in calls.items():
                call()
                warm[name].append(_time(call, device, clock))
                evict()
                cold[name].append(_time(call, device, clock))
            turns += 1
    finally:
        gc.enable()
    return {name: Timings(summary(warm[name]), summary(cold[name])) for name in calls}


def _time(call: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    synchronise(device)
    start = clock()
    call()
    synchronise(device)
    return clock() - start


def synchronise(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def summary(values: list[float]) -> Timing:
    """Return the median and the range of one sample."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Timing(statistics.median(values), tenths[0], tenths[-1], len(values))
