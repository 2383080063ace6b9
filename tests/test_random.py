"""Random numbers: known answers, end points, and the same bits on every backend."""

from __future__ import annotations

import pytest
import torch

import specker
from specker.random import DRAFT_PURPOSE, VERIFY_PURPOSE, philox, uniform_from_words, uniforms

ALL_ONES = 0xFFFFFFFF


def _words(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    as_tensors = [torch.tensor(word, dtype=torch.int64) for word in (*counter, *key)]
    out = philox((as_tensors[0], as_tensors[1], as_tensors[2], as_tensors[3]), (as_tensors[4], as_tensors[5]))
    return [int(word) for word in out]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        pytest.param((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
        pytest.param((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="digits of pi",
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert _words(counter, key) == list(answer)


def test_uniform_end_points_from_raw_words() -> None:
    assert float(uniform_from_words(0, 0)) == 0.0
    assert float(uniform_from_words(ALL_ONES, ALL_ONES)) == 1 - 2.0**-53
    # The lower 11 bits of the 64-bit word are dropped, the twelfth is the last of the uniform.
    assert float(uniform_from_words((1 << 11) - 1, 0)) == 0.0
    assert float(uniform_from_words(1 << 11, 0)) == 2.0**-53
    assert float(uniform_from_words(0, 1 << 31)) == 0.5


def test_uniforms_take_their_words_low_half_first() -> None:
    accept, emission = uniforms(0, 0, 0)
    assert float(accept) == (((0xE169C58D << 32) | 0x6627E8D5) >> 11) * 2.0**-53
    assert float(emission) == (((0x9B00DBD8 << 32) | 0xBC57AC4C) >> 11) * 2.0**-53


def test_all_64_bits_of_seed_and_position_count() -> None:
    numbers = [0, 1, -1, 2**24, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 1 << 32]
    by_seed = uniforms(torch.tensor(numbers), 0, VERIFY_PURPOSE)[0]
    by_position = uniforms(0, torch.tensor(numbers), VERIFY_PURPOSE)[0]
    assert len(set(by_seed.tolist())) == len(numbers)
    assert len(set(by_position.tolist())) == len(numbers)


def test_a_python_seed_wraps_like_its_64_bits() -> None:
    assert uniforms(2**64 - 5, 3, 1)[0] == uniforms(torch.tensor(-5), 3, 1)[0]


def test_draft_and_verify_never_share_a_counter() -> None:
    seeds = torch.arange(10_000)
    drawn = torch.cat(uniforms(seeds, 5, DRAFT_PURPOSE))
    verified = torch.cat(uniforms(seeds, 5, VERIFY_PURPOSE))
    assert abs(float(torch.corrcoef(torch.stack([drawn, verified]))[0, 1])) < 5 / len(drawn) ** 0.5


@pytest.mark.usefixtures("on_backend")
def test_every_backend_uses_the_same_bits(device: torch.device) -> None:
    # On a flat row of 4096 ids the id drawn tells the leading 12 bits of the uniform.
    vocab = 4096
    seeds = torch.tensor([0, 1, -1, 2**53 + 1, -(2**63)], device=device)
    positions = torch.tensor([0, 7, 2**31, 2**32 + 1, -1], device=device)
    drawn = specker.sample(torch.zeros(5, vocab, device=device), seed=seeds, position=positions).token_ids
    expected = (uniforms(seeds, positions, DRAFT_PURPOSE)[1] * vocab).floor().long()
    assert drawn.tolist() == expected.tolist()
    bonus = specker.verify(
        torch.empty(5, 0, dtype=torch.int64, device=device),
        torch.zeros(5, 1, vocab, device=device),
        seed=seeds,
        position=positions,
    ).token_ids[:, 0]
    assert bonus.tolist() == (uniforms(seeds, positions, VERIFY_PURPOSE)[1] * vocab).floor().long().tolist()


@pytest.mark.usefixtures("on_backend")
def test_an_int_seed_means_seed_plus_row(device: torch.device) -> None:
    logits = torch.zeros(3, 64, device=device)
    assert specker.sample(logits, seed=-1).seed.tolist() == [-1, 0, 1]
    given = specker.sample(logits, seed=torch.tensor([-1, 0, 1], device=device))
    assert given.token_ids.tolist() == specker.sample(logits, seed=2**64 - 1).token_ids.tolist()


def test_no_seed_draws_independent_seeds_from_the_default_generator() -> None:
    logits = torch.zeros(4, 8)
    torch.manual_seed(3)
    first = specker.sample(logits).seed
    second = specker.sample(logits).seed
    torch.manual_seed(3)
    assert torch.equal(first, specker.sample(logits).seed)
    assert len(set(torch.cat([first, second]).tolist())) == 8
    repeated = specker.sample(logits, seed=first)
    torch.manual_seed(3)
    assert torch.equal(repeated.token_ids, specker.sample(logits).token_ids)


def test_numbers_mix_with_tensors_of_any_device() -> None:
    accept, emission = uniforms(torch.zeros(4, dtype=torch.int64, device="meta"), 0, VERIFY_PURPOSE)
    assert accept.device.type == emission.device.type == "meta"
