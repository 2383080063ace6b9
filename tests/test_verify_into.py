"""The operator `verify_into` on every backend against its meaning in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specker
from specker import Status, delivery, random

from . import random_calls
from .cases import interpreted
from .differential import NAMESPACES
from .engine_calls import FORMS, WRITTEN, engine_call
from .random_calls import CallMaker

pytestmark = pytest.mark.usefixtures("on_backend")


def run(backend: str, call: dict[str, Any]) -> dict[str, Any]:
    """Return the status and what was written, by name; the call keeps its tensors as they were."""
    # A clone has the strides of a tensor without gaps.
    outputs = {name: None if call[name] is None else call[name].clone() for name in WRITTEN}
    status = getattr(torch.ops, NAMESPACES[backend]).verify_into(**{**call, **outputs})
    return {name: value.tolist() for name, value in {**outputs, "status": status}.items() if value is not None}


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("form", FORMS)
def test_random_calls_agree_with_the_reference(form: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_calls, "VOCABS", (2, 5, 33) if backend == "triton" else (2, 5, 63, 1000))
    maker = CallMaker(FORMS.index(form))
    emitted = 0
    for _ in range(12 if backend == "triton" else 150):
        call = engine_call(maker, form)
        wanted = run("reference", call)
        assert run(backend, call) == wanted
        emitted += sum(status & int(~Status.RESIDUAL_EMPTY) == 0 for status in wanted["status"])
    assert emitted > (8 if backend == "triton" else 150)


@pytest.mark.parametrize("form", FORMS)
def test_verify_into_passes_opcheck(form: str, backend: str) -> None:
    maker = CallMaker(5)
    call = engine_call(maker, form)
    while call["draft"] is None or call["target"].shape[-1] > 100 or call["status_total"] is None:
        call = engine_call(maker, form)
    torch.library.opcheck(getattr(torch.ops, NAMESPACES[backend]).verify_into.default, tuple(call.values()))


def certain_round(**changes: Any) -> dict[str, Any]:
    """Return two sequences of two drafts: the first keeps both, the second rejects one and would keep the other."""
    rows = torch.tensor([[[0.0, 1.0, 0.0]] * 3, [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    call = dict.fromkeys(engine_call(CallMaker(0)))
    return call | {
        "draft_token_ids": torch.ones(2, 2, dtype=torch.int64), "target": rows, "seed": torch.tensor([3, 4]),
        "position": torch.zeros(1, dtype=torch.int64), "max_num_draft_tokens": 2, "target_is_probs": True,
        "draft_is_probs": True, "padding": -1, "output_token_ids": torch.zeros(2, 3, dtype=torch.int32), **changes,
    }  # fmt: skip


def test_counts_are_added_and_status_is_or_ed(backend: str) -> None:
    call = certain_round(
        passed_total=torch.tensor([10, 20]), accepted_total=torch.tensor([1, 2], dtype=torch.int32),
        emitted_total=torch.tensor([5, 5]), status_total=torch.tensor([1024, 4], dtype=torch.int32),
    )  # fmt: skip
    call["draft_token_ids"][1, 0] = -1
    assert run(backend, call) == {
        "output_token_ids": [[1, 1, 1], [2, -1, -1]], "passed_total": [12, 21], "accepted_total": [3, 2],
        "emitted_total": [8, 6], "status_total": [1024, 4], "status": [0, 4],
    }  # fmt: skip


def test_tokens_pass_under_the_random_numbers_of_the_round(backend: str) -> None:
    """Each has probability 1/2 under its row, in which nothing else decides."""
    seeds = torch.arange(40)
    rows = torch.tensor([0.0, 0.5, 0.5]).expand(40, 3, 3)
    call = certain_round(
        draft_token_ids=torch.ones(40, 2, dtype=torch.int64), target=rows, seed=seeds,
        output_token_ids=torch.zeros(40, 3, dtype=torch.int64), passed_total=torch.zeros(40, dtype=torch.int64),
    )  # fmt: skip
    drawn = random.uniforms(seeds.unsqueeze(1), torch.arange(2), random.VERIFY_PURPOSE)[0]
    assert run(backend, call)["passed_total"] == (drawn < 0.5).sum(1).tolist()


def test_a_bonus_token_stands_where_one_was_missed(backend: str) -> None:
    """Neither where a draft was rejected nor where a target row or an argument is invalid."""
    rows = torch.tensor([[0.0, 1.0]] * 4)
    rows[2, 0] = float("nan")
    call = certain_round(
        draft_token_ids=torch.tensor([1, 0, 1, 1]), target=rows.log(), target_is_probs=False,
        cu_num_draft_tokens=torch.tensor([0, 1, 2, 3, 4, 4]), seed=torch.arange(5),
        temperature=torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0]), bonus_token_ids=torch.arange(70, 75),
        output_token_ids=torch.zeros(5, 3, dtype=torch.int64),
    )  # fmt: skip
    told = run(backend, call)
    assert told["output_token_ids"] == [[1, 70, -1], [1, -1, -1], [-1, -1, -1], [-1, -1, -1], [74, -1, -1]]
    assert told["status"] == [0, 0, Status.TARGET_INVALID, Status.INVALID_TEMPERATURE, 0]


def test_places_outside_the_output_are_left_out(backend: str) -> None:
    call = certain_round(
        output_token_ids=torch.full((4,), 9), places=torch.tensor([[2, 4, -1], [0, 1, 3]]), padding=0,
        output_places=torch.full((2, 4), 55, dtype=torch.int32),
    )  # fmt: skip
    told = run(backend, call)
    assert told["output_token_ids"] == [2, 0, 1, 0]
    assert told["output_places"] == [[2, 4, -1, -1], [0, -1, -1, -1]]


def test_counting_passes_needs_the_random_numbers(backend: str) -> None:
    call = certain_round(
        passed_total=torch.zeros(2, dtype=torch.int64), seed=None, position=None,
        accept_uniforms=torch.zeros(2, 2), emission_uniforms=torch.zeros(2),
    )  # fmt: skip
    with pytest.raises((ValueError, RuntimeError), match="passed_total: expected seed and position with it"):
        run(backend, call)


def test_slots_hold_temperatures(backend: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match="slots: expected temperature with it"):
        run(backend, certain_round(slots=torch.arange(2)))


def test_rounding_takes_back_no_token_that_was_kept(backend: str) -> None:
    """Accept probabilities next to their uniforms, on either side of which float32 may put them."""
    count = 20 if interpreted(backend) else 2000
    seeds = torch.arange(count)
    drawn = random.uniforms(seeds, 0, random.VERIFY_PURPOSE)[0]
    odds = (drawn / (1 - drawn)).float()
    rows = torch.stack((odds, torch.ones(count)), dim=1).unsqueeze(1).expand(-1, 2, -1)
    call = certain_round(
        draft_token_ids=torch.zeros(count, 1, dtype=torch.int64), target=rows, seed=seeds, max_num_draft_tokens=1,
        output_token_ids=torch.zeros(count, 2, dtype=torch.int64), passed_total=torch.zeros(count, dtype=torch.int64),
        accepted_total=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip
    told = run(backend, call)
    chances = specker.verify_from_probs(
        call["draft_token_ids"], rows, seed=seeds, return_accept_probs=True
    ).accept_probs
    assert chances is not None
    kept = torch.tensor(told["accepted_total"])
    assert bool((kept > (drawn < chances[:, 0])).any())
    assert bool((kept <= torch.tensor(told["passed_total"])).all())


def test_links_tell_the_length_of_a_chain(backend: str) -> None:
    """Full, cut short, siblings behind the end; then a slot left out, no end, two children, and no root to follow."""
    children = [[1, 2, -1], [-1, 2, 9], [1, -1, 0], [2, -1, -1], [1, 2, 3], [1, -1, -1], [0, -1, -1]]
    siblings = [[-1, -1, -1], [-1, 5, 5], [-1, -1, 1], [-1, -1, -1], [-1, -1, -1], [-1, 2, -1], [-1, -1, -1]]
    count = len(children)
    call = certain_round(
        draft_token_ids=torch.ones(count, 2, dtype=torch.int64), target=torch.tensor([0.0, 1.0]).expand(count, 3, 2),
        seed=torch.arange(count), output_token_ids=torch.zeros(count, 3, dtype=torch.int64),
        next_tokens=torch.tensor(children), next_siblings=torch.tensor(siblings, dtype=torch.int32),
    )  # fmt: skip
    told = run(backend, call)
    nothing = [-1, -1, -1]
    assert told["output_token_ids"] == [[1, 1, 1], [1, -1, -1], [1, 1, -1], nothing, nothing, nothing, nothing]
    assert told["status"] == [0, 0, 0] + [int(Status.INVALID_NUM_DRAFT_TOKENS)] * 4


def test_chains_need_a_link() -> None:
    with pytest.raises(ValueError, match="next_tokens, next_siblings: expected at least one of them"):
        delivery.chain_lengths(None, None)
