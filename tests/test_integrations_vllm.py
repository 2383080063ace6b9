"""vLLM's two rejection samplers, as its runners call them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import specker
from specker import Status
from specker.integrations.vllm import batch as vllm_batch
from specker.integrations.vllm import rejection_sample

from . import laws
from .copies import large_results

VOCAB = 13
LENGTHS = {"equal": [3, 3, 3, 3], "ragged": [2, 0, 3, 1], "one": [4], "none": [0, 0]}


def metadata(
    temperature: list[float] | None = None, generators: dict[int, torch.Generator] | None = None
) -> SimpleNamespace:
    """Return the fields of vLLM's SamplingMetadata; no temperature is an all-greedy batch."""
    greedy = [value < 1e-5 for value in temperature or [0.0]]
    return SimpleNamespace(
        temperature=None if temperature is None else torch.tensor(temperature),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        generators=generators or {},
    )


def batch(lengths: list[int], has_draft: bool = True, vocab: int = VOCAB, seed: int = 0) -> dict[str, Any]:
    """Return the tensors of a batch, with draft tokens that are often kept."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    target_logits = torch.randn(total, vocab, generator=generator) * 2
    draft_probs = (target_logits + torch.randn(total, vocab, generator=generator)).softmax(-1)
    ids = torch.multinomial(draft_probs, 1, generator=generator) if total else torch.zeros(0, 1)
    return {
        "draft_token_ids": ids.squeeze(1).int(),
        "num_draft_tokens": lengths,
        "max_spec_len": max(lengths),
        "cu_num_draft_tokens": torch.tensor(lengths).cumsum(0).int(),
        "draft_probs": draft_probs if has_draft else None,
        "target_logits": target_logits,
        "bonus_token_ids": 100 + torch.arange(len(lengths)).unsqueeze(1),
    }


def generators(count: int, first: int = 50) -> dict[int, torch.Generator]:
    """Return one seeded generator a request."""
    return {request: torch.Generator().manual_seed(first + request) for request in range(count)}


def one_by_one(inputs: dict[str, Any], temperature: list[float], seeds: dict[int, torch.Generator]) -> list[list[int]]:
    """Return what `specker.verify` makes of each request alone, with vLLM's bonus token in place of its own."""
    outputs, start = [], 0
    for request, length in enumerate(inputs["num_draft_tokens"]):
        rows = slice(start, start + length)
        start += length
        tokens = [int(inputs["bonus_token_ids"][request])]
        if length:
            seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=seeds[request])
            target = inputs["target_logits"][rows]
            result = specker.verify(
                inputs["draft_token_ids"][rows].unsqueeze(0),
                torch.cat([target, target[:1]]).unsqueeze(0),
                draft_probs=None if inputs["draft_probs"] is None else inputs["draft_probs"][rows].unsqueeze(0),
                temperature=float(temperature[request] >= 1e-5),
                seed=seed,
            )
            kept = int(result.num_accepted)
            tokens = (
                result.token_ids[0, : kept + 1].tolist()
                if kept < length
                else [*result.token_ids[0, :kept].tolist(), *tokens]
            )
        outputs.append(tokens + [-1] * (inputs["max_spec_len"] + 1 - len(tokens)))
    return outputs


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


@pytest.fixture
def shared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests of equal length share rows however short those are."""
    monkeypatch.setattr(vllm_batch, "_WORTH_A_CALL", 0)


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
def test_requests_that_share_rows_agree_with_one_round_each(shared_rows: None, has_draft: bool) -> None:
    seen = set()
    for trial in range(30):
        lengths = [trial % 4 + 1] * (trial % 5 + 1)
        temperature = [float((trial + request) % 3) / 2 for request in range(len(lengths))]
        inputs = batch(lengths, has_draft, seed=trial)
        wanted = one_by_one(inputs, temperature, generators(len(lengths), trial))
        got = rejection_sample(**inputs, sampling_metadata=metadata(temperature, generators(len(lengths), trial)))
        assert got.tolist() == wanted
        seen |= {(len(row) - 1, sum(token >= 0 for token in row)) for row in wanted}
    assert seen >= {(3, 1), (3, 2), (3, 3), (3, 4)}


def test_the_row_that_stands_for_a_bonus_row_is_no_fault_of_the_request(shared_rows: None) -> None:
    """All drafts are kept; the row behind them is the next request's, and holds NaN."""
    inputs = batch([2, 2, 2], has_draft=False)
    inputs["target_logits"] = torch.eye(VOCAB)[:6] * 99
    inputs["draft_token_ids"] = torch.arange(6)
    inputs["target_logits"][2] = math.nan
    status = torch.zeros(3, dtype=torch.int32)
    token_ids = rejection_sample(**inputs, sampling_metadata=metadata([1.0] * 3), output_status=status)
    assert token_ids.tolist() == [[0, 1, 100], [-1, -1, -1], [4, 5, 102]]
    assert status.tolist() == [0, int(Status.TARGET_INVALID), 0]


def test_requests_that_share_rows_copy_none(shared_rows: None) -> None:
    inputs = batch([3, 3, 3, 3], vocab=5000)
    assert large_results(lambda: rejection_sample(**inputs, sampling_metadata=metadata([1.0] * 4)), 5000) == []


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
        ({"bonus_token_ids": torch.zeros(5).long()}, ValueError, r"bonus_token_ids: expected shape \(4\)"),
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
        ({"cu_num_draft_tokens": torch.zeros(5).int()}, ValueError, r"cu_num_draft_tokens: expected shape \(4\)"),
        ({"draft_token_ids": torch.zeros(6)}, TypeError, "draft_token_ids: expected dtype int64 or int32"),
        ({"draft_probs": torch.zeros(6, VOCAB + 1)}, ValueError, r"draft_probs: expected shape \(6, 13\)"),
        ({"target_logits": torch.zeros(6, VOCAB).double()}, TypeError, "target_logits: expected dtype float32"),
        ({"output_status": torch.zeros(4)}, TypeError, "output_status: expected dtype int32"),
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
