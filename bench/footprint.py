"""What a call costs besides time: the bytes it moves and the memory it allocates."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .cases import Case
from .provider import COMPILED, Call, Provider

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# These read one entry for each that they return, not their whole source.
_PICKING = ("aten::gather", "aten::index.Tensor", "aten::index_select")


def floor_bytes(case: Case, provider: Provider, num_accepted: torch.Tensor, *, lazy: bool) -> int:
    """Return the bytes of the rows that a round cannot do without, each counted once.

    Lazy (a CPU): positions behind the first rejection are never looked at. Otherwise (a GPU) all positions are scored
    at once. With a receipt, a draft row is needed only where its residual is drawn.
    """
    rejected = num_accepted < case.gamma
    judged = num_accepted + rejected if lazy else torch.full_like(num_accepted, case.gamma)
    target_rows = num_accepted + 1 if lazy else judged + 1
    if not provider.draft_rows:
        draft_rows = torch.zeros_like(judged)
    else:
        draft_rows = rejected.long() if provider.receipt else judged
    return int((target_rows + draft_rows).sum()) * case.row_bytes


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that each operator reads and writes; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in read}
        is_view = all(tensor.untyped_storage().data_ptr() in storages for tensor in written)
        if is_view and not func._schema.is_mutable:
            return returned
        picks = func.name() in _PICKING
        self.moved += sum(_extent(tensor) for tensor in (read[1:] if picks else read))
        self.moved += sum(_extent(tensor) for tensor in written) * (2 if picks else 1)
        return returned


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes behind a tensor, an expanded dimension counted once."""
    sizes = (size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.itemsize * math.prod(sizes)


def moved_bytes(provider: Provider, call: Call, floor: int) -> int | None:
    """Return the bytes that one call moves; None where its operators cannot be watched.

    For specker and the yardstick those are the rows they read, by their own account; for eager code, what goes into
    and out of each operator.
    """
    if provider.seeded or not provider.decides:
        return floor
    if provider.name == COMPILED:
        return None
    traffic = _Traffic()
    with traffic:
        call()
    return traffic.moved


def peak_method(device: torch.device) -> str:
    """Say how peak_bytes measures."""
    if device.type != "cpu":
        return "the accelerator's allocator"
    return "growth of resident memory" if _tells_residence() else "torch's allocator"


def _tells_residence() -> bool:
    """Whether the system lets a process reset the mark of its largest residence (Linux)."""
    return os.access(_CLEAR_REFS, os.W_OK)


def peak_bytes(call: Call, device: torch.device) -> int:
    """Return the most memory that one call holds at a time beyond its inputs.

    On Linux that is the growth of the process' resident memory, whoever allocates; elsewhere what goes through torch's
    allocator; on an accelerator its allocator's peak.
    """
    call()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        call()
        return torch.accelerator.max_memory_allocated(device) - before
    if _tells_residence():
        return min(_resident_growth(call) for _ in range(3))
    return _allocator_peak(call)


def _resident_growth(call: Call) -> int:
    # Freed memory that the C library keeps would hide what the call takes again.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _CLEAR_REFS.write_text("5")
    before = _resident("VmHWM")
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _allocator_peak(call: Call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    results = recorded.profiler.kineto_results if recorded.profiler else None
    events = [] if results is None else results.events()
    held, peak = 0, 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
