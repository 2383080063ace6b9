"""Values that are bad, or that nothing reads: what is refused, what a status bit says, and in which words."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

import specker
from specker import Sampling, Status
from specker.status import raise_for_bits

from . import cases
from .cases import interpreted

pytestmark = pytest.mark.usefixtures("on_backend")
NAN, INF = float("nan"), float("inf")
GAMMA = 2


# Values of tensors: the function, the arguments, the bit of sequence 1, the words of an exception on the CPU.
VALUES: list[tuple[str, dict[str, Any], Status, str]] = [
    *(
        (name, {parameter: torch.tensor([good, bad], dtype=dtype)}, bit, f"{parameter}: expected a {words}")
        for name in ("verify", "sample")
        for dtype in (torch.float32, torch.float64)
        for parameter, good, bad, bit, words in (
            ("temperature", 1.0, -1.0, Status.INVALID_TEMPERATURE, "finite value >= 0"),
            ("temperature", 1.0, NAN, Status.INVALID_TEMPERATURE, "finite value >= 0"),
            ("temperature", 1.0, INF, Status.INVALID_TEMPERATURE, "finite value >= 0"),
            ("top_p", 0.9, -0.1, Status.INVALID_TOP_P, "value >= 0"),
            ("top_p", 0.9, NAN, Status.INVALID_TOP_P, "value >= 0"),
            ("min_p", 0.1, -0.1, Status.INVALID_MIN_P, "value in [0, 1]"),
            ("min_p", 0.1, 1.5, Status.INVALID_MIN_P, "value in [0, 1]"),
            ("min_p", 0.1, NAN, Status.INVALID_MIN_P, "value in [0, 1]"),
        )
    ),
    (
        "verify", {"draft_sampling": Sampling(temperature=torch.tensor([1.0, NAN]))}, Status.INVALID_TEMPERATURE,
        "temperature: expected a finite value >= 0",
    ),
    *(
        ("verify", {"num_draft_tokens": torch.tensor([2, bad], dtype=dtype)}, Status.INVALID_NUM_DRAFT_TOKENS,
         "num_draft_tokens: expected a value in 0..gamma")
        for bad in (3, -1, 2**31 - 1)
        for dtype in (torch.int32, torch.int64)
    ),
    *(
        ("verify_flat", {"cu_num_draft_tokens": torch.tensor(bounds)}, Status.INVALID_NUM_DRAFT_TOKENS,
         "num_draft_tokens: expected a value in 0..gamma")
        for bounds in ([0, 2, 1], [0, 1, 4], [0, 2, 5])
    ),
    *(
        ("verify", {"draft_index": torch.tensor([1, bad])}, Status.INVALID_DRAFT_INDEX,
         "draft_index: expected a leading row of the draft tensor")
        for bad in (2, -1, 2**62)
    ),
    *(
        ("verify", {"uniforms": cases.uniforms([[(0.0, 0.5)] * 3, [(0.5, bad), (0.5, 0.5), (0.5, 0.5)]])},
         Status.INVALID_UNIFORMS, "uniforms: expected values in [0, 1)")
        for bad in (1.0, -1e-300, NAN, INF)
    ),
    (
        "verify_flat", {"uniforms": cases.uniforms([(0.5, 0.5)] * 5 + [(1.0, 0.5)])}, Status.INVALID_UNIFORMS,
        "uniforms: expected values in [0, 1)",
    ),
]  # fmt: skip


VALUE_IDS = [f"{case[0]}-{next(iter(case[1]))}-{at}" for at, case in enumerate(VALUES)]


@pytest.mark.parametrize("case", VALUES, ids=VALUE_IDS)
def test_a_bad_value_raises_on_a_cpu_and_sets_a_bit_on_a_device(
    case: tuple[str, dict[str, Any], Status, str], backend: str, device: torch.device
) -> None:
    if interpreted(backend):
        pytest.skip("raised by Python from the bits that the next test reads")
    name, changed, bit, words = case
    if device.type == "cpu":
        message = f"invalid input in sequence 1: {words}"
        with pytest.raises(specker.InvalidInputError, match=f"^{re.escape(message)}$"):
            cases.good_call(name, device, **changed)
        return
    result = cases.good_call(name, device, **changed)
    assert result.status.tolist() == [0, bit]
    assert result.token_ids.tolist()[1] in (-1, [-1] * (GAMMA + 1))


@pytest.mark.parametrize("case", VALUES, ids=VALUE_IDS)
def test_an_operator_emits_nothing_for_a_sequence_with_a_bad_value(
    case: tuple[str, dict[str, Any], Status, str], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interpreted(backend) and case is not next(other for other in VALUES if other[::2] == case[::2]):
        pytest.skip("one value of each kind is enough for the interpreter")
    # What a device tensor gives: the bits are read off instead of raised.
    for module in ("rounds", "plain", "sample"):
        monkeypatch.setattr(sys.modules[f"specker.{module}"], "raise_for_bits", lambda status, bits: None)
    name, changed, bit, _ = case
    result = cases.good_call(name, device, **changed)
    assert result.status.tolist() == [0, bit]
    if name == "sample":
        assert result.token_ids.tolist()[1] == -1
    else:
        assert result.token_ids.tolist()[1] == [-1] * (GAMMA + 1)
        assert result.num_accepted.tolist()[1] == result.num_emitted.tolist()[1] == 0
        assert result.num_emitted.tolist()[0] >= 1


def test_no_slot_at_all_is_no_point_mass(device: torch.device) -> None:
    arguments = {"draft_logits": torch.zeros(0, 2, 5), "draft_index": torch.tensor([0, 0])}
    with pytest.raises(ValueError, match=r"draft_index: expected a leading row of the draft tensor"):
        cases.good_call("verify", device, **arguments)


def test_uniforms_behind_the_length_may_be_anything(device: torch.device) -> None:
    uniforms = cases.uniforms([[(0.5, 0.5)] * 3] * 2)
    uniforms[1, 2] = NAN
    lengths = torch.tensor([2, 1])
    assert cases.good_call("verify", device, uniforms=uniforms, num_draft_tokens=lengths).status.tolist() == [0, 0]


@pytest.mark.parametrize("bad", [NAN, INF], ids=str)
@pytest.mark.parametrize("form", ["logits", "probs", "flat"])
def test_rows_that_decide_nothing_may_hold_anything(bad: float, form: str, device: torch.device) -> None:
    # Sequence 0 is rejected at 0, sequence 1 has no draft: rows 1 and 2 of both decide nothing.
    target, draft = torch.full((2, 3, 4), bad), torch.full((2, 2, 4), bad)
    target[:, 0] = torch.tensor([0.0, 0.9, 0.1, 0.0]) if form == "probs" else torch.tensor([-INF, 3.0, 0.0, -INF])
    draft[0, 0] = torch.tensor([0.5, 0.5, 0.0, 0.0]) if form == "probs" else torch.tensor([2.0, 0.0, -INF, -INF])
    uniforms = cases.uniforms([[(0.9, 0.1)] * 3] * 2)
    if form == "flat":
        rows = torch.cat([target[0], target[1, :1]])
        result = cases.good_call(
            "verify_flat", device, draft_token_ids=torch.tensor([0, 1]), target_logits=rows, draft_logits=draft[0],
            cu_num_draft_tokens=torch.tensor([0, 2, 2]), uniforms=cases.uniforms([(0.9, 0.1)] * 4),
        )  # fmt: skip
    else:
        name = {"logits": "verify", "probs": "verify_from_probs"}[form]
        result = cases.good_call(
            name, device, draft_token_ids=torch.tensor([[0, 1], [0, 1]]), num_draft_tokens=torch.tensor([2, 0]),
            uniforms=uniforms, **{f"target_{form}": target, f"draft_{form}": draft},
        )  # fmt: skip
    assert result.token_ids.tolist() == [[1, -1, -1], [1, -1, -1]]
    assert result.status.tolist() == [0, 0]


def test_the_draft_row_of_a_greedy_sequence_may_hold_anything(device: torch.device) -> None:
    target, draft = torch.zeros(2, 3, 4), torch.full((2, 2, 4), NAN)
    target[..., 1] = 5.0
    tokens = torch.tensor([[1, 1], [1, 2]])
    result = cases.good_call(
        "verify", device, draft_token_ids=tokens, target_logits=target, draft_logits=draft, temperature=0.0
    )
    assert result.token_ids.tolist() == [[1, 1, 1], [1, 1, -1]]
    assert result.status.tolist() == [0, 0]
    result = cases.good_call(
        "verify", device, draft_token_ids=tokens, target_logits=target, draft_logits=draft, top_p=0.0
    )
    assert result.status.tolist() == [0, 0]


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_a_bad_target_row_emits_what_was_accepted_before_it(row: int, bad: float, device: torch.device) -> None:
    target = torch.zeros(2, 3, 4)
    target[..., 1] = 60.0
    target[0, row, 0 if bad != -INF else slice(None)] = bad
    result = cases.good_call("verify", device, target_logits=target, draft_logits=None, seed=0)
    assert result.token_ids.tolist() == [[1] * row + [-1] * (3 - row), [1, 1, 1]]
    assert result.num_accepted.tolist() == [row, 2]
    assert result.num_emitted.tolist() == [row, 3]
    assert result.status.tolist() == [Status.TARGET_INVALID, 0]


def test_a_token_impossible_under_its_draft_is_told_and_decided_by_the_test(device: torch.device) -> None:
    target = cases.log([[[0.4, 0.6]] * 2, [[0.0, 1.0]] * 2])
    result = cases.good_call(
        "verify", device, draft_token_ids=torch.tensor([[0], [0]]), target_logits=target,
        draft_logits=cases.log([[[0.0, 1.0]]] * 2), uniforms=cases.uniforms([[(0.99, 0.9)] * 2] * 2),
    )  # fmt: skip
    assert result.token_ids.tolist() == [[0, 1], [1, -1]]
    impossible = Status.DRAFT_TOKEN_IMPOSSIBLE
    assert result.status.tolist() == [impossible, impossible | Status.RESIDUAL_EMPTY]
    with pytest.raises(specker.InvalidInputError, match="sequence 0: a draft token has probability 0 under its draft"):
        result.raise_for_status()


@pytest.mark.parametrize("seeds", [None, 0])
def test_sample_marks_bad_rows_and_leaves_the_others(seeds: int | None, device: torch.device) -> None:
    logits = torch.zeros(3, 4)
    logits[:, 2] = 90.0
    logits[1, 3] = NAN
    result = cases.good_call("sample", device, logits=logits, seed=seeds)
    assert result.token_ids.tolist() == [2, -1, 2]
    assert result.status.tolist() == [0, Status.TARGET_INVALID, 0]


WORDS = [
    (Status.TARGET_INVALID, "a target row holds NaN, +inf, no finite entry or a negative probability"),
    (
        Status.DRAFT_INVALID,
        (
            "a draft row holds NaN, +inf, no finite entry or a negative probability, "
            "or its receipt belongs to another row or token"
        ),
    ),
    (Status.DRAFT_TOKEN_OUT_OF_RANGE, "a draft token is outside 0..vocab-1"),
    (Status.DRAFT_TOKEN_IMPOSSIBLE, "a draft token has probability 0 under its draft distribution"),
    (Status.RESIDUAL_EMPTY, "the residual max(target - draft, 0) has no mass"),
    (Status.INVALID_TEMPERATURE, "temperature: expected a finite value >= 0"),
    (Status.INVALID_TOP_P, "top_p: expected a value >= 0"),
    (Status.INVALID_MIN_P, "min_p: expected a value in [0, 1]"),
    (Status.INVALID_NUM_DRAFT_TOKENS, "num_draft_tokens: expected a value in 0..gamma"),
    (Status.INVALID_UNIFORMS, "uniforms: expected values in [0, 1)"),
    (Status.INVALID_DRAFT_INDEX, "draft_index: expected a leading row of the draft tensor"),
]


@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize(("bit", "words"), WORDS)
def test_every_bit_has_its_words(bit: Status, words: str) -> None:
    with pytest.raises(specker.InvalidInputError, match=f"^{re.escape(f'invalid input in sequence 1: {words}')}$"):
        raise_for_bits(torch.tensor([0, bit, Status.DRAFT_TOKEN_PLACEHOLDER], dtype=torch.int32))


@pytest.mark.parametrize("backend", ["reference"])
def test_at_most_eight_sequences_are_named() -> None:
    both = Status.TARGET_INVALID | Status.DRAFT_INVALID
    lines = [f"sequence {row}: {WORDS[0][1]}; {WORDS[1][1]}" for row in range(8)]
    message = "invalid input in " + "\n".join([*lines, "and 4 more sequences"])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        raise_for_bits(torch.full((12,), both, dtype=torch.int32))


def test_placeholders_are_no_error(device: torch.device) -> None:
    result = cases.good_call("verify", device, draft_token_ids=torch.full((2, 2), -1))
    assert result.status.tolist() == [Status.DRAFT_TOKEN_PLACEHOLDER] * 2
    result.raise_for_status()
    assert issubclass(specker.InvalidInputError, ValueError)
