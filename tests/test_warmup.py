"""The variants of the kernels: how many a set of flags compiles, and that nothing else compiles another."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import specker

rounds = pytest.importorskip("specker.kernels.rounds")
warmup = importlib.import_module("specker.warmup")
pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["triton"]) or torch.cuda.is_available(),
    reason=specker.available_backends()["triton"] or "kernels are compiled here, not interpreted",
)
VOCAB = 40


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Collect what a launch is compiled for: types of its arguments, which are absent, compile-time arguments."""
    seen: set[tuple[Any, ...]] = set()

    def record(kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], *arguments: Any) -> None:
        types = tuple(
            argument.dtype if isinstance(argument, torch.Tensor) else None if argument is None else type(argument)
            for argument in arguments
        )
        values = tuple(constants[name] for name in rounds.CONSTANTS[kernel.__name__])
        seen.add((kernel.__name__, types, values))
        assert all(abs(value) < 2**31 for value in arguments if isinstance(value, int))

    monkeypatch.setattr(rounds, "_launch", record)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize(("draft_rows", "receipt"), [(True, False), (True, True), (False, False)])
def test_rounds_of_any_shape_launch_what_was_warmed_up(
    dtype: torch.dtype, filtered: bool, draft_rows: bool, receipt: bool, compiled: set[tuple[Any, ...]]
) -> None:
    count = specker.warmup(
        VOCAB, dtype, device="cpu", draft_rows=draft_rows, receipt=receipt, filtered=filtered, return_logprobs=True
    )
    assert count == len(compiled) == warmup.num_variants(draft_rows=draft_rows, filtered=filtered)
    before = set(compiled)
    filters = {"top_k": 3, "top_p": 0.9, "min_p": 0.1} if filtered else {}
    with specker.backend("triton"):
        for batch, gamma in ((1, 1), (3, 2), (70, 5)):
            target = torch.randn(batch, gamma + 1, VOCAB).to(dtype)
            draft = target[:, :gamma].contiguous() if draft_rows else None
            seed = torch.arange(batch)
            receipts = None
            if draft is not None:
                steps = [specker.sample(draft[:, step], seed=seed, temperature=0.5, **filters) for step in range(gamma)]
                receipts = specker.DraftReceipt.stack([step.receipt for step in steps]) if receipt else None
            tokens = torch.zeros(batch, gamma, dtype=torch.int64)
            specker.verify(
                tokens, target, draft, draft_receipt=receipts, seed=seed, position=7, temperature=0.5,
                return_logprobs=True, **filters,
            )  # fmt: skip
    assert compiled == before


def test_padded_rows_are_a_variant_of_their_own(compiled: set[tuple[Any, ...]]) -> None:
    specker.warmup(41, torch.bfloat16, device="cpu")
    dense = set(compiled)
    compiled.clear()
    specker.warmup(41, torch.bfloat16, device="cpu", row_stride=48)
    assert not compiled & dense


def test_a_row_stride_below_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="row_stride: expected at least the vocabulary of 40, got 39"):
        specker.warmup(VOCAB, device="cpu", row_stride=39)
