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
from .timing import MIN_CALLS, Timing, measure

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
    record: Record = {**case._asdict(), "case": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
    del record["name"]
    inputs = {sampling: make_inputs(case, sampling, session.device) for sampling in (PLAIN, FILTERED)}
    record["skipped"] = {}
    prepared: dict[str, tuple[Provider, Call]] = {}
    gates: dict[str, str] = {}
    for provider in providers:
        reason = provider.why_not(case, session.device)
        if reason:
            record["skipped"][provider.name] = reason
            continue
        tell(f"{case.name}: {provider.name} against the reference")
        rows = inputs[provider.sampling]
        gates[provider.name] = gate.check(provider, case, rows, session.laws)
        prepared[provider.name] = (provider, provider.make(rows))
    tell(f"{case.name}: timing {len(prepared)} providers in turn")
    gc.collect()
    with session.bystanders:
        timings = measure(
            {name: call for name, (_, call) in prepared.items()},
            seconds=session.seconds,
            evict=session.reader.evict,
            device=session.device,
            clock=session.clock,
            min_calls=session.min_calls,
        )
    record["providers"] = {}
    for name, (provider, call) in prepared.items():
        rows = inputs[provider.sampling]
        floor = _floor_bytes(case, provider, rows)
        record["providers"][name] = {
            "gate": gates[name],
            **{state: _with_shares(session, timing, floor, state) for state, timing in timings[name]._asdict().items()},
            "floor_bytes": floor,
            **(_footprint(session, provider, call, floor) if footprints else {}),
        }
    return record


def rounded(value: Any) -> Any:
    """Return records with their floats to five digits, more than any measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def _footprint(session: Session, provider: Provider, call: Call, floor: int) -> Record:
    return {
        "moved_bytes": footprint.moved_bytes(provider, call, floor),
        "peak_bytes": footprint.peak_bytes(call, session.device),
    }


def _floor_bytes(case: Case, provider: Provider, inputs: Inputs) -> int:
    """Return the floor at the acceptance of specker's own round; a GPU scores all positions at once."""
    num_accepted = accepted(inputs, provider.sampling, draft_rows=provider.draft_rows)
    return footprint.floor_bytes(case, provider, num_accepted, lazy=num_accepted.device.type == "cpu")


def _with_shares(session: Session, timing: Timing, floor: int, state: str) -> Record:
    """Return a timing with the seconds that reading the floor takes, from a cache where it may still lie there."""
    bandwidth = session.reader.bandwidth(floor) if state == "warm" else session.memory_bandwidth
    return {**timing._asdict(), "floor_seconds": floor / bandwidth}
