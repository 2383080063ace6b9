"""What one case gives: every provider through the gate, then timed, with bytes and memory; the records of the JSON."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from . import footprint, gate
from .cases import Case, Inputs, accepted, make_inputs
from .eager import FILTERED, PLAIN
from .machine import Bystanders, Reader
from .provider import Call, Provider
from .timing import MIN_CALLS, Timing, Timings, measure

Record = dict[str, Any]


class Session(NamedTuple):
    """What all cases of a run share."""

    device: torch.device
    seconds: float
    clock: Callable[[], float]
    reader: Reader
    memory_bandwidth: float
    bystanders: Bystanders
    laws: dict[str, str]
    """How each provider that draws its own random numbers agreed in law, by name."""
    min_calls: int = MIN_CALLS
    deadline: float = math.inf
    """When no further case is begun, by `time.perf_counter`."""

    def is_late(self) -> bool:
        """Whether there is no time for another case."""
        return time.perf_counter() > self.deadline


def start(device: torch.device, seconds: float, *, processor_time: bool) -> Session:
    """Return a session, with the read bandwidth of the machine measured."""
    clock = time.process_time if processor_time else time.perf_counter
    reader = Reader(device, clock)
    return Session(device, seconds, clock, reader, reader.memory_bandwidth(), Bystanders(), {})


def run_case(
    session: Session, case: Case, providers: Iterable[Provider], tell: Callable[[str], None], *, footprints: bool = True
) -> Record:
    """Pass every provider through the gate, time those that can run, and return the record of the case.

    Raises:
        gate.DisagreementError: a provider decides otherwise than the reference.
    """
    inputs = {sampling: make_inputs(case, sampling, session.device) for sampling in (PLAIN, FILTERED)}
    prepared: dict[str, _Prepared] = {}
    skipped: dict[str, str] = {}
    for provider in providers:
        reason = provider.why_not(case, session.device)
        if reason:
            skipped[provider.name] = reason
            continue
        tell(f"{case.name}: {provider.name} against the reference")
        rows = inputs[provider.sampling]
        agreed = gate.check(provider, case, rows, session.laws)
        prepared[provider.name] = _Prepared(provider, provider.make(rows), _floor_bytes(case, provider, rows), agreed)
    tell(f"{case.name}: timing {len(prepared)} providers in turn")
    timings = _timings(session, prepared)
    return {
        "case": case.name,
        "batch": case.batch,
        "gamma": case.gamma,
        "vocab": case.vocab,
        "dtype": str(case.dtype).removeprefix("torch."),
        "skipped": skipped,
        "providers": {
            name: {
                "gate": ready.gate,
                "warm": _with_floor(timings[name].warm, ready.floor, session.reader.bandwidth(ready.floor)),
                "cold": _with_floor(timings[name].cold, ready.floor, session.memory_bandwidth),
                "floor_bytes": ready.floor,
                **(_footprint(session, ready) if footprints else {}),
            }
            for name, ready in prepared.items()
        },
    }


class _Prepared(NamedTuple):
    """A provider that has passed the gate."""

    provider: Provider
    call: Call
    floor: int
    gate: str


def _timings(session: Session, prepared: dict[str, _Prepared]) -> dict[str, Timings]:
    gc.collect()
    with session.bystanders:
        return measure(
            {name: ready.call for name, ready in prepared.items()},
            seconds=session.seconds,
            evict=session.reader.evict,
            device=session.device,
            clock=session.clock,
            min_calls=session.min_calls,
        )


def rounded(value: Any) -> Any:
    """Return records with their floats to five digits, more than any measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def _footprint(session: Session, ready: _Prepared) -> Record:
    return {
        "moved_bytes": footprint.moved_bytes(ready.provider, ready.call, ready.floor),
        "peak_bytes": footprint.peak_bytes(ready.call, session.device),
    }


def _floor_bytes(case: Case, provider: Provider, inputs: Inputs) -> int:
    """Return the floor at the acceptance of specker's own round; a GPU scores all positions at once."""
    num_accepted = accepted(inputs, provider.sampling, draft_rows=provider.draft_rows)
    return footprint.floor_bytes(case, provider, num_accepted, lazy=num_accepted.device.type == "cpu")


def _with_floor(timing: Timing, floor: int, bandwidth: float) -> Record:
    """Return a timing with the seconds that reading the floor takes: from a cache where it may still lie there."""
    return {**timing._asdict(), "floor_seconds": floor / bandwidth}
