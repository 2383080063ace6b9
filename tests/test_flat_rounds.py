"""Flat rounds without bonus rows, and flat rounds whose draft rows lie in slots."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import specker
from specker import Status

from . import cases

pytestmark = pytest.mark.usefixtures("on_backend")
LENGTHS = [2, 0, 3, 1, 3]
TOTAL, WIDTH, VOCAB = sum(LENGTHS), 3, 30
BOUNDS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
OWNERS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
STEPS = torch.arange(TOTAL) - BOUNDS[OWNERS]


def flat_round(seed: int, with_draft: bool = True) -> dict[str, Any]:
    """Return a round of five sequences with bonus rows, in which drafts are kept and rejected."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(TOTAL + len(LENGTHS), VOCAB, generator=generator) * 2
    rows = target[torch.arange(TOTAL) + OWNERS]
    draft = rows + torch.randn(TOTAL, VOCAB, generator=generator)
    tokens = torch.multinomial(draft.softmax(-1), 1, generator=generator).squeeze(1)
    return {
        "draft_token_ids": tokens if with_draft else rows.argmax(-1), "target_logits": target,
        "draft_logits": draft if with_draft else None, "cu_num_draft_tokens": BOUNDS, "max_num_draft_tokens": WIDTH,
        "seed": torch.arange(5) + seed, "temperature": torch.tensor([1.0, 1.0, 0.7, 0.0, 1.3]),
        "return_logprobs": True, "return_accept_probs": True,
    }  # fmt: skip


def verify(arguments: dict[str, Any], device: torch.device) -> specker.VerifyResult:
    """Verify a flat round on a device."""
    there = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    return specker.verify_flat(**there)


def without_bonus_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the round with the target rows of its drafts alone."""
    return {**arguments, "target_logits": arguments["target_logits"][torch.arange(TOTAL) + OWNERS]}


@pytest.fixture
def seeds(backend: str) -> range:
    """Return the seeds of a test's rounds: a few where the interpreter runs them."""
    return range(1 if cases.interpreted(backend) else 10)


@pytest.mark.parametrize("filters", [{}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}], ids=["plain", "filtered"])
@pytest.mark.parametrize("with_draft", [True, False], ids=["draft", "point mass"])
def test_without_bonus_rows_all_but_the_bonus_token_is_the_same(
    filters: dict[str, Any], with_draft: bool, seeds: range, device: torch.device
) -> None:
    lengths, complete = torch.tensor(LENGTHS), 0
    for seed in seeds:
        arguments = flat_round(10 * seed, with_draft) | filters
        whole, part = verify(arguments, device), verify(without_bonus_rows(arguments), device)
        kept = whole.num_accepted.cpu()
        complete += int((kept == lengths)[lengths > 0].sum())
        shown = torch.arange(WIDTH + 1) < (kept + (kept < lengths)).unsqueeze(1)
        assert part.num_accepted.tolist() == kept.tolist()
        assert part.num_emitted.tolist() == shown.sum(1).tolist()
        assert part.status.tolist() == whole.status.tolist()
        assert part.token_ids.tolist() == whole.token_ids.cpu().where(shown, -1).tolist()
        assert part.logprobs is not None
        assert whole.logprobs is not None
        assert part.logprobs.tolist() == whole.logprobs.cpu().where(shown, 0.0).tolist()
        for name in ("accept_probs", "expected_accepted"):
            assert getattr(part, name).tolist() == getattr(whole, name).tolist()
    assert 0 < complete < 4 * len(seeds)


def test_rows_behind_a_rejection_decide_nothing(seeds: range, device: torch.device) -> None:
    seen = 0
    for seed in seeds:
        arguments = without_bonus_rows(flat_round(seed)) | {"return_accept_probs": False}
        wanted = verify(arguments, device)
        behind = wanted.num_accepted.cpu()[OWNERS] < STEPS
        seen += int(behind.sum())
        target = arguments["target_logits"].masked_fill(behind.unsqueeze(1), math.nan)
        draft = arguments["draft_logits"].masked_fill(behind.unsqueeze(1), math.inf)
        got = verify(arguments | {"target_logits": target, "draft_logits": draft}, device)
        assert [part.tolist() for part in got if part is not None] == [
            part.tolist() for part in wanted if part is not None
        ]
        assert got.status.tolist() == [0] * len(LENGTHS)
    assert seen > 0


# Rows of one page each; those behind the first rejection may not be read, or the process ends.
GUARDED_ROWS = """
import ctypes, mmap, torch, specker
lengths, vocab = [3, 2], mmap.PAGESIZE // 4
memory = mmap.mmap(-1, 10 * mmap.PAGESIZE)
rows = torch.frombuffer(memory, dtype=torch.float32).view(2, 5, vocab)
target, draft = rows
target[:, 0], draft[:, 0] = 40.0, 40.0
target[1, 1], draft[1, 2] = 99.0, 99.0
protect = ctypes.CDLL(None, use_errno=True).mprotect
for page in (2, 7):
    address = ctypes.c_void_p(rows.data_ptr() + page * mmap.PAGESIZE)
    assert protect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
with specker.backend("cpp"):
    result = specker.verify_flat(
        torch.tensor([0, 2, 0, 0, 0]), target, draft, cu_num_draft_tokens=torch.tensor([0, 3, 5]),
        max_num_draft_tokens=3, seed=0,
    )
print(result.token_ids.tolist())
"""


@pytest.mark.parametrize("backend", ["cpp"])
def test_rows_behind_a_rejection_are_not_read() -> None:
    guarded, itself = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        for script in (GUARDED_ROWS, GUARDED_ROWS.replace("(2, 7)", "(1, 6)"))
    )
    assert (guarded.returncode, guarded.stdout) == (0, "[[0, 1, -1, -1], [0, 0, -1, -1]]\n"), guarded.stderr
    # The row of the rejection is read: the guard works.
    assert itself.returncode == -signal.SIGSEGV


def test_injected_uniforms_are_one_pair_a_target_row(device: torch.device) -> None:
    target = cases.log([[0.5, 0.5]] * 3)
    pairs = [(0.4, 0.9), (0.6, 0.9), (0.4, 0.1)]
    result = verify(
        {
            "draft_token_ids": torch.zeros(3, dtype=torch.int64), "target_logits": target,
            "cu_num_draft_tokens": torch.tensor([0, 2, 3, 3]), "max_num_draft_tokens": 2,
            "uniforms": cases.uniforms(pairs),
        }, device,
    )  # fmt: skip
    assert result.token_ids.tolist() == [[0, 1, -1], [0, -1, -1], [-1, -1, -1]]
    assert result.num_accepted.tolist() == [1, 1, 0]
    assert result.num_emitted.tolist() == [2, 1, 0]
    assert result.status.tolist() == [0, 0, 0]


@pytest.mark.parametrize("width", [0, 2])
def test_sequences_without_a_row_emit_nothing(width: int, device: torch.device) -> None:
    result = verify(
        {
            "draft_token_ids": torch.zeros(0, dtype=torch.int64), "target_logits": torch.zeros(0, 4),
            "cu_num_draft_tokens": torch.zeros(3, dtype=torch.int32), "max_num_draft_tokens": width,
            "allowed_tokens": torch.full((2, 1), -1, dtype=torch.int32), "seed": torch.arange(2),
        }, device,
    )  # fmt: skip
    assert result.token_ids.tolist() == [[-1] * (width + 1)] * 2
    assert result.num_emitted.tolist() == result.status.tolist() == [0, 0]


def in_slots(arguments: dict[str, Any], slots: torch.Tensor) -> dict[str, Any]:
    """Return the round with its draft rows in slots; what is no draft row holds NaN."""
    by_slot = torch.full((9, WIDTH + 2, VOCAB + 3), math.nan)[:, :WIDTH, :VOCAB]
    by_slot[slots[OWNERS], STEPS] = arguments["draft_logits"]
    return {**arguments, "draft_logits": by_slot, "draft_index": slots}


@pytest.mark.parametrize("bonus_rows", [True, False])
@pytest.mark.parametrize("filters", [{}, {"top_k": 9}], ids=["plain", "filtered"])
def test_draft_rows_in_slots_are_those_behind_one_another(
    bonus_rows: bool, filters: dict[str, Any], seeds: range, device: torch.device
) -> None:
    for seed in seeds:
        arguments = flat_round(seed) | filters
        arguments = arguments if bonus_rows else without_bonus_rows(arguments)
        slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:5]
        wanted, got = verify(arguments, device), verify(in_slots(arguments, slots), device)
        assert [part.tolist() for part in got if part is not None] == [
            part.tolist() for part in wanted if part is not None
        ]


def test_a_slot_that_does_not_exist_is_told(device: torch.device) -> None:
    arguments = in_slots(flat_round(0), torch.tensor([3, 2, 8, 1, 0]))
    arguments["draft_index"] = torch.tensor([3, 2, 9, 1, 0])
    if device.type == "cpu":
        with pytest.raises(specker.InvalidInputError, match="sequence 2: draft_index: expected a leading row"):
            verify(arguments, device)
    else:
        assert verify(arguments, device).status.tolist() == [0, 0, int(Status.INVALID_DRAFT_INDEX), 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_index": torch.zeros(4).long()}, r"draft_index: expected shape \(5,\), got \(4,\)"),
        ({"draft_logits": torch.zeros(9, 2, VOCAB)}, r"draft_logits: expected shape \(rows, 3, 30\), got \(9, 2, 30\)"),
        ({"draft_logits": torch.zeros(TOTAL, VOCAB)}, r"draft_logits: expected shape \(rows, 3, 30\), got \(9, 30\)"),
        ({"draft_logits": None}, "draft_index: expected draft_logits with it, got None"),
        ({"uniforms": torch.zeros(TOTAL + 5, 2).double(), "seed": None}, r"uniforms: expected shape \(9, 2\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str, device: torch.device) -> None:
    arguments = without_bonus_rows(in_slots(flat_round(0), torch.arange(5)))
    with pytest.raises(ValueError, match=message):
        verify(arguments | change, device)
