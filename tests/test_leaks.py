"""No call leaves memory behind: 10^5 calls of `verify` and of `sample` on the C++ backend."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import specker

from .cases import random_rows

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc"),
    pytest.mark.usefixtures("on_backend"),
    pytest.mark.parametrize("backend", ["cpp"]),
]
CALLS = 100_000


class Memory(NamedTuple):
    """What the process holds."""

    resident: int
    """Bytes in memory."""
    allocated: int
    """Bytes given out by malloc; 0 where the C library does not tell."""
    objects: int
    """Blocks of Python's own allocator."""


# A leak of one pointer a call would be 800,000 bytes, or 100,000 blocks.
BOUND = Memory(resident=2_000_000, allocated=200_000, objects=2_000)


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def memory_held() -> Memory:
    """Return what the process holds now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    library, allocated = ctypes.CDLL(None), 0
    if hasattr(library, "mallinfo2"):
        library.mallinfo2.restype = _MallInfo
        info = library.mallinfo2()
        allocated = info.uordblks + info.hblkhd
    return Memory(resident, allocated, sys.getallocatedblocks())


def growth(call: Callable[[], object], calls: int) -> Memory:
    """Return what so many calls leave behind, after some that fill every cache."""
    for _ in range(1000):
        call()
    before = memory_held()
    for _ in range(calls):
        call()
    return Memory(*(after - held for after, held in zip(memory_held(), before, strict=True)))


def exceeded(grown: Memory) -> list[str]:
    """Return which bounds a growth exceeds."""
    return [name for name, value, bound in zip(Memory._fields, grown, BOUND, strict=True) if value > bound]


def verify_once() -> Callable[[], object]:
    """Return a call of `verify` with all that it allocates: filters, a residual, every optional output."""
    target, draft = random_rows(1, 3, 300), random_rows(1, 2, 300, seed=1)
    tokens, top_k = draft.argmax(dim=-1), torch.tensor([20])
    return lambda: specker.verify(
        tokens, target, draft, top_k=top_k, top_p=0.9, seed=1, return_logprobs=True, return_accept_probs=True
    )  # fmt: skip


def sample_once() -> Callable[[], object]:
    """Return a call of `sample` with filters."""
    logits, top_k = random_rows(1, 300), torch.tensor([20])
    return lambda: specker.sample(logits, top_k=top_k, top_p=0.9, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("make_call", [verify_once, sample_once])
def test_calls_leave_no_memory_behind(make_call: Callable[[], Callable[[], object]]) -> None:
    grown = growth(make_call(), CALLS)
    assert exceeded(grown) == [], grown


def test_refused_calls_leave_no_memory_behind() -> None:
    logits = random_rows(1, 300)

    def refused() -> None:
        with pytest.raises(specker.InvalidInputError):
            specker.sample(logits, temperature=torch.tensor([-1.0]), seed=1)

    # An object a call would be 5,000 objects, beyond the bound that holds for more calls.
    grown = growth(refused, CALLS // 20)
    assert exceeded(grown) == [], grown


def _mapped_megabyte() -> mmap.mmap:
    """Return a megabyte that comes from the system and not from what the process has freed before."""
    block = mmap.mmap(-1, 1 << 20)
    block.write(b"x" * (1 << 20))
    return block


def test_a_leak_of_one_pointer_a_call_is_seen() -> None:
    kept: list[object] = []
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    # The process may have room for 800,000 bytes already, so that its resident memory need not grow.
    unfreed = exceeded(growth(lambda: malloc(8), CALLS))
    assert "allocated" in unfreed or not hasattr(ctypes.CDLL(None), "mallinfo2")
    assert "resident" in exceeded(growth(lambda: kept.append(_mapped_megabyte()), 20))
    assert "objects" in exceeded(growth(lambda: kept.append(object()), CALLS))
