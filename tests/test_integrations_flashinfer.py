"""FlashInfer's chain verify function, as its users call it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import specker
from specker import Status
from specker.integrations.flashinfer import chain_speculative_sampling

from . import laws
from .copies import large_results


def rows(batch: int, gamma: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return draft probabilities, draft tokens drawn from them, and target probabilities."""
    generator = torch.Generator().manual_seed(seed)
    draft_probs = torch.randn(batch, gamma, vocab, generator=generator).softmax(-1)
    target_probs = torch.randn(batch, gamma + 1, vocab, generator=generator).softmax(-1)
    flat = torch.multinomial(draft_probs.reshape(-1, vocab), 1, generator=generator)
    return draft_probs, flat.reshape(batch, gamma), target_probs


def stream(*seeds: int) -> dict[str, Any]:
    """Return explicit seeds and offsets, one a sequence."""
    return {"seed": torch.tensor(seeds), "offset": torch.arange(len(seeds)) * 100}


def test_a_target_that_is_sure_of_the_drafts_keeps_them_all() -> None:
    draft_probs, draft_token_ids, _ = rows(batch=3, gamma=4, vocab=7)
    wanted = torch.cat([draft_token_ids, torch.tensor([[0], [3], [6]])], dim=1)
    target_probs = torch.nn.functional.one_hot(wanted, 7).float()
    token_ids, accepted, emitted = chain_speculative_sampling(draft_probs, draft_token_ids, target_probs)
    assert token_ids.dtype == accepted.dtype == emitted.dtype == torch.int32
    assert token_ids.tolist() == wanted.tolist()
    assert accepted.tolist() == emitted.tolist() == [4, 4, 4]


def test_explicit_seeds_and_offsets_are_those_of_verify(on_backend: str) -> None:
    draft_probs, draft_token_ids, target_probs = rows(batch=4, gamma=3, vocab=11)
    seed, offset = torch.tensor([5, -6, 7, 1 << 62]), torch.tensor([0, 10, 1 << 40, 3])
    result = specker.verify_from_probs(draft_token_ids, target_probs, draft_probs, seed=seed, position=offset)
    token_ids, _, emitted = chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, seed=seed, offset=offset
    )
    assert token_ids.tolist() == result.token_ids.tolist()
    assert emitted.tolist() == result.num_accepted.tolist()


def test_unsigned_seeds_keep_their_bits() -> None:
    arguments = rows(batch=1, gamma=3, vocab=50)
    seed = np.uint64(2**64 - 3)
    unsigned = torch.from_numpy(np.array([seed])), torch.from_numpy(np.array([9], dtype=np.uint64))
    wanted = chain_speculative_sampling(*arguments, seed=torch.tensor([-3]), offset=torch.tensor([9]))
    got = chain_speculative_sampling(*arguments, seed=unsigned[0], offset=unsigned[1])
    assert got[0].tolist() == wanted[0].tolist()


def test_a_sequence_does_not_depend_on_its_batch_slot() -> None:
    arguments, numbers = rows(batch=6, gamma=3, vocab=40), stream(3, 1, 4, 1, 5, 9)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    plain = chain_speculative_sampling(*arguments, **numbers)
    permuted = chain_speculative_sampling(
        *(argument[order] for argument in arguments), **{name: value[order] for name, value in numbers.items()}
    )
    for left, right in zip(plain, permuted, strict=True):
        assert left[order].tolist() == right.tolist()


def test_one_seed_for_all_means_seed_plus_row() -> None:
    arguments = rows(batch=3, gamma=2, vocab=30)
    wanted = chain_speculative_sampling(*arguments, seed=torch.tensor([8, 9, 10]), offset=torch.tensor([4, 4, 4]))
    for seed, offset in ((8, 4), (torch.tensor([8]), torch.tensor([4]))):
        got = chain_speculative_sampling(*arguments, seed=seed, offset=offset)
        assert [part.tolist() for part in got] == [part.tolist() for part in wanted]


def test_a_generator_repeats_and_moves_on() -> None:
    arguments = rows(batch=64, gamma=3, vocab=30)
    generator = torch.Generator().manual_seed(1)
    first = chain_speculative_sampling(*arguments, generator=generator)[0]
    second = chain_speculative_sampling(*arguments, generator=generator)[0]
    again = chain_speculative_sampling(*arguments, generator=generator.manual_seed(1))[0]
    assert first.tolist() == again.tolist() != second.tolist()
    torch.manual_seed(1)
    assert chain_speculative_sampling(*arguments)[0].tolist() == first.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counters_are_added_to_in_place(dtype: torch.dtype) -> None:
    draft_probs, draft_token_ids, _ = rows(batch=2, gamma=3, vocab=5)
    target_probs = torch.nn.functional.one_hot(torch.cat([draft_token_ids, draft_token_ids[:, :1]], 1), 5).float()
    accepted, emitted = torch.tensor([10, 20], dtype=dtype), torch.tensor([1, 2], dtype=dtype)
    for _ in range(2):
        _, accepted_out, emitted_out = chain_speculative_sampling(
            draft_probs, draft_token_ids, target_probs, accepted, emitted
        )
    assert accepted_out is accepted
    assert emitted_out is emitted
    assert accepted.tolist() == [16, 26]
    assert emitted.tolist() == [7, 8]


@pytest.mark.parametrize("numbers", [{}, stream(7)], ids=["generator", "seeds"])
def test_accepted_counts_every_position_by_itself(numbers: dict[str, Any]) -> None:
    """The first draft token is impossible under the target, the others certain."""
    draft_token_ids = torch.tensor([[1, 0, 0, 0]])
    draft_probs = torch.full((1, 4, 2), 0.5)
    target_probs = torch.tensor([[[1.0, 0.0]] * 5])
    token_ids, accepted, emitted = chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, **numbers)
    assert token_ids.tolist() == [[0, -1, -1, -1, -1]]
    assert accepted.tolist() == [3]
    assert emitted.tolist() == [0]


@pytest.mark.parametrize("explicit", [False, True], ids=["generator", "seeds"])
def test_a_lone_position_is_accepted_where_it_is_emitted(explicit: bool) -> None:
    """One test decides both counts: they use the same random number."""
    arguments = rows(batch=2000, gamma=1, vocab=6)
    numbers = stream(*range(2000)) if explicit else {}
    _, accepted, emitted = chain_speculative_sampling(*arguments, **numbers)
    assert 500 < int(emitted.sum()) < 1900
    assert accepted.tolist() == emitted.tolist()


@pytest.mark.parametrize("explicit", [False, True], ids=["generator", "seeds"])
def test_accepted_is_binomial_behind_a_rejection(explicit: bool) -> None:
    batch, gamma = 4000, 3
    draft_probs = torch.tensor([0.5, 0.5]).expand(batch, gamma, 2)
    target_probs = torch.tensor([[1.0, 0.0], [0.8, 0.2], [0.9, 0.1], [0.5, 0.5]]).expand(batch, 4, 2)
    numbers = stream(*range(batch)) if explicit else {"generator": torch.Generator().manual_seed(5)}
    ones = torch.ones(batch, gamma, dtype=torch.int64)
    _, accepted, emitted = chain_speculative_sampling(draft_probs, ones, target_probs, **numbers)
    assert not emitted.any()
    law = {"0": 0.6 * 0.8, "1": 0.6 * 0.2 + 0.4 * 0.8, "2": 0.4 * 0.2}
    counts = {key: int((accepted == int(key)).sum()) for key in law}
    assert laws.p_value(counts, law) > 1e-6


@pytest.mark.law
def test_the_joint_law_is_exact() -> None:
    target = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    draft = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    batch = 60_000
    generator = torch.Generator().manual_seed(11)
    draft_probs = torch.tensor(draft, dtype=torch.float32).expand(batch, 2, 3)
    drafts = torch.stack([torch.multinomial(row, batch, True, generator=generator) for row in draft_probs[0]], dim=1)
    target_probs = torch.tensor(target, dtype=torch.float32).expand(batch, 3, 3)
    token_ids, _, emitted = chain_speculative_sampling(draft_probs, drafts, target_probs, generator=generator)
    result = specker.VerifyResult(
        token_ids.long(), emitted.long(), emitted.long() + 1, torch.zeros_like(emitted), torch.zeros_like(emitted)
    )
    assert laws.p_value(laws.outcome_counts(result), laws.joint_law(target, draft, 2)) > 1e-6


def test_padding_tokens_stop_a_sequence_without_gaps() -> None:
    """Engines pad short sequences with -1 and rows of zeros; the token of the first padded row is the bonus token."""
    draft_probs, draft_token_ids, target_probs = rows(batch=1, gamma=4, vocab=3)
    target_probs[0] = torch.tensor([0.0, 0.0, 1.0])
    draft_token_ids[0] = torch.tensor([2, 2, -1, -1])
    draft_probs[0, 2:] = 0.0
    status = torch.zeros(1, dtype=torch.int32)
    token_ids, accepted, emitted = chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, output_status=status
    )
    assert token_ids.tolist() == [[2, 2, 2, -1, -1]]
    assert accepted.tolist() == emitted.tolist() == [2]
    assert Status(int(status)) == Status.DRAFT_TOKEN_PLACEHOLDER


def test_nan_concerns_its_own_sequence_only(on_backend: str) -> None:
    draft_probs, draft_token_ids, target_probs = rows(batch=3, gamma=2, vocab=9)
    healthy = chain_speculative_sampling(draft_probs, draft_token_ids, target_probs, **stream(1, 2, 3))
    target_probs = target_probs.clone()
    target_probs[1, 0, 4] = math.nan
    status = torch.zeros(3, dtype=torch.int32)
    token_ids, accepted, emitted = chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, **stream(1, 2, 3), output_status=status
    )
    assert token_ids[1].tolist() == [-1, -1, -1]
    assert int(emitted[1]) == 0
    assert status.tolist() == [0, int(Status.TARGET_INVALID), 0]
    for got, wanted in zip((token_ids, accepted, emitted), healthy, strict=True):
        assert got[::2].tolist() == wanted[::2].tolist()


def test_rows_are_read_where_they_lie() -> None:
    """bfloat16 slices of a padded vocabulary, NaN in the padding, behind slots of another stride."""
    draft_probs, draft_token_ids, target_probs = rows(batch=2, gamma=3, vocab=5000)
    padded = torch.full((2, 8, 5003), math.nan, dtype=torch.bfloat16)
    padded[:, :3, :5000], padded[:, 4:, :5000] = draft_probs, target_probs
    draft, target = padded[:, :3, :5000], padded[:, 4:, :5000]
    wanted = chain_speculative_sampling(draft.contiguous(), draft_token_ids, target.contiguous(), **stream(1, 2))
    for numbers in ({}, stream(1, 2)):
        got = []
        names = large_results(
            lambda numbers=numbers, got=got: got.append(
                chain_speculative_sampling(draft, draft_token_ids, target, **numbers)
            ),
            numel=5000,
        )
        assert names == []
    assert got[0][0].tolist() == wanted[0].tolist()


def test_no_draft_tokens_give_one_token() -> None:
    token_ids, accepted, emitted = chain_speculative_sampling(*rows(batch=2, gamma=0, vocab=4), **stream(1, 2))
    assert token_ids.shape == (2, 1)
    assert bool(token_ids.ge(0).all())
    assert accepted.tolist() == emitted.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 1}, ValueError, "seed and offset: expected both .* got int and NoneType"),
        ({"offset": 1}, ValueError, "seed and offset: expected both .* got NoneType and int"),
        ({"seed": 1, "offset": torch.tensor([1])}, ValueError, "seed and offset: .* got int and Tensor"),
        (
            {"seed": torch.tensor([1.0]), "offset": torch.tensor([1])},
            ValueError,
            "seed: expected dtype int64 or uint64, got float32",
        ),
        (
            {"seed": torch.tensor([1]), "offset": torch.tensor([1, 2, 3])},
            ValueError,
            r"offset: expected shape \(1,\) or \(2,\), got \(3,\)",
        ),
        (
            {"seed": torch.tensor([1], device="meta"), "offset": torch.tensor([1])},
            ValueError,
            "seed: expected device cpu",
        ),
        (
            {"maybe_output_accepted_token_num": torch.zeros(3, dtype=torch.int32)},
            ValueError,
            r"maybe_output_accepted_token_num: expected shape \(2,\), got \(3,\)",
        ),
        (
            {"maybe_output_emitted_draft_token_num": torch.zeros(2)},
            TypeError,
            "maybe_output_emitted_draft_token_num: expected dtype int64 or int32, got float32",
        ),
        ({"output_status": torch.zeros(2)}, TypeError, "output_status: expected dtype int32"),
        ({"target_probs": torch.ones(2, 0, 5)}, ValueError, r"target_probs: expected gamma \+ 1 >= 1 rows a sequence"),
        ({"target_probs": torch.ones(2, 4, 6)}, ValueError, r"draft_probs: expected shape"),
        ({"draft_probs": torch.ones(2, 3, 5).double()}, TypeError, "draft_probs: expected dtype float32"),
        ({"draft_token_ids": torch.zeros(2, 3)}, TypeError, "draft_token_ids: expected dtype"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    draft_probs, draft_token_ids, target_probs = rows(batch=2, gamma=3, vocab=5)
    arguments = {"draft_probs": draft_probs, "draft_token_ids": draft_token_ids, "target_probs": target_probs}
    with pytest.raises(error, match=message):
        chain_speculative_sampling(**{**arguments, **change})
