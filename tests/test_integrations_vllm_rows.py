"""vLLM's rejection samplers: which rows are read, and what is wrong with them or with the arguments."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specker import Status
from specker.integrations.vllm import rejection_sample

from .copies import large_results
from .vllm_batches import LENGTHS, VOCAB, batch, generators, metadata

# Rows of one page each, and pages that may not be read. Request 0 rejects its second draft of three, request 1 its
# first of two.
GUARDED_ROWS = """
import ctypes, mmap, torch, specker
from types import SimpleNamespace
from specker.integrations import vllm

def guarded(count, pages, peaks=()):
    memory = mmap.mmap(-1, count * mmap.PAGESIZE)
    rows = torch.frombuffer(memory, dtype=torch.float32).view(count, -1)
    rows[:, 0] = 40.0
    for row in peaks:
        rows[row, 2] = 99.0
    for page in pages:
        address = ctypes.c_void_p(rows.data_ptr() + page * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return rows

def first_runner(target_pages, draft_pages):
    sampling = SimpleNamespace(temperature=torch.ones(2), all_greedy=False, all_random=True, generators={})
    return vllm.rejection_sample(
        torch.tensor([0, 2, 0, 2, 0]), [3, 2], 3, torch.tensor([3, 5]), guarded(5, draft_pages, (1, 3)),
        guarded(5, target_pages), torch.tensor([7, 8]), sampling,
    )

def second_runner(target_pages, draft_pages):
    slots, steps = torch.tensor([0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    return vllm.rejection_sample_by_slot(
        guarded(7, target_pages), guarded(6, draft_pages, (1, 3)).view(2, 3, -1), torch.tensor([9, 0, 2, 0, 9, 2, 0]),
        torch.tensor([0, 4, 7]), steps, torch.tensor([0, 1]), slots, steps, torch.ones(2), torch.arange(2), 3,
    )[0]

with specker.backend("cpp"):
    print(eval(CALL).tolist())
"""


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["cpp"])
@pytest.mark.parametrize(
    ("behind", "itself"),
    [
        ("first_runner((2, 4), (2, 4))", "first_runner((1,), ())"),
        ("second_runner((2, 3, 5, 6), (2, 4, 5))", "second_runner((), (3,))"),
    ],
    ids=["first runner", "second runner"],
)
def test_rows_behind_a_rejection_are_not_read(behind: str, itself: str) -> None:
    ended = [
        subprocess.run([sys.executable, "-c", f"CALL = {call!r}\n{GUARDED_ROWS}"], capture_output=True, text=True)
        for call in (behind, itself)
    ]
    assert (ended[0].returncode, ended[0].stdout) == (0, "[[0, 0, -1, -1], [0, -1, -1, -1]]\n"), ended[0].stderr
    # The row of a rejection is read: the guard works.
    assert ended[1].returncode == -signal.SIGSEGV


def test_an_invalid_row_concerns_its_own_request_only(on_backend: str) -> None:
    inputs = batch([3, 2, 2], seed=3)
    seeds = [1.0] * 3
    healthy = rejection_sample(**inputs, sampling_metadata=metadata(seeds, generators(3)))
    inputs["target_logits"] = inputs["target_logits"].clone()
    inputs["target_logits"][3] = math.nan
    status = torch.zeros(3, dtype=torch.int32)
    got = rejection_sample(**inputs, sampling_metadata=metadata(seeds, generators(3)), output_status=status)
    assert got[1].tolist() == [-1, -1, -1, -1]
    assert got[::2].tolist() == healthy[::2].tolist()
    assert status.tolist() == [0, int(Status.TARGET_INVALID), 0]


def test_rows_behind_a_rejection_set_no_status_bit() -> None:
    inputs = batch([2, 1], has_draft=False)
    inputs["draft_token_ids"] = torch.tensor([0, 999, 0])
    inputs["target_logits"] = torch.tensor([[0.0, 9.0], [math.nan, 0.0], [9.0, 0.0]])
    status = torch.zeros(2, dtype=torch.int32)
    token_ids = rejection_sample(**inputs, sampling_metadata=metadata(), output_status=status)
    assert token_ids.tolist() == [[1, -1, -1], [0, 101, -1]]
    assert status.tolist() == [0, 0]


@pytest.mark.parametrize("layout", ["equal", "ragged"])
def test_rows_are_read_where_they_lie(layout: str) -> None:
    lengths, vocab = LENGTHS[layout], 5000
    inputs = batch(lengths, vocab=vocab)
    padded = torch.full((2, sum(lengths), vocab + 3), math.nan)
    padded[0, :, :vocab], padded[1, :, :vocab] = inputs["target_logits"], inputs["draft_probs"]
    sliced = {**inputs, "target_logits": padded[0, :, :vocab], "draft_probs": padded[1, :, :vocab]}
    temperature = [0.0, 1.0, 1.0, 1.0]
    wanted = rejection_sample(**inputs, sampling_metadata=metadata(temperature, generators(4)))
    got = []
    names = large_results(
        lambda: got.append(rejection_sample(**sliced, sampling_metadata=metadata(temperature, generators(4)))), vocab
    )
    assert names == []
    assert got[0].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"synthetic_mode": True}, NotImplementedError, "synthetic_mode: expected it unset"),
        ({"synthetic_conditional_rates": torch.ones(3)}, NotImplementedError, "synthetic_conditional_rates: "),
        ({"fly_window_size": 2}, NotImplementedError, "fly_window_size: expected it unset"),
        ({"num_draft_tokens": [2, 0, 3, 2]}, ValueError, "num_draft_tokens: expected a sum of 6, .* got 7"),
        ({"max_spec_len": 2}, ValueError, r"num_draft_tokens: expected lengths in 0\.\.max_spec_len = 2, got 0\.\.3"),
        ({"num_draft_tokens": [3, -1, 3, 1]}, ValueError, r"num_draft_tokens: expected lengths .* got -1\.\.3"),
        ({"bonus_token_ids": torch.zeros(3, 1).long()}, ValueError, r"bonus_token_ids: expected shape \(4, 1\)"),
        ({"bonus_token_ids": torch.zeros(5).long()}, ValueError, r"bonus_token_ids: expected shape \(4,\)"),
        (
            {"cu_num_draft_tokens": torch.tensor([2, 2, 6, 6])},
            ValueError,
            r"expected the running totals \[2, 2, 5, 6\]",
        ),
        (
            {"sampling_metadata": metadata([0.0] + [1.0] * 5)},
            ValueError,
            r"sampling_metadata.temperature: expected shape",
        ),
        ({"cu_num_draft_tokens": torch.zeros(5).int()}, ValueError, r"cu_num_draft_tokens: expected shape \(4,\)"),
        ({"draft_token_ids": torch.zeros(6)}, TypeError, "draft_token_ids: expected dtype int64 or int32"),
        ({"draft_probs": torch.zeros(6, VOCAB + 1)}, ValueError, r"draft_probs: expected shape \(6, 13\)"),
        ({"target_logits": torch.zeros(6, VOCAB).double()}, TypeError, "target_logits: expected dtype float32"),
        ({"output_status": torch.zeros(4)}, TypeError, "output_status: expected dtype int32"),
        ({"sampling_metadata": metadata([1.0, 1.0, -0.5, 1.0])}, ValueError, "sequence 2: temperature: expected"),
        (
            {"sampling_metadata": SimpleNamespace(temperature=None, all_greedy=False, all_random=False, generators={})},
            TypeError,
            "sampling_metadata.temperature: expected a tensor, got NoneType",
        ),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {**batch(LENGTHS["ragged"]), "sampling_metadata": metadata([1.0] * 4)}
    with pytest.raises(error, match=message):
        rejection_sample(**{**arguments, **change})
