"""Faults seen in other systems: index width, dtypes, strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import specker

from . import cases
from .cases import interpreted
from .faults import fault

pytestmark = pytest.mark.usefixtures("on_backend")
VOCAB = 13
SEED: dict[str, Any] = {"seed": 3, "return_logprobs": True, "return_accept_probs": True}
TOKENS = [[1, 2], [3, 4], [5, 6]]


def verify_bits(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor | None, **options: Any) -> list[object]:
    """Return all bits of a result."""
    result = specker.verify(tokens, target, draft, **(SEED | options))
    return [cases.sequence_of(result, row) for row in range(tokens.shape[0])]


@fault("B87")
def test_rows_beyond_2_31_entries_are_read_where_they_lie(device: torch.device) -> None:
    # Four gigabytes of addresses; on a CPU only the pages of these few rows are ever touched.
    far, width = 2**31, 3 * VOCAB
    memory = torch.empty(far + 2 * width, dtype=torch.bfloat16, device=device)
    target = torch.as_strided(memory, (2, 2, VOCAB), (far, VOCAB, 1))
    draft = torch.as_strided(memory, (2, 1, VOCAB), (far, VOCAB, 1), 2 * VOCAB)
    rows_apart = torch.as_strided(memory, (1, 2, VOCAB), (1, far, 1))
    target.copy_(cases.random_rows(2, 2, VOCAB))
    draft.copy_(cases.random_rows(2, 1, VOCAB))
    tokens = torch.tensor([[1], [2]], device=device)
    assert verify_bits(tokens, target, draft) == verify_bits(tokens, target.contiguous(), draft.contiguous())
    slots = torch.tensor([1, 0], device=device)
    indexed = verify_bits(tokens, target, draft, draft_index=slots)
    assert indexed == verify_bits(tokens, target.contiguous(), draft[slots].contiguous())
    assert verify_bits(tokens[:1], rows_apart, None) == verify_bits(tokens[:1], rows_apart.contiguous(), None)
    drawn = specker.sample(target[:, 0], seed=0)
    assert drawn.token_ids.tolist() == specker.sample(target[:, 0].contiguous(), seed=0).token_ids.tolist()


def padded(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows as a slice of a wider tensor with NaN behind each row."""
    wide = torch.nn.functional.pad(rows, (0, 3), value=math.nan)
    return wide[..., : rows.shape[-1]]


def offset(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows as a view that starts in the middle of its storage, on an odd element."""
    memory = torch.full((rows.numel() + 1,), math.nan, dtype=rows.dtype, device=rows.device)
    view = memory[1:].view(rows.shape)
    view.copy_(rows)
    return view


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Return every second sequence and row of a tensor that is NaN elsewhere."""
    batch, width, vocab = rows.shape
    memory = torch.full((2 * batch, 2 * width, vocab), math.nan, dtype=rows.dtype, device=rows.device)
    memory[::2, ::2] = rows
    return memory[::2, ::2]


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows with their sequences innermost of the leading axes."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


VIEWS = {"padded": padded, "offset": offset, "interleaved": interleaved, "swapped": swapped}


@fault("B88")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_view_gives_the_bits_of_its_contiguous_copy(
    view: Any, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    if interpreted(backend) and dtype != torch.bfloat16:
        pytest.skip("one dtype is enough for the interpreter")
    target = cases.random_rows(3, 3, VOCAB, dtype=dtype).to(device)
    draft = cases.random_rows(3, 2, VOCAB, dtype=dtype).to(device)
    tokens = torch.tensor(TOKENS, device=device)
    options = {"temperature": 0.7, "top_k": 9, "top_p": 0.95}
    assert verify_bits(tokens, view(target), view(draft), **options) == verify_bits(tokens, target, draft, **options)


@fault("B88")
def test_expanded_rows_give_the_bits_of_their_copies(device: torch.device) -> None:
    target = cases.random_rows(VOCAB).to(device).expand(3, 3, VOCAB)
    draft = cases.random_rows(VOCAB, seed=1).to(device).expand(3, 2, VOCAB)
    tokens = torch.tensor([5, 6], device=device).expand(3, 2)
    options = {"temperature": torch.tensor([0.7], device=device).expand(3)}
    copies = verify_bits(tokens.contiguous(), target.contiguous(), draft.contiguous(), **options)
    assert verify_bits(tokens, target, draft, **options) == copies


@fault("B88")
def test_strided_small_arguments_give_the_bits_of_their_copies(device: torch.device) -> None:
    target, draft = cases.random_rows(3, 3, VOCAB).to(device), cases.random_rows(3, 2, VOCAB).to(device)
    tokens = torch.tensor(TOKENS, device=device)
    plain: dict[str, Any] = {
        "num_draft_tokens": torch.tensor([2, 1, 2]),
        "temperature": torch.tensor([0.5, 0.0, 2.0]),
        "top_k": torch.tensor([3, 0, 9]),
        "top_p": torch.tensor([0.9, 1.0, 0.5]),
        "min_p": torch.tensor([0.1, 0.0, 0.0]),
        "seed": torch.tensor([5, -6, 7]),
        "position": torch.tensor([0, 9, 2**40]),
        "draft_index": torch.tensor([2, 0, 1]),
    }
    plain = {name: value.to(device) for name, value in plain.items()}
    strided: dict[str, Any] = {name: torch.stack([value, value + 1], dim=1)[:, 0] for name, value in plain.items()}
    options: dict[str, Any] = {"return_logprobs": True, "return_accept_probs": True}
    wanted = specker.verify(tokens, target, draft, **plain, **options)
    got = specker.verify(tokens.t().contiguous().t(), target, draft, **strided, **options)
    for row in range(3):
        assert cases.sequence_of(got, row) == cases.sequence_of(wanted, row)
    draws = torch.rand(3, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    by_copy = specker.verify(tokens, target, draft, uniforms=draws)
    by_view = specker.verify(tokens, target, draft, uniforms=draws.permute(2, 1, 0).contiguous().permute(2, 1, 0))
    assert by_copy.token_ids.tolist() == by_view.token_ids.tolist()


@fault("B88")
def test_a_last_axis_with_gaps_is_refused(device: torch.device) -> None:
    target = torch.zeros((3, VOCAB, 3), device=device).transpose(1, 2)
    with pytest.raises(ValueError, match=r"target_logits: expected a contiguous last axis \(stride 1\), got strides"):
        specker.verify(torch.tensor(TOKENS, device=device), target)
    with pytest.raises(ValueError, match=r"logits: expected a contiguous last axis \(stride 1\), got strides"):
        specker.sample(torch.zeros((VOCAB, 3), device=device).t())


@fault("B89")
def test_results_are_new_tensors_and_no_output_is_passed_in(device: torch.device) -> None:
    target = cases.random_rows(3, 3, VOCAB).to(device)
    tokens = torch.tensor(TOKENS, device=device)
    unknown: dict[str, Any] = {"out": torch.empty((3, 6), dtype=torch.int64, device=device)[:, ::2]}
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        specker.verify(tokens, target, **unknown)
    first, second = (specker.verify(tokens, target, seed=0) for _ in range(2))
    pointers = {value.data_ptr() for result in (first, second) for value in result[:4] if value is not None}
    assert len(pointers) == 8


@fault("B90")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_are_not_rounded_to_the_dtype_of_the_logits(dtype: torch.dtype, device: torch.device) -> None:
    # .999 is 1 in bfloat16 and .99951 is 1 in float16; each cuts the last id, whose share is 3e-5.
    row = torch.tensor([0.0, -0.5, -9.5], dtype=dtype, device=device)
    for top_p in (0.999, 0.99985):
        assert cases.kept_ids(row, top_p=top_p) == [0, 1]
        assert cases.kept_ids(row, top_p=torch.tensor([top_p], device=device)) == [0, 1]
    assert cases.kept_ids(row, top_p=0.99999) == [0, 1, 2]
    probs = cases.token_probs(row, temperature=1.001)
    wanted = (row.double().cpu() / 1.001).softmax(-1)
    torch.testing.assert_close(probs.double(), wanted, rtol=1e-6, atol=0)


@fault("B91")
def test_int32_and_int64_ids_mean_the_same(device: torch.device) -> None:
    target, draft = cases.random_rows(3, 3, VOCAB).to(device), cases.random_rows(3, 2, VOCAB).to(device)
    wide = torch.tensor(TOKENS, device=device)
    lengths = torch.tensor([2, 1, 0], device=device)
    top_k, index = torch.tensor([3, 0, 20], device=device), torch.tensor([1, 2, 0], device=device)
    by_int64 = verify_bits(wide, target, draft, num_draft_tokens=lengths, top_k=top_k, draft_index=index)
    by_int32 = verify_bits(
        wide.int(), target, draft, num_draft_tokens=lengths.int(), top_k=top_k.int(), draft_index=index.int()
    )
    assert by_int64 == by_int32


@fault("B91")
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32])
def test_ids_of_another_dtype_are_refused(dtype: torch.dtype, device: torch.device) -> None:
    got = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"draft_token_ids: expected dtype int64 or int32, got {got}"):
        specker.verify(torch.zeros((1, 1), dtype=dtype, device=device), torch.zeros((1, 2, 4), device=device))


@fault("B91")
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_target_and_draft_may_differ_in_dtype(
    target_dtype: torch.dtype, draft_dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    if interpreted(backend) and (target_dtype, draft_dtype) != (torch.bfloat16, torch.float16):
        pytest.skip("one pair is enough for the interpreter")
    target = cases.random_rows(3, 3, VOCAB, dtype=target_dtype).to(device)
    draft = cases.random_rows(3, 2, VOCAB, dtype=draft_dtype).to(device)
    tokens = torch.tensor(TOKENS, device=device)
    assert verify_bits(tokens, target, draft) == verify_bits(tokens, target.float(), draft.float())
    probs = draft.softmax(-1)
    by_probs = specker.verify(tokens, target, draft_probs=probs, **SEED)
    as_floats = specker.verify(tokens, target.float(), draft_probs=probs.float(), **SEED)
    assert [cases.sequence_of(by_probs, row) for row in range(3)] == [
        cases.sequence_of(as_floats, row) for row in range(3)
    ]


@fault("B91")
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_rows_of_another_dtype_are_refused(dtype: torch.dtype, device: torch.device) -> None:
    got = str(dtype).removeprefix("torch.")
    good, bad = torch.zeros((1, 2, 4), device=device), torch.zeros((1, 2, 4), dtype=dtype, device=device)
    tokens = torch.zeros((1, 1), dtype=torch.int64, device=device)
    message = f"expected dtype float32 or bfloat16 or float16, got {got}"
    with pytest.raises(TypeError, match=f"target_logits: {message}"):
        specker.verify(tokens, bad)
    with pytest.raises(TypeError, match=f"draft_logits: {message}"):
        specker.verify(tokens, good, bad[:, :1])
    with pytest.raises(TypeError, match=f"draft_probs: {message}"):
        specker.verify(tokens, good, draft_probs=bad[:, :1])
    with pytest.raises(TypeError, match=f"^logits: {message}"):
        specker.sample(bad[0])


@fault("B92")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_more_than_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    # A peak 12 above a flat tail of 4096: summed in half precision, the tail would stop growing at once.
    row = torch.zeros(4097, dtype=dtype, device=device)
    row[0] = 12.0
    wanted = row.double().cpu().softmax(-1)
    assert cases.token_probs(row, [0, 1, 4096]).tolist() == pytest.approx(wanted[[0, 1, 4096]].tolist(), rel=1e-6)
    spread = torch.linspace(-20, 20, 41, dtype=dtype, device=device)
    wanted = spread.double().cpu().softmax(-1)
    torch.testing.assert_close(
        cases.token_probs(spread, [40, 30, 20, 0]).double(), wanted[[40, 30, 20, 0]], rtol=1e-6, atol=0
    )
