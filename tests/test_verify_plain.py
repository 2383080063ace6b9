"""The commonest round has an operator of its own: it gives what `verify` gives, and takes nothing that is not right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specker
from specker import plain, rounds
from specker.sampling import Sampling

from . import random_calls
from .differential import NAMESPACES
from .random_calls import CallMaker

ARGUMENTS = (
    "draft_token_ids", "target", "draft", "draft_receipt", "temperature", "top_k", "top_p", "min_p", "seed", "position",
)  # fmt: skip
BATCH, GAMMA, VOCAB = 2, 3, 65


def plain_call(maker: CallMaker) -> dict[str, Any]:
    """Return a random call of `verify` that has nothing but what `verify_plain` takes."""
    while True:
        call = maker.verify_call()
        batch, rows = call["target"].shape[:2]
        flat, probs = call["cu_num_draft_tokens"] is not None, call["target_is_probs"] or call["draft_is_probs"]
        reduced = call["draft"] is not None and call["draft"].shape[-1] != call["target"].shape[-1]
        if not flat and not probs and not reduced and call["draft_index"] is None and batch and rows > 1:
            break
    kept = {name: call[name] for name in ARGUMENTS}
    if kept["seed"] is None:
        kept |= {"seed": maker.integers(-(2**40), 2**40, batch), "position": maker.integers(0, 99, 1)}
    numbers = {name: call[name] for name in call if name.startswith(("max_", "target_is", "draft_is", "return_"))}
    law = {f"draft_{name}": kept[name] for name in Sampling._fields}
    return {**dict.fromkeys(call), **numbers, **kept, **law, "return_logprobs": False, "return_accept_probs": False}


@pytest.mark.usefixtures("on_backend")
def test_verify_plain_gives_what_verify_gives(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_calls, "VOCABS", (2, 33) if backend == "triton" else (1, 63, 4097, 9000))
    maker = CallMaker(3)
    operators = getattr(torch.ops, NAMESPACES[backend])
    accepted = with_receipt = 0
    for _ in range(10 if backend == "triton" else 60):
        call = plain_call(maker)
        outputs = operators.verify_plain(**{name: call[name] for name in ARGUMENTS})
        expected = operators.verify(**call)[:4]
        assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))
        accepted += int(outputs[1].sum())
        with_receipt += call["draft_receipt"] is not None
    assert accepted > 0
    assert with_receipt > 0


@pytest.mark.usefixtures("on_backend")
def test_verify_plain_passes_opcheck(backend: str) -> None:
    maker = CallMaker(5)
    call = plain_call(maker)
    while call["draft"] is None or call["target"].shape[-1] > 100:
        call = plain_call(maker)
    operator = getattr(torch.ops, NAMESPACES[backend]).verify_plain.default
    torch.library.opcheck(operator, tuple(call[name] for name in ARGUMENTS))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, target and draft logits."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(BATCH, GAMMA + 1, VOCAB, generator=generator)
    draft = target[:, :GAMMA] + 0.5 * torch.randn(BATCH, GAMMA, VOCAB, generator=generator)
    return torch.randint(0, VOCAB, (BATCH, GAMMA), generator=generator), target.to(dtype), draft.to(dtype)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}, {"temperature": torch.tensor([0.0, 0.7])}],
    ids=["plain", "greedy", "filters", "a temperature a sequence"],
)
@pytest.mark.parametrize("draft", ["draft", "receipt", "none"])
def test_a_round_that_is_right_at_a_glance_gives_the_result_of_any_other(options: dict[str, Any], draft: str) -> None:
    token_ids, target, draft_logits = inputs()
    steps = [specker.sample(draft_logits[:, step], seed=4, position=step, **options) for step in range(GAMMA)]
    receipt = None
    if draft == "receipt":
        token_ids = torch.stack([step.token_ids for step in steps], dim=1)
        receipt = specker.DraftReceipt.stack([step.receipt for step in steps])
    rows = None if draft == "none" else draft_logits
    given = (token_ids, target, rows, receipt, Sampling(**options))
    result = plain.run_plain_round(*given, torch.tensor([7, 8]), 5)
    expected = rounds.run_round(
        token_ids, target, rows, None, None, None, Sampling(**options), None, receipt, None, rounds.Adjustments(),
        torch.tensor([7, 8]), 5, None, False, False, ("target_logits", "draft_logits"), False, False,
    )  # fmt: skip
    assert result is not None
    for got, wanted in zip(result, expected, strict=True):
        assert (got is None and wanted is None) or torch.equal(got, wanted)


class Subclass(torch.Tensor):
    """A tensor with behaviour of its own, as a trace or a library may bring it."""


NOT_PLAIN = {
    "a subclass": lambda ids, target, draft: (ids, target.as_subclass(Subclass), draft),
    "no tensor": lambda ids, target, draft: (ids.tolist(), target, draft),
    "ids of another length": lambda ids, target, draft: (ids[:, 1:], target, draft),
    "ids that are no integers": lambda ids, target, draft: (ids.float(), target, draft),
    "rows of doubles": lambda ids, target, draft: (ids, target.double(), draft),
    "draft rows of doubles": lambda ids, target, draft: (ids, target, draft.double()),
    "another draft vocabulary": lambda ids, target, draft: (ids, target, draft[..., 1:]),
    "a row too few": lambda ids, target, draft: (ids, target[:, 1:], draft),
    "columns with gaps": lambda ids, target, draft: (ids, target[..., ::2], draft[..., ::2]),
    "a matrix": lambda ids, target, draft: (ids, target[0], draft),
    "no sequence": lambda ids, target, draft: (ids[:0], target[:0], draft[:0]),
    "no draft token": lambda ids, target, draft: (ids[:, :0], target[:, :1], draft[:, :0]),
    "no vocabulary": lambda ids, target, draft: (ids, target[..., :0], draft[..., :0]),
    "another device": lambda ids, target, draft: (ids, target, draft.to("meta")),
    "ids on another device": lambda ids, target, draft: (ids.to("meta"), target, draft),
}


@pytest.mark.parametrize("change", NOT_PLAIN)
def test_what_is_not_right_at_a_glance_is_left_to_the_checks_by_name(change: str) -> None:
    assert plain.run_plain_round(*inputs(), None, Sampling(), 1, 0) is not None
    assert plain.run_plain_round(*NOT_PLAIN[change](*inputs()), None, Sampling(), 1, 0) is None


def test_a_receipt_without_draft_rows_is_left_to_the_checks_by_name() -> None:
    token_ids, target, draft = inputs()
    receipt = specker.DraftReceipt.stack([specker.sample(draft[:, 0], seed=1).receipt] * GAMMA)
    assert plain.run_plain_round(token_ids, target, None, receipt, Sampling(), 1, 0) is None
