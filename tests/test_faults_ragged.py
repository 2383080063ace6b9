"""Faults seen in other systems: ragged batches, shapes, placeholders and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specker
from specker import Status

from . import cases
from .cases import Round, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
AT_0, AT_1, AT_2 = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]
HALVES = (0.5, 0.5)

ROUNDS = [
    fault_case("B75", Round([0, 1, 2, 0], [AT_0, AT_2, AT_2, AT_0, AT_1], None, [HALVES] * 5, [0, 2])),
    fault_case(
        "B75",
        Round([0, 1, 2, 0], [AT_0, AT_2, AT_2, AT_0, AT_1], None, [HALVES] * 5, [0, 2], sampling={"temperature": 0.0}),
        "greedy",
    ),
    fault_case("B77", Round([1], [AT_1, AT_0], None, [HALVES] * 2, [1, 0])),
    fault_case("B77", Round([1], [AT_1, AT_0], [AT_1], [HALVES] * 2, [1, 0]), "with draft rows"),
    fault_case(
        "B78",
        Round([1, -1, 2], [AT_1, AT_2, AT_2, AT_0], None, [HALVES] * 4, [1, 2], Status.DRAFT_TOKEN_PLACEHOLDER),
        "-1",
    ),
    fault_case(
        "B78",
        Round([1, -1, 2], [AT_1, AT_2, AT_2, AT_0], [AT_1, AT_2, AT_2], [(0.0, 0.5)] * 4, [1, 2], Status(4)),
        "-1 with draft rows",
    ),
    *(
        fault_case(
            "B78",
            Round(
                [1, token, 2], [AT_1, AT_2, AT_2, AT_0], None, [(0.0, 0.5)] * 4, [1, 2], Status.DRAFT_TOKEN_OUT_OF_RANGE
            ),
            str(token),
        )
        for token in (3, 4, -2, 2**31, -(2**63), 2**63 - 1)
    ),
    fault_case(
        "B78",
        Round([-1], [AT_2, AT_0], None, [HALVES] * 2, [2], Status.DRAFT_TOKEN_PLACEHOLDER, {"temperature": 0.0}),
        "-1 greedy",
    ),
    fault_case("B78", Round([0, -1], [AT_2, AT_2, AT_0], None, [HALVES] * 3, [2]), "-1 behind the rejection"),
    fault_case("B81", Round([0], [[0.0, 0.4, 0.6], AT_0], [[0.9, 0.05, 0.05]], [(0.5, 0.5)] * 2, [2])),
    fault_case("B81", Round([1, 0], [AT_1, AT_2, AT_0], None, [HALVES] * 3, [1, 2]), "second of two"),
]


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_has_its_right_result(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B73")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequences_that_reject_at_different_positions_stay_apart(temperature: float, device: torch.device) -> None:
    target = cases.log([[AT_0, AT_1, AT_2], [AT_2, AT_1, AT_0], [AT_1, AT_1, AT_0]], device)
    tokens = torch.tensor([[0, 0], [1, 1], [1, 1]], device=device)
    draws = cases.uniforms([[HALVES] * 3] * 3, device)
    together = specker.verify(tokens, target, temperature=temperature, uniforms=draws)
    assert together.token_ids.tolist() == [[0, 1, -1], [2, -1, -1], [1, 1, 0]]
    for row in range(3):
        one = slice(row, row + 1)
        alone = specker.verify(tokens[one], target[one], temperature=temperature, uniforms=draws[one])
        assert alone.token_ids.tolist() == together.token_ids.tolist()[one]


@fault("B74", "B83")
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_sequences_without_drafts_get_one_token_of_their_row(batch: int, device: torch.device) -> None:
    target = cases.log([[AT_2], [AT_0], [AT_1]], device)[:batch]
    result = specker.verify(torch.empty((batch, 0), dtype=torch.int64, device=device), target, seed=0)
    assert result.token_ids.tolist() == [[2], [0], [1]][:batch]
    assert result.num_emitted.tolist() == [1] * batch
    with_rows = specker.verify(
        torch.empty((batch, 0), dtype=torch.int64, device=device),
        target,
        torch.empty((batch, 0, 3), device=device),
        seed=0,
        return_logprobs=True,
        return_accept_probs=True,
    )
    assert with_rows.token_ids.tolist() == result.token_ids.tolist()
    assert with_rows.expected_accepted is not None
    assert with_rows.expected_accepted.tolist() == [0.0] * batch
    assert with_rows.accept_probs is not None
    assert with_rows.accept_probs.shape == (batch, 0)


@fault("B83")
@pytest.mark.parametrize("gamma", [0, 3])
def test_an_empty_batch_gives_empty_results(gamma: int, device: torch.device) -> None:
    result = specker.verify(
        torch.empty((0, gamma), dtype=torch.int64, device=device),
        torch.empty((0, gamma + 1, 7), device=device),
        torch.empty((0, gamma, 7), device=device),
        return_logprobs=True,
        return_accept_probs=True,
    )
    shapes = [tuple(value.shape) for value in result if value is not None]
    assert shapes == [(0, gamma + 1), (0,), (0,), (0,), (0,), (0, gamma + 1), (0, gamma), (0,)]
    result.raise_for_status()
    drawn = specker.sample(torch.empty((0, 7), device=device))
    assert drawn.token_ids.shape == drawn.status.shape == drawn.seed.shape == (0,)
    flat = specker.verify_flat(
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty((0, 7), device=device),
        cu_num_draft_tokens=torch.zeros(1, dtype=torch.int64, device=device),
        max_num_draft_tokens=gamma,
    )
    assert flat.token_ids.shape == (0, gamma + 1)


@fault("B76")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_neither_judged_nor_counted(temperature: float, device: torch.device) -> None:
    target = torch.zeros((1, 6, 3), device=device)
    target[0, :4] = cases.log([AT_1, AT_0, AT_1, AT_2], device)
    draft = torch.zeros((1, 5, 3), device=device)
    draft[0, :3] = cases.log([AT_1, AT_0, AT_1], device)
    for rows in (None, draft):
        result = specker.verify(
            torch.tensor([[1, 0, 1, -1, -1]], device=device),
            target,
            rows,
            num_draft_tokens=torch.tensor([3], device=device),
            temperature=temperature,
            seed=0,
            return_accept_probs=True,
        )
        assert result.token_ids.tolist() == [[1, 0, 1, 2, -1, -1]]
        assert result.num_accepted.tolist() == [3]
        assert result.num_emitted.tolist() == [4]
        assert result.status.tolist() == [0]
        assert result.accept_probs is not None
        assert result.accept_probs.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]


@fault("B78")
def test_an_id_outside_the_vocabulary_draws_from_the_whole_target_row(device: torch.device) -> None:
    # Not from a residual: with the draft's mass subtracted, id 0 would have none.
    target, draft = cases.log([[[0.5, 0.5]] * 2] * 2, device), cases.log([[[0.9, 0.1]]] * 2, device)
    draws = cases.uniforms([[(0.0, 0.1)] * 2] * 2, device)
    result = specker.verify(torch.tensor([[-1], [2]], device=device), target, draft, uniforms=draws)
    assert result.token_ids.tolist() == [[0, -1], [0, -1]]
    assert result.status.tolist() == [Status.DRAFT_TOKEN_PLACEHOLDER, Status.DRAFT_TOKEN_OUT_OF_RANGE]
    with pytest.raises(specker.InvalidInputError, match=r"in sequence 1: a draft token is outside 0\.\.vocab-1$"):
        result.raise_for_status()


@fault("B79")
def test_the_length_tells_no_draft_from_drafts_of_token_0(device: torch.device) -> None:
    target = cases.log([[AT_0, AT_0, AT_1, AT_2]] * 3, device)
    result = specker.verify(
        torch.zeros((3, 3), dtype=torch.int64, device=device),
        target,
        num_draft_tokens=torch.tensor([0, 3, 2], device=device),
        seed=0,
    )
    assert result.token_ids.tolist() == [[0, -1, -1, -1], [0, 0, 1, -1], [0, 0, 1, -1]]
    assert result.num_accepted.tolist() == [0, 2, 2]


@fault("B80")
def test_everything_behind_a_rejection_in_a_padded_round_is_minus_one(device: torch.device) -> None:
    result = specker.verify(
        torch.zeros((1, 8), dtype=torch.int64, device=device),
        cases.log([[AT_1] * 9], device),
        num_draft_tokens=torch.tensor([4], device=device),
        seed=0,
        return_logprobs=True,
    )
    assert result.token_ids.tolist() == [[1] + [-1] * 8]
    assert result.logprobs is not None
    assert result.logprobs.tolist() == [[0.0] * 9]


@fault("B82")
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed", "position", "num_draft_tokens"])
@pytest.mark.parametrize("size", [(3, 2), (6,), (1,), (3, 1), ()], ids=str)
def test_values_a_token_are_refused_where_values_a_sequence_belong(
    name: str, size: tuple[int, ...], device: torch.device
) -> None:
    dtype = torch.int64 if name in ("top_k", "seed", "position", "num_draft_tokens") else torch.float32
    arguments: dict[str, Any] = {"seed": 0, name: torch.ones(size, dtype=dtype, device=device)}
    with pytest.raises(ValueError, match=rf"^{name}: expected shape \(3,\), got \("):
        specker.verify(
            torch.zeros((3, 2), dtype=torch.int64, device=device), torch.zeros((3, 3, 4), device=device), **arguments
        )


@fault("B84")
def test_a_batch_beyond_16_bits_is_served(backend: str, device: torch.device) -> None:
    if interpreted(backend):
        pytest.skip("too many sequences for the interpreter")
    batch = 65_537
    target = torch.zeros((batch, 2, 8), device=device)
    tokens = torch.arange(batch, device=device) % 8
    target.scatter_(2, tokens.view(-1, 1, 1).expand(-1, 2, 1), 20.0)
    result = specker.verify(tokens.unsqueeze(-1), target, temperature=0.0)
    assert torch.equal(result.token_ids, tokens.unsqueeze(-1).expand(-1, 2))
    drawn = specker.sample(target[:, 0], temperature=0.0)
    assert torch.equal(drawn.token_ids, tokens)


VOCABS = [1, 2, 3, 31, 32, 33, 127, 1023, 1025, 40_001]


@fault("B85")
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_vocabularies_equal_the_reference(
    vocab: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    if interpreted(backend) and (dtype == torch.bfloat16 or vocab in (2, 31, 32, 1023)):
        pytest.skip("a few of the vocabularies are enough for the interpreter")
    batch = 1 if interpreted(backend) else 2
    target = cases.random_rows(batch, 3, vocab, dtype=dtype)
    draft = cases.random_rows(batch, 2, vocab, dtype=dtype)
    tokens = torch.tensor([[0, vocab - 1], [vocab // 2, vocab // 3]])[:batch]
    for draft_rows in (draft, None):
        arguments: dict[str, Any] = {"seed": 11, "return_logprobs": True, "return_accept_probs": True}
        got = specker.verify(
            tokens.to(device), target.to(device), None if draft_rows is None else draft_rows.to(device), **arguments
        )
        with specker.backend("reference"):
            wanted = specker.verify(tokens, target, draft_rows, **arguments)
        for name in ("token_ids", "num_accepted", "num_emitted", "status"):
            assert getattr(got, name).tolist() == getattr(wanted, name).tolist()
        for name in ("logprobs", "accept_probs", "expected_accepted"):
            torch.testing.assert_close(getattr(got, name).cpu(), getattr(wanted, name), rtol=2e-5, atol=1e-7)


@fault("B86")
@pytest.mark.parametrize("return_logprobs", [False, True])
@pytest.mark.parametrize("return_accept_probs", [False, True])
def test_outputs_asked_for_change_no_other_output(
    return_logprobs: bool, return_accept_probs: bool, device: torch.device
) -> None:
    target, draft = cases.random_rows(3, 3, 13).to(device), cases.random_rows(3, 2, 13).to(device)
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device)
    temperature = torch.tensor([0.0, 1.0, 0.5], device=device)
    plain = specker.verify(tokens, target, draft, temperature=temperature, seed=3)
    asked = specker.verify(
        tokens, target, draft, temperature=temperature, seed=3, return_logprobs=return_logprobs,
        return_accept_probs=return_accept_probs,
    )  # fmt: skip
    for value, other in zip(plain[:5], asked[:5], strict=True):
        assert isinstance(value, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert value.tolist() == other.tolist()
    assert (asked.logprobs is not None) == return_logprobs
    assert (asked.accept_probs is not None) == (asked.expected_accepted is not None) == return_accept_probs
