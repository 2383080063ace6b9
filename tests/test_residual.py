"""Residuals at the ends of what floats hold: masked tokens, stale receipts, one-hot rows, tails far below the peak."""

from __future__ import annotations

import math

import pytest
import torch

import specker
from specker import DraftReceipt, Status

from .cases import interpreted

pytestmark = pytest.mark.usefixtures("on_backend")
MASKED = 100
UNIFORMS = torch.tensor([[[1 - 2.0**-53, 0.0], [0.5, 0.0]]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [8192, 9000], ids=["whole shards", "a short shard"])
def test_a_masked_token_is_not_recovered_by_a_uniform_of_0(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    target, draft = torch.randn(1, 2, vocab, generator=generator), torch.randn(1, 1, vocab, generator=generator)
    # Both mask the first tokens, and the draft has next to no mass in their shard.
    target[..., :MASKED] = draft[..., : MASKED // 2] = float("-inf")
    draft[..., 5000] = 30.0
    arguments = torch.tensor([[5000]]), target.to(dtype), draft.to(dtype)
    result = specker.verify(*(argument.to(device) for argument in arguments), uniforms=UNIFORMS.to(device))
    assert result.num_accepted.tolist() == [0]
    assert result.token_ids.tolist() == [[MASKED, -1]]


def test_a_masked_token_is_not_recovered_from_a_row_that_its_receipt_is_not_of(
    device: torch.device, backend: str
) -> None:
    vocab, drafted, masked = 1000, 3, 7
    target, drawn_from = torch.zeros(1, 2, vocab), torch.zeros(1, vocab)
    target[..., masked], target[0, 0, drafted], drawn_from[0, drafted] = -math.inf, -2.0, 5.0
    for seed in range(50):
        sampled = specker.sample(drawn_from.to(device), seed=seed)
        if sampled.token_ids.tolist() == [drafted]:
            break
    receipt = DraftReceipt.stack([sampled.receipt])
    uniforms = torch.tensor([[[0.999, 0.5], [0.5, 0.5]]], dtype=torch.float64, device=device)
    # Exponents of all sizes, of which some would turn the sign of a weight.
    for overwritten in (5.5, 60.0, 130.0, 200.0, 1e4, 1e30, 3e38):
        draft = drawn_from.clone().unsqueeze(0)
        draft[..., masked] = overwritten
        tokens = torch.tensor([[drafted]], device=device)
        result = specker.verify(tokens, target.to(device), draft.to(device), draft_receipt=receipt, uniforms=uniforms)
        assert result.num_accepted.tolist() == [0]
        assert masked not in result.token_ids.tolist()[0]
        if interpreted(backend):
            break


def test_equal_one_hot_rows_have_no_residual(device: torch.device) -> None:
    for number in range(8):
        target, draft = torch.full((1, 2, 40), -math.inf), torch.full((1, 1, 40), -math.inf)
        # Their only logits are far apart, and both mean certainty.
        target[..., 5], draft[..., 5] = 1.1 + 0.37 * number, -2.3 + 0.11 * number
        arguments = torch.tensor([[7]]), target, draft
        result = specker.verify(*(argument.to(device) for argument in arguments), uniforms=UNIFORMS.to(device))
        assert result.token_ids.tolist() == [[5, -1]]
        assert result.status.tolist() == [Status.RESIDUAL_EMPTY | Status.DRAFT_TOKEN_IMPOSSIBLE]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 17, 9000])
def test_rows_that_differ_by_a_constant_have_no_residual(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for constant in (-3.0, 1.0, 0.5, 7.0):
        # Eighths, whose sums with the constant are exact; the drafted token is impossible in both.
        draft = torch.randint(-16, 17, (1, 1, vocab), generator=generator) / 8
        draft[..., vocab - 1] = -math.inf
        target = (draft + constant).repeat(1, 2, 1)
        arguments = torch.tensor([[vocab - 1]]), target.to(dtype), draft.to(dtype)
        result = specker.verify(*arguments, uniforms=UNIFORMS)
        assert result.status.tolist() == [Status.RESIDUAL_EMPTY | Status.DRAFT_TOKEN_IMPOSSIBLE]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_tail_in_a_shard_far_below_the_peak_is_recovered(device: torch.device) -> None:
    target, draft = torch.full((1, 2, 9000), -math.inf), torch.full((1, 1, 9000), -math.inf)
    target[..., 0], target[..., 5000], target[..., 1] = 0.0, -115.0, -150.0
    draft[..., 0], draft[..., 1] = 0.0, -100.0
    result = specker.verify(torch.tensor([[1]]), target, draft, uniforms=UNIFORMS)
    assert result.token_ids.tolist() == [[5000, -1]]
    assert result.status.tolist() == [0]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("return_accept_probs", [False, True])
def test_an_impossible_draft_token_is_told_however_early_its_acceptance_is_proven(
    threads: int, return_accept_probs: bool, device: torch.device
) -> None:
    target, draft = torch.zeros(1, 2, 70_000), torch.zeros(1, 1, 70_000)
    # The draft token's probability underflows only against the end of its row.
    target[0, 0, 3], draft[0, 0, -4000:] = 8.0, 744.4
    uniforms = torch.tensor([[[1e-9, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = specker.verify(
            torch.tensor([[3]]), target, draft, uniforms=uniforms, return_accept_probs=return_accept_probs
        )
    finally:
        torch.set_num_threads(before)
    assert result.num_accepted.tolist() == [1]
    assert result.status.tolist() == [Status.DRAFT_TOKEN_IMPOSSIBLE]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("mask", [-170.0, -300.0, -355.0, -1e3, -5e3, -3e4, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_are_finite_have_no_residual(mask: float, dtype: torch.dtype, device: torch.device) -> None:
    # Powers of such differences leave float32, some of them by the sign.
    target, draft = torch.zeros(1, 2, 9000), torch.zeros(1, 1, 9000)
    target[..., 10:] = mask
    draft[..., 0], draft[..., 1:5], draft[..., 4000:] = 12.0, mask, mask
    uniforms = torch.tensor([[[0.99, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    for emission in torch.linspace(0.0, 1 - 2.0**-53, 9, dtype=torch.float64):
        uniforms[..., 1] = emission
        result = specker.verify(torch.tensor([[0]]), target.to(dtype), draft.to(dtype), uniforms=uniforms)
        assert result.num_accepted.tolist() == [0]
        # All that is drafted less than it is wanted: the nine other tokens, equally.
        assert result.token_ids.tolist() == [[1 + min(int(9 * emission), 8), -1]]


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("overwritten", [60.0, 130.0, 200.0, 355.0, 1e4, 1e30, 3e38])
def test_a_row_that_its_receipt_is_not_of_leaves_no_residual_where_it_holds_more(
    overwritten: float, device: torch.device
) -> None:
    vocab, drafted, larger = 9000, 3, 7
    target, drawn_from = torch.zeros(1, 2, vocab), torch.zeros(1, vocab)
    target[0, 0, drafted], drawn_from[0, drafted] = -2.0, 12.0
    sampled = specker.sample(drawn_from, seed=0)
    assert sampled.token_ids.tolist() == [drafted]
    draft = drawn_from.clone().unsqueeze(0)
    draft[..., larger] = overwritten
    # The uniform is that of the token in the residual which leaves out the drafted one alone.
    uniforms = torch.tensor([[[0.9999, (larger - 0.5) / (vocab - 1)], [0.5, 0.5]]], dtype=torch.float64)
    receipt = DraftReceipt.stack([sampled.receipt])
    result = specker.verify(torch.tensor([[drafted]]), target, draft, draft_receipt=receipt, uniforms=uniforms)
    assert result.num_accepted.tolist() == [0]
    assert result.token_ids[0, 0] in (larger - 1, larger + 1)


@pytest.mark.parametrize("powers", [170, 201])
def test_a_temperature_below_the_distance_of_two_floats(powers: int, device: torch.device) -> None:
    vocab, peak, drafted, second = 64, 16384.0, 0, 20
    target, draft = torch.full((1, 2, vocab), peak), torch.full((1, 1, vocab), peak - 1.0)
    target[..., drafted] -= 1.0
    draft[..., drafted], draft[..., second] = peak + 2.0**-9, peak
    # The draft's two largest logits are neighbours among float32, and so many powers of two apart.
    sampling = specker.Sampling(temperature=2.0**-9 / math.log(2) / powers)
    uniforms = torch.tensor([[[0.999, 0.5], [0.5, 0.5]]], dtype=torch.float64, device=device)
    arguments = torch.tensor([[drafted]]), target, draft
    result = specker.verify(
        *(argument.to(device) for argument in arguments), draft_sampling=sampling, uniforms=uniforms
    )
    # The residual is even over all but the drafted token.
    assert result.token_ids.tolist() == [[32, -1]]
