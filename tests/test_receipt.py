"""Receipts: the draft row need not be read again, and a receipt that belongs elsewhere is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specker
from specker import DraftReceipt, Sampling, Status

BATCH, GAMMA, VOCAB = 3, 2, 70


class Drafted:
    """Draft tokens with the rows they were drawn from, their receipts, and rows to verify them by."""

    def __init__(self, sampling: Sampling) -> None:
        generator = torch.Generator().manual_seed(5)
        self.target = torch.randn(BATCH, GAMMA + 1, VOCAB, generator=generator)
        self.rows = torch.randn(BATCH, GAMMA, VOCAB, generator=generator)
        self.steps = [
            specker.sample(self.rows[:, step], seed=3, position=step, **sampling._asdict()) for step in range(GAMMA)
        ]
        self.token_ids = torch.stack([step.token_ids for step in self.steps], dim=1)
        self.receipt = DraftReceipt.stack([step.receipt for step in self.steps])
        self.uniforms = torch.rand(BATCH, GAMMA + 1, 2, dtype=torch.float64, generator=generator)

    def verify(self, **keywords: Any) -> specker.VerifyResult:
        return specker.verify(self.token_ids, self.target, self.rows, uniforms=self.uniforms, **keywords)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6, top_k=9), Sampling(top_p=0.8, min_p=0.05), Sampling(temperature=0.0)],
    ids=["plain", "top-k", "top-p and min-p", "greedy draft"],
)
def test_a_receipt_decides_as_its_row_does(sampling: Sampling) -> None:
    drafted = Drafted(sampling)
    keywords: dict[str, Any] = {"draft_sampling": sampling, "return_accept_probs": True}
    with_receipt, without = drafted.verify(draft_receipt=drafted.receipt, **keywords), drafted.verify(**keywords)
    for got, wanted in zip(with_receipt[:4], without[:4], strict=True):
        assert got.tolist() == wanted.tolist()
    torch.testing.assert_close(with_receipt.accept_probs, without.accept_probs, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("on_backend")
def test_the_receipt_tells_what_the_row_tells() -> None:
    drafted = Drafted(Sampling(temperature=0.7))
    rows = drafted.rows.double()
    torch.testing.assert_close(drafted.receipt.log_sum_exp, (rows / 0.7).logsumexp(-1), rtol=1e-6, atol=1e-6)
    logits = rows.gather(-1, drafted.token_ids.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(drafted.receipt.token_logit, logits)
    assert float(drafted.receipt.threshold.max()) == -float("inf")


@pytest.mark.usefixtures("on_backend")
def test_receipts_of_sequences_in_another_order_are_flagged() -> None:
    drafted = Drafted(Sampling())
    shuffled = DraftReceipt(drafted.receipt.values[[1, 2, 0]], Sampling(), VOCAB, torch.float32)
    result = drafted.verify(draft_receipt=shuffled)
    assert result.num_accepted.tolist() == [0, 0, 0]
    assert result.status.tolist() == [Status.DRAFT_INVALID] * 3
    with pytest.raises(specker.InvalidInputError, match="its receipt belongs to another row or token"):
        result.raise_for_status()


@pytest.mark.usefixtures("on_backend")
def test_a_receipt_of_another_token_is_flagged() -> None:
    drafted = Drafted(Sampling())
    drafted.token_ids[1, 0] = (drafted.token_ids[1, 0] + 1) % VOCAB
    status = drafted.verify(draft_receipt=drafted.receipt).status.tolist()
    assert status == [0, Status.DRAFT_INVALID, 0]


REFUSED = {
    "other temperature": (Sampling(temperature=0.5), {}, r"made with temperature 1.0, got 0.5"),
    "other top-k": (Sampling(top_k=3), {}, r"made with top_k 0, got 3"),
    "other top-p": (Sampling(top_p=0.5), {}, r"made with top_p 1.0, got 0.5"),
    "other min-p": (Sampling(min_p=0.5), {}, r"made with min_p 0.0, got 0.5"),
    "other vocabulary": (Sampling(), {"vocab": 99}, r"one of vocabulary 70, got 99"),
    "other dtype": (Sampling(), {"dtype": torch.float16}, r"from torch.float32 rows, got torch.float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_receipt_that_contradicts_the_call_is_refused(name: str) -> None:
    made, changes, message = REFUSED[name]
    drafted = Drafted(Sampling())
    fields: dict[str, Any] = {"vocab": VOCAB, "dtype": torch.float32, **changes}
    with pytest.raises(ValueError, match=message):
        drafted.verify(draft_receipt=DraftReceipt(drafted.receipt.values, made, **fields))


def test_tensor_parameters_of_a_receipt_are_compared_by_value() -> None:
    temperature = torch.tensor([0.5, 1.0, 1.0])
    drafted = Drafted(Sampling(temperature=temperature))
    drafted.verify(temperature=temperature.clone(), draft_receipt=drafted.receipt)
    with pytest.raises(ValueError, match="draft_receipt: expected one made with temperature"):
        drafted.verify(temperature=temperature + 0.5, draft_receipt=drafted.receipt)


def test_numbers_beside_a_tensor_are_compared_as_numbers() -> None:
    temperature = torch.tensor([0.5, 1.0])
    receipt = specker.sample(torch.zeros(2, 4), temperature=temperature, top_p=0.9, seed=1).receipt
    # Tensors of them would be made on the default device, whose values may be out of reach.
    torch.set_default_device("meta")
    try:
        receipt.check(4, torch.float32, Sampling(temperature, top_p=float("0.9")), False)
        with pytest.raises(ValueError, match="expected one made with top_k 3, got 0"):
            receipt.check(4, torch.float32, Sampling(temperature, top_k=3, top_p=0.9), False)
    finally:
        torch.set_default_device(None)


def test_receipts_that_do_not_belong_together_do_not_stack() -> None:
    first = specker.sample(torch.zeros(2, 8), seed=0).receipt
    with pytest.raises(ValueError, match="receipts: expected at least one receipt, got none"):
        DraftReceipt.stack([])
    with pytest.raises(ValueError, match=r"receipts: expected equal shapes, got \(2, 4\) and \(3, 4\)"):
        DraftReceipt.stack([first, specker.sample(torch.zeros(3, 8), seed=0).receipt])
    with pytest.raises(ValueError, match="expected one of vocabulary 8, got 9"):
        DraftReceipt.stack([first, specker.sample(torch.zeros(2, 9), seed=0).receipt])
    with pytest.raises(TypeError, match=r"receipts: expected each a DraftReceipt, .* got SampleResult"):
        DraftReceipt.stack([specker.sample(torch.zeros(2, 8), seed=0)])  # type: ignore[list-item]


def test_a_receipt_without_draft_rows_is_refused() -> None:
    drafted = Drafted(Sampling())
    with pytest.raises(ValueError, match="draft_receipt: expected draft_logits with it, got None"):
        specker.verify(drafted.token_ids, drafted.target, draft_receipt=drafted.receipt, seed=0)


SAME = {
    "no top-k": (Sampling(top_k=0), Sampling(top_k=-1)),
    "a top-k of the whole vocabulary": (Sampling(top_k=VOCAB), Sampling()),
    "no top-p": (Sampling(top_p=1.0), Sampling(top_p=2.0)),
    "greedy": (Sampling(temperature=0.0), Sampling(temperature=1e-6)),
}


@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_say_the_same_do_not_contradict(name: str) -> None:
    made, given = SAME[name]
    drafted = Drafted(made)
    drafted.verify(draft_receipt=drafted.receipt, draft_sampling=given)


def test_the_log_sum_exp_of_a_greedy_row_is_its_maximum() -> None:
    for sampling in (Sampling(temperature=0.5, top_p=0.0), Sampling(temperature=0.0)):
        receipt = specker.sample(torch.tensor([[2.0, 1.0]]), **sampling._asdict(), seed=1).receipt
        assert receipt.log_sum_exp.tolist() == [2.0]
