"""How the benchmark measures: order of the calls, bytes, memory, bandwidth, and who else is at work."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch

import specker
from specker.bench import cases, eager, footprint, machine, providers, timing
from specker.bench.cases import Case
from specker.bench.provider import Provider

CPU = torch.device("cpu")
CASE = Case("rows", 3, 4, 1_000, torch.bfloat16)


def test_providers_take_turns_warm_then_cold_and_the_warm_up_is_not_counted() -> None:
    log: list[str] = []
    clock = itertools.count()
    calls = {name: lambda name=name: log.append(name) for name in "ab"}
    timings = timing.measure(
        calls, seconds=0, evict=lambda: log.append("-"), device=CPU, clock=lambda: float(next(clock)), min_calls=2
    )
    assert "".join(log) == "ab" + "aa-a" + "bb-b" + "aa-a" + "bb-b"
    assert timings["a"].warm == timings["b"].cold == timing.Timing(1.0, 1.0, 1.0, 2)
    assert gc.isenabled()


def test_the_range_is_that_of_the_middle_four_fifths() -> None:
    assert timing.summary([float(value) for value in range(101)]) == timing.Timing(50.0, 10.0, 90.0, 101)


@pytest.mark.parametrize(
    ("options", "lazy", "rows"),
    [
        # Accepted 0, 2 and 4 of 4. Target rows: 1 + 3 + 5; draft rows judged: 1 + 3 + 4; residuals drawn: 2.
        ({}, True, 9 + 8),
        ({"receipt": True}, True, 9 + 2),
        ({"draft_rows": False}, True, 9),
        ({}, False, 3 * (5 + 4)),
        ({"receipt": True}, False, 3 * 5 + 2),
    ],
)
def test_the_floor_counts_each_row_that_decides_once(options: dict[str, bool], lazy: bool, rows: int) -> None:
    provider = Provider("any", lambda inputs: lambda: None, **options)
    found = footprint.floor_bytes(CASE, provider, torch.tensor([0, 2, 4]), lazy=lazy)
    assert found == rows * 2_000


def test_the_bytes_of_eager_code_are_those_of_its_operators() -> None:
    numbers, index = torch.ones(1_000), torch.zeros(10, dtype=torch.int64)

    def call() -> None:
        doubled = numbers.view(10, 100) * 2  # reads and writes 4,000
        doubled.clamp_(min=0)  # reads and writes 4,000
        doubled.flatten().gather(0, index)  # reads 80 of index and 40 of its source, writes 40
        numbers[:1].expand(1_000).clone()  # reads 4, writes 4,000

    provider = Provider("any", lambda inputs: call)
    assert footprint.moved_bytes(provider, call, 5) == 8_000 + 8_000 + 160 + 4_004
    assert footprint.moved_bytes(provider._replace(seeded=True), call, 5) == 5
    assert footprint.moved_bytes(providers.EAGER[1], call, 5) is None


def test_peak_memory_is_what_is_held_at_a_time() -> None:
    def call() -> None:
        for _ in range(3):
            torch.ones(8 * 2**20 // 4)

    assert footprint._allocator_peak(call) == 8 * 2**20
    if footprint._tells_residence():
        assert footprint.peak_method(CPU) == "growth of resident memory"
        # The C library may keep one freed block beside the next.
        assert 0.9 < footprint.peak_bytes(call, CPU) / (8 * 2**20) < 2.1
        assert footprint.peak_bytes(lambda: None, CPU) < 2**20


def test_peak_memory_without_the_systems_help_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_CLEAR_REFS", Path("/nowhere"))
    assert footprint.peak_method(CPU) == "torch's allocator"
    assert footprint.peak_bytes(lambda: torch.ones(2**20), CPU) == 4 * 2**20


@pytest.mark.parametrize("batch", [1, 9, 40])
@pytest.mark.parametrize("sampling", [eager.PLAIN, eager.FILTERED], ids=["plain", "filtered"])
def test_as_many_tokens_are_accepted_as_on_average(sampling: specker.Sampling, batch: int) -> None:
    case = Case("some", batch, 4, 500, torch.float32)
    inputs = cases.make_inputs(case, sampling, CPU)
    chances = specker.verify(*inputs[:3], return_accept_probs=True, **sampling._asdict()).accept_probs
    assert chances is not None
    average = float(chances.cumprod(-1).sum())
    assert abs(int(cases.accepted(inputs, sampling).sum()) - average) <= max(0.5, 0.05 * average) + 1e-5
    if batch == 1:
        assert average == pytest.approx(0.7 + 0.49 + 0.343 + 0.2401, rel=0.2)


def test_the_acceptance_of_the_rows_is_about_seven_tenths() -> None:
    case = Case("wide", 64, 1, 32_000, torch.bfloat16)
    inputs = cases._draw_inputs(case, eager.PLAIN, CPU, 1)
    chances = specker.verify(*inputs[:3], return_accept_probs=True).accept_probs
    assert chances is not None
    assert float(chances.mean()) == pytest.approx(0.7, abs=0.1)


def test_bandwidth_is_measured_in_and_out_of_the_caches() -> None:
    ticks = itertools.count()
    reader = machine.Reader(CPU, lambda: float(next(ticks)))
    size = 4 * machine.last_level_cache(CPU)
    assert reader.memory_bandwidth() == size // 8 * 8
    assert reader.bandwidth(8_000) == 8_000
    assert reader.bandwidth(2 * size) == size // 8 * 8


@pytest.mark.parametrize(("text", "size"), [("32768K\n", 32 * 2**20), ("2M", 2 * 2**20), ("1G\n", 2**30), ("512", 512)])
def test_cache_sizes_are_read(text: str, size: int) -> None:
    assert machine._bytes(text) == size


def _clocks(monkeypatch: pytest.MonkeyPatch, *readings: tuple[float, float, float]) -> None:
    queue = iter(readings)
    monkeypatch.setattr(machine, "_clocks", lambda: next(queue))


@pytest.mark.parametrize(
    ("busy", "words"), [(4.2, ""), (14.0, "other processes kept 1.00 cores busy during the measurement")]
)
def test_others_at_work_are_told(busy: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/stat").exists():
        pytest.skip("the system does not tell")
    bystanders = machine.Bystanders()
    _clocks(monkeypatch, (100.0, 7.0, 50.0), (100.0 + busy, 11.0, 60.0))
    with bystanders:
        pass
    assert bystanders.warning() == words


def test_where_the_system_does_not_tell_the_load_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    bystanders = machine.Bystanders()
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (2.5, 0.0, 0.0))
    assert bystanders.cores() is None
    assert bystanders.warning() == "load 2.5: other programs are at work"
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    assert bystanders.warning() == ""


def test_this_process_own_work_is_not_taken_for_that_of_others() -> None:
    bystanders = machine.Bystanders()
    with bystanders:
        torch.ones(2_000_000).sort()
    cores = bystanders.cores()
    # The clock of the system ticks in hundredths, so that a short piece of work may seem to be any of them.
    assert cores is None or cores <= (machine.os.cpu_count() or 1) + 1


def test_the_environment_names_versions_device_and_load() -> None:
    found = machine.environment(CPU, 3)
    assert found["torch"] == torch.__version__
    assert found["threads"] == 3
    assert found["device"]
    assert found["load"] >= 0
    assert found["cache_bytes"] >= 2**16
