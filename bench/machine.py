"""The machine under the figures: versions, device, caches, read bandwidth, and who else uses it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import specker

from .timing import summary, synchronise

_PACKAGES = ("torch", "triton", "transformers", "vllm", "flashinfer-python", "numpy")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64 * 2**20
_BUSY = 0.1


def default_device() -> torch.device:
    """Return the accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def environment(device: torch.device, threads: int) -> dict[str, Any]:
    """Return versions, device and load, without which a figure says little."""
    return {
        "specker": specker.__version__,
        **{package: version for package in _PACKAGES if (version := _version(package))},
        "python": platform.python_version(),
        "device": device_name(device),
        "backend": "cpp" if device.type == "cpu" and not specker.available_backends()["cpp"] else _backend(device),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads,
        "cache_bytes": last_level_cache(device),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _backend(device: torch.device) -> str:
    return "reference" if device.type == "cpu" else "triton"


def device_name(device: torch.device) -> str:
    """Return what the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    try:
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    return model[1] if model else platform.processor() or platform.machine()


def last_level_cache(device: torch.device) -> int:
    """Return the bytes of the largest cache; 64 MiB where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_bytes(path.read_text()) for path in _CACHES.glob("index*/size")]
    return max(sizes, default=_UNKNOWN_CACHE)


def _bytes(text: str) -> int:
    text = text.strip()
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


class Reader:
    """Reads a buffer with one vectorised pass: to measure bandwidth, and to push everything else out of the caches."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._buffer = torch.ones(4 * last_level_cache(device) // 8, dtype=torch.int64, device=device)

    def evict(self) -> None:
        """Read more than the last-level cache holds."""
        self._buffer[: len(self._buffer) // 2].sum()

    def memory_bandwidth(self) -> float:
        """Return bytes a second when nothing is in the caches."""
        return self._bandwidth(self._buffer, 7)

    def bandwidth(self, size: int) -> float:
        """Return bytes a second for a buffer of this many bytes that was read just before."""
        buffer = self._buffer[: max(1, size // 8)]
        if size > self._buffer.nbytes:
            return self.memory_bandwidth()
        self._bandwidth(buffer, 2)
        return self._bandwidth(buffer, max(7, min(100, 2**28 // max(size, 1))))

    def _bandwidth(self, buffer: torch.Tensor, calls: int) -> float:
        seconds = []
        for _ in range(calls):
            synchronise(self._device)
            start = self._clock()
            buffer.sum()
            synchronise(self._device)
            seconds.append(self._clock() - start)
        return buffer.nbytes / summary(seconds).median


class Bystanders:
    """Measures how many cores other processes keep busy meanwhile; needs Linux, elsewhere the load has to do."""

    def __init__(self) -> None:
        self._busy, self._own, self._elapsed = 0.0, 0.0, 0.0
        self._start = (0.0, 0.0, 0.0)

    def __enter__(self) -> Bystanders:
        self._start = _clocks()
        return self

    def __exit__(self, *_: object) -> None:
        busy, own, elapsed = (now - start for now, start in zip(_clocks(), self._start, strict=True))
        self._busy, self._own, self._elapsed = self._busy + busy, self._own + own, self._elapsed + elapsed

    def cores(self) -> float | None:
        """Return the mean number of cores that others used; None where the system does not tell."""
        if not Path("/proc/stat").exists() or not self._elapsed:
            return None
        return max(0.0, (self._busy - self._own) / self._elapsed)

    def warning(self) -> str:
        """Return what a reader has to know about them; an empty string where the machine was quiet."""
        cores = self.cores()
        load = os.getloadavg()[0]
        if cores is None:
            return f"load {load:.1f}: other programs are at work" if load > 1.5 else ""
        if cores < _BUSY:
            return ""
        return f"other processes kept {cores:.2f} cores busy during the measurement"


def _clocks() -> tuple[float, float, float]:
    """Return seconds of all processors' work, of this process' work and of the wall."""
    stat = Path("/proc/stat")
    busy = 0.0
    if stat.exists():
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in the first two.
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return busy, times.user + times.system, time.perf_counter()
