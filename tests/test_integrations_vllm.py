"""vLLM's first rejection sampler, as its runner calls it: decisions, random numbers, law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import specker
from specker import Status
from specker.integrations.vllm import rejection_sample

from . import laws
from .vllm_batches import LENGTHS, VOCAB, batch, generators, metadata, one_by_one


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
@pytest.mark.parametrize("layout", LENGTHS)
def test_each_request_is_one_round_of_verify(on_backend: str, layout: str, has_draft: bool) -> None:
    lengths = LENGTHS[layout]
    temperature = [0.0, 0.7, 1.0, 1e-6][: len(lengths)]
    inputs = batch(lengths, has_draft)
    wanted = one_by_one(inputs, temperature, generators(len(lengths)))
    got = rejection_sample(**inputs, sampling_metadata=metadata(temperature, generators(len(lengths))))
    assert got.dtype == torch.int32
    assert got.tolist() == wanted


@pytest.mark.parametrize("layout", ["equal", "ragged"])
def test_many_batches_agree_with_one_round_each(layout: str) -> None:
    """Among them are rejections at every position and bonus tokens."""
    seen = set()
    for trial in range(40):
        lengths = LENGTHS[layout] if layout == "equal" else [(trial * 7 + request * 5) % 4 for request in range(6)]
        temperature = [float((trial + request) % 3) / 2 for request in range(len(lengths))]
        inputs = batch(lengths, seed=trial)
        wanted = one_by_one(inputs, temperature, generators(len(lengths), trial))
        got = rejection_sample(**inputs, sampling_metadata=metadata(temperature, generators(len(lengths), trial)))
        assert got.tolist() == wanted
        seen |= {(length, sum(token >= 0 for token in row)) for length, row in zip(lengths, wanted, strict=True)}
    assert seen >= {(3, 1), (3, 2), (3, 3), (3, 4)}


def test_greedy_requests_take_the_arg_max() -> None:
    inputs = batch([2, 1, 2])
    logits = torch.full((5, 4), -1.0)
    logits[torch.arange(5), torch.tensor([1, 2, 3, 0, 1])] = 5.0
    inputs["target_logits"], inputs["draft_probs"] = logits, None
    inputs["draft_token_ids"] = torch.tensor([1, 2, 0, 0, 3])
    wanted = [[1, 2, 100], [3, -1, -1], [0, 1, -1]]
    assert rejection_sample(**inputs, sampling_metadata=metadata()).tolist() == wanted


def test_greedy_requests_read_no_draft_row_and_no_random_number() -> None:
    inputs = batch([2, 2])
    inputs["draft_probs"][:2] = math.nan
    status = torch.zeros(2, dtype=torch.int32)
    outputs = [
        rejection_sample(**inputs, sampling_metadata=metadata([0.0, 1.0]), output_status=status)[0].tolist()
        for _ in range(20)
    ]
    assert status.tolist() == [0, 0]
    assert outputs == [outputs[0]] * 20


def test_a_request_does_not_depend_on_its_place() -> None:
    lengths, order = [2, 0, 3, 1], [3, 2, 1, 0]
    starts = np.cumsum([0, *lengths])
    inputs = batch(lengths)
    rows = torch.cat([torch.arange(starts[request], starts[request + 1]) for request in order])
    moved = {
        **inputs,
        **{name: inputs[name][rows] for name in ("draft_token_ids", "draft_probs", "target_logits")},
        "num_draft_tokens": [lengths[request] for request in order],
        "cu_num_draft_tokens": torch.tensor([lengths[request] for request in order]).cumsum(0),
        "bonus_token_ids": inputs["bonus_token_ids"][order],
    }
    seeds = generators(4)
    plain = rejection_sample(**inputs, sampling_metadata=metadata([1.0] * 4, generators(4)))
    permuted = rejection_sample(
        **moved, sampling_metadata=metadata([1.0] * 4, {place: seeds[request] for place, request in enumerate(order)})
    )
    assert permuted.tolist() == plain[order].tolist()


def test_seeded_requests_repeat_among_unseeded_ones() -> None:
    inputs = batch([3, 3, 3], seed=4)
    outputs = [
        rejection_sample(
            **inputs, sampling_metadata=metadata([1.0] * 3, {1: torch.Generator().manual_seed(7)})
        ).tolist()
        for _ in range(30)
    ]
    assert len({tuple(output[1]) for output in outputs}) == 1
    assert len({tuple(output[0]) for output in outputs}) > 1
    assert len({tuple(output[2]) for output in outputs}) > 1


def test_a_generator_gives_one_seed_a_round_and_none_without_drafts() -> None:
    taken, untouched, replayed = (torch.Generator().manual_seed(3) for _ in range(3))
    rejection_sample(**batch([3, 0]), sampling_metadata=metadata([1.0] * 2, {0: taken, 1: untouched}))
    torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=replayed)
    assert torch.equal(taken.get_state(), replayed.get_state())
    assert torch.equal(untouched.get_state(), torch.Generator().manual_seed(3).get_state())


@pytest.mark.law
@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
def test_the_joint_law_is_exact(has_draft: bool) -> None:
    target = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.0, 0.0, 1.0]])
    draft = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]) if has_draft else np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    count = 40_000
    generator = torch.Generator().manual_seed(2)
    drafts = torch.stack(
        [torch.multinomial(torch.tensor(row), count, True, generator=generator) for row in draft], dim=1
    )
    torch.manual_seed(5)
    token_ids = rejection_sample(
        drafts.reshape(-1),
        [2] * count,
        2,
        torch.arange(2, 2 * count + 1, 2),
        torch.tensor(draft, dtype=torch.float32).repeat(count, 1) if has_draft else None,
        torch.tensor(target[:2]).log().float().repeat(count, 1),
        torch.full((count, 1), 2),
        metadata([1.0] * count),
    ).long()
    emitted = token_ids.ge(0).sum(1)
    result = specker.VerifyResult(token_ids, emitted - 1, emitted, torch.zeros_like(emitted), torch.zeros_like(emitted))
    assert laws.p_value(laws.outcome_counts(result), laws.joint_law(target, draft, 2)) > 1e-6


def test_placeholders_are_rejected_and_drawn_from_the_target() -> None:
    inputs = batch([3, 1])
    inputs["draft_token_ids"][:2] = torch.tensor([3, -1])
    inputs["target_logits"][0] = torch.eye(VOCAB)[3].log()
    inputs["target_logits"][1, 5:] = -math.inf
    status = torch.zeros(2, dtype=torch.int32)
    for temperature in (None, [1.0, 1.0]):
        token_ids = rejection_sample(**inputs, sampling_metadata=metadata(temperature), output_status=status)
        assert 0 <= int(token_ids[0, 1]) < 5
        assert token_ids[0, 2:].tolist() == [-1, -1]
    assert status.tolist() == [int(Status.DRAFT_TOKEN_PLACEHOLDER), 0]


def test_token_zero_is_a_draft_like_any_other() -> None:
    """Lengths decide what was drafted, not the ids."""
    inputs = batch([1, 1])
    inputs["draft_token_ids"] = torch.zeros(2, dtype=torch.int32)
    inputs["target_logits"] = torch.eye(2) * 9
    inputs["draft_probs"] = None
    inputs["bonus_token_ids"] = torch.zeros(2, 1, dtype=torch.int64)
    assert rejection_sample(**inputs, sampling_metadata=metadata()).tolist() == [[0, 0], [1, -1]]


@pytest.mark.parametrize("lengths", [[3, 3], [1, 2], [0, 0]])
def test_the_width_is_that_of_the_longest_request_allowed(lengths: list[int]) -> None:
    """It depends on no request of the batch and on no token."""
    inputs = {**batch(lengths), "max_spec_len": 5}
    for temperature in (None, [1.0, 1.0], [0.0, 1.0]):
        seeds = generators(2)
        got = rejection_sample(**inputs, sampling_metadata=metadata(temperature, seeds))
        assert got.shape == (2, 6)
        assert got.tolist() == one_by_one(inputs, temperature or [0.0, 0.0], generators(2))
