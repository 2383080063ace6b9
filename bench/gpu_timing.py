"""Times of rounds on a GPU: cold caches, device time between events, launched one by one and replayed as graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import specker

from .cases import Case, Inputs, make_inputs
from .eager import FILTERED, PLAIN, eager_round, smart_eager_filtered_round

BATCHES = (1, 8, 32, 128, 256)
VOCABS = (32_000, 128_256, 151_936)
GAMMA = 4
REPETITIONS = 9
DRY_REPETITIONS = 1


def cases(dry_run: bool) -> Iterator[Case]:
    """Yield the grid; a dry run has one small case."""
    for dtype in (torch.bfloat16,) if dry_run else (torch.bfloat16, torch.float32):
        for vocab in (40,) if dry_run else VOCABS:
            for batch in (1,) if dry_run else BATCHES:
                yield Case(f"{batch} x {vocab} {dtype}", batch, 1 if dry_run else GAMMA, vocab, dtype)


class Clock:
    """Times one call at a time after its rows have been driven out of the second-level cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 2**28 if device.type == "cuda" else 2**10
        self.flush = torch.empty(size, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the device time of one call; processor time without a device."""
        self.flush.zero_()
        if self.device.type != "cuda":
            start = time.process_time()
            call()
            return time.process_time() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def median(self, call: Callable[[], object]) -> float:
        """Return the median of some calls, after one that warms up."""
        call()
        on_gpu = self.device.type == "cuda"
        return statistics.median(self.seconds(call) for _ in range(REPETITIONS if on_gpu else DRY_REPETITIONS))


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second, read and written, of a copy much larger than the caches."""
    size = 2**30 if device.type == "cuda" else 2**20
    source, sink = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
    return 2 * size / Clock(device).median(lambda: sink.copy_(source))


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a call."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def calls_of(plain: Inputs, filtered: Inputs, *, compiled: bool) -> dict[str, Callable[[], object]]:
    """Return a call for each provider on prepared inputs; the filtered ones have tokens of their own."""
    filters = FILTERED._asdict()
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: eager_round(*plain[:3]),
        "specker": lambda: specker.verify(*plain[:3], seed=plain.seed),
        "specker, receipt": lambda: specker.verify(*plain[:3], draft_receipt=plain.receipt, seed=plain.seed),
        "specker, point mass": lambda: specker.verify(*plain[:2], seed=plain.seed),
        "smart eager, filters": lambda: smart_eager_filtered_round(*filtered[:3]),
        "specker, filters": lambda: specker.verify(*filtered[:3], seed=filtered.seed, **filters),
        "specker, filters, receipt": lambda: specker.verify(
            *filtered[:3], draft_receipt=filtered.receipt, seed=filtered.seed, **filters
        ),
    }
    if compiled:
        # Without the reset a limit on graphs would silently end compiling.
        torch.compiler.reset()
        graph = torch.compile(eager_round, dynamic=False)
        calls["torch.compile of eager"] = lambda: graph(*plain[:3])
    return calls


def time_case(case: Case, device: torch.device, bandwidth: float, *, compiled: bool) -> dict[str, Any]:
    """Return the times of one case, with the share of the bandwidth that the floor of bytes amounts to."""
    clock = Clock(device)
    plain, filtered = make_inputs(case, PLAIN, device), make_inputs(case, FILTERED, device)
    times = {}
    for name, call in calls_of(plain, filtered, compiled=compiled).items():
        times[name] = clock.median(call)
        if name.startswith("specker") and device.type == "cuda":
            times[f"{name}, graph"] = clock.median(graphed(call))
    with_receipt = case.bytes_at_least - case.batch * case.gamma * case.vocab * case.dtype.itemsize
    shares = {
        name: (with_receipt if "receipt" in name or "point mass" in name else case.bytes_at_least) / seconds / bandwidth
        for name, seconds in times.items()
        if name.startswith("specker")
    }
    ratios = {
        name: times["smart eager, filters" if "filters" in name else "eager"] / seconds
        for name, seconds in times.items()
        if name.startswith("specker")
    }
    return {"case": case.name, "seconds": times, "share_of_bandwidth": shares, "eager_over_this": ratios}


def time_grid(device: torch.device, *, dry_run: bool, deadline: float) -> dict[str, Any]:
    """Return the times of all cases that fit in before the deadline, and the names of those that do not."""
    bandwidth = copy_bandwidth(device)
    timed, left_out = [], []
    with specker.backend("triton"):
        for case in cases(dry_run):
            if time.monotonic() > deadline:
                left_out.append(case.name)
                continue
            # The compiler takes seconds a shape: one small and one large batch tell enough.
            compiled = not dry_run and case.dtype == torch.bfloat16 and (case.batch, case.vocab) in {
                (1, 128_256), (32, 128_256)
            }  # fmt: skip
            timed.append(time_case(case, device, bandwidth, compiled=compiled))
    return {"copy_bandwidth": bandwidth, "cases": timed, "left_out": left_out}
