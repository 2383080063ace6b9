"""Receipts that belong to other rows, and backends that cannot serve: refused in words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import specker
from specker import DraftReceipt

from . import cases

pytestmark = pytest.mark.usefixtures("on_backend")


def test_stacking_receipts_refuses_what_does_not_belong_together(device: torch.device) -> None:
    def drawn(batch: int = 2, vocab: int = 5, dtype: torch.dtype = torch.float32, **sampling: Any) -> DraftReceipt:
        return specker.sample(torch.zeros((batch, vocab), dtype=dtype, device=device), seed=0, **sampling).receipt

    for receipts, message in (
        ([], "receipts: expected at least one receipt, got none"),
        ([drawn(), drawn(batch=3)], "receipts: expected equal shapes, got (2, 4) and (3, 4)"),
        ([drawn(), drawn(vocab=6)], "draft_receipt: expected one of vocabulary 5, got 6"),
        (
            [drawn(), drawn(dtype=torch.float16)],
            "draft_receipt: expected one made from torch.float32 rows, got torch.float16",
        ),
        ([drawn(), drawn(temperature=0.5)], "draft_receipt: expected one made with temperature 1.0, got 0.5"),
        ([drawn(), drawn(top_p=0.5)], "draft_receipt: expected one made with top_p 1.0, got 0.5"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            DraftReceipt.stack(receipts)


def test_parameters_of_a_receipt_that_differ_by_a_tensor_s_value_are_refused_on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("values on a device are not waited for")
    made = specker.sample(torch.zeros(2, 5), seed=0, temperature=torch.tensor([0.5, 0.6])).receipt
    stacked = DraftReceipt.stack([made, made])
    cases.good_call("verify", device, draft_receipt=stacked, temperature=torch.tensor([0.5, 0.6]))
    with pytest.raises(ValueError, match=r"^draft_receipt: expected one made with temperature tensor"):
        cases.good_call("verify", device, draft_receipt=stacked, temperature=torch.tensor([0.5, 0.7]))


def test_a_receipt_made_with_parameters_of_another_batch_is_refused(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("values on a device are not waited for")
    made = specker.sample(torch.zeros(3, 5), seed=0, temperature=torch.tensor([0.5, 0.6, 0.7])).receipt
    stacked = DraftReceipt.stack([made, made])
    with pytest.raises(ValueError, match=r"^draft_receipt: expected "):
        cases.good_call("verify", device, draft_receipt=stacked, temperature=torch.tensor([0.5, 0.6]))


@pytest.mark.parametrize("wrong", [0.7, {"temperature": 0.7}], ids=["number", "dict"])
def test_draft_sampling_of_another_kind_is_refused(wrong: Any, device: torch.device) -> None:
    with pytest.raises(TypeError, match=rf"^draft_sampling: expected a Sampling, got {type(wrong).__name__}$"):
        cases.good_call("verify", device, draft_sampling=wrong)


@pytest.mark.parametrize("backend", ["reference"])
def test_an_unknown_backend_is_refused() -> None:
    message = "backend: expected one of ['cpp', 'reference', 'triton'], got 'cuda'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"), specker.backend("cuda"):
        pass


@pytest.mark.parametrize("backend", ["cpp"])
def test_the_cpp_backend_refuses_tensors_elsewhere() -> None:
    target = torch.zeros(2, 3, 5).to("meta")
    with pytest.raises(
        specker.BackendUnavailableError, match=r"^backend 'cpp' serves CPU tensors, got tensors on meta$"
    ):
        specker.verify(torch.zeros(2, 2, dtype=torch.int64).to("meta"), target)


def test_the_operator_refuses_a_call_without_any_random_numbers(device: torch.device) -> None:
    ids, target, ones = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 3, 5), torch.ones(1)
    absent = (None, None, None)
    with pytest.raises(ValueError, match=r"^seed and position: expected tensors where uniforms is None, got None$"):
        torch.ops.specker_reference.verify(
            ids.to(device), target.to(device), None, None, None, None, None, ones.to(device), *absent, ones.to(device),
            *absent, *[None] * 13, 2, False, False, False, False,
        )  # fmt: skip


def test_an_int_beyond_every_float_is_no_temperature(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^temperature: expected a value finite and >= 0, got 1000"):
        cases.good_call("verify", device, temperature=10**400)
