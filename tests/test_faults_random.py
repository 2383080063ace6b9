"""Faults seen in other systems: random numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import specker
from specker import Status

from . import cases, laws
from .cases import ALMOST_ONE, Round, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
SEEDS = [0, 1, 2**24, 2**24 + 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1, -1, -2, -(2**53) - 1, -(2**63)]


def round_of(seed: int | torch.Tensor | None, device: torch.device, batch: int = 2) -> specker.VerifyResult:
    """Verify the same rows with a seed."""
    return specker.verify(
        torch.tensor([[1, 2, 3]] * batch, device=device),
        cases.random_rows(4, 33).to(device).expand(batch, 4, 33),
        cases.random_rows(3, 33).to(device).expand(batch, 3, 33),
        seed=seed,
        position=5,
        temperature=0.8,
        return_logprobs=True,
        return_accept_probs=True,
    )


@fault("B22")
@pytest.mark.law
@pytest.mark.parametrize("draft", [[0.7, 0.25, 0.05], [0.7, 0.05, 0.25]], ids=["ranked one way", "ranked the other"])
def test_equal_seed_and_position_of_draft_and_verify_keep_the_law(
    draft: list[float], backend: str, device: torch.device
) -> None:
    if interpreted(backend):
        pytest.skip("too many sequences for the interpreter")
    rounds, target = 400_000, [0.1, 0.6, 0.3]
    seed = torch.arange(rounds, device=device)
    draft_logits = cases.log(draft, device)
    drawn = specker.sample(draft_logits.expand(rounds, 3), seed=seed, position=7)
    result = specker.verify(
        drawn.token_ids.unsqueeze(-1),
        cases.log(target, device).expand(rounds, 2, 3),
        draft_logits.expand(rounds, 1, 3),
        seed=seed,
        position=7,
    )
    counts = torch.bincount(result.token_ids[:, 0], minlength=3).tolist()
    observed = {str(token): count for token, count in enumerate(counts)}
    assert laws.p_value(observed, {str(token): weight for token, weight in enumerate(target)}) > 1e-4


@fault("B23", "B38")
def test_equal_seeds_give_equal_bits_and_others_differ(device: torch.device) -> None:
    first, again, other = round_of(42, device), round_of(42, device), round_of(43, device)
    assert [cases.sequence_of(first, row) for row in range(2)] == [cases.sequence_of(again, row) for row in range(2)]
    # An int counts up with the row: row 1 of seed 42 is row 0 of seed 43.
    assert cases.sequence_of(first, 1) == cases.sequence_of(other, 0)
    assert first.seed.tolist() == [42, 43]
    accept = specker.random.uniforms(42, 5, specker.random.VERIFY_PURPOSE)
    assert accept != specker.random.uniforms(43, 5, specker.random.VERIFY_PURPOSE)


@fault("B24")
def test_calls_in_between_change_nothing(backend: str, device: torch.device) -> None:
    before = round_of(42, device)
    for seed in range(3 if interpreted(backend) else 100):
        round_of(seed, device)
        torch.rand(7)
    assert cases.sequence_of(round_of(42, device), 0) == cases.sequence_of(before, 0)


@fault("B25")
@pytest.mark.parametrize("seeded", [0, 1])
def test_a_seeded_sequence_beside_an_unseeded_one_equals_itself_alone(seeded: int, device: torch.device) -> None:
    alone = round_of(torch.tensor([7], device=device), device, batch=1)
    seed = torch.randint(-(2**62), 2**62, (2,))
    seed[seeded] = 7
    together = round_of(seed.to(device), device)
    assert cases.sequence_of(together, seeded) == cases.sequence_of(alone, 0)
    other = round_of(seed[1 - seeded : 2 - seeded].to(device), device, batch=1)
    assert cases.sequence_of(together, 1 - seeded) == cases.sequence_of(other, 0)


@fault("B26")
@pytest.mark.parametrize("padded", [4, 8])
def test_padding_sequences_change_nothing(padded: int, backend: str, device: torch.device) -> None:
    if interpreted(backend) and padded > 4:
        pytest.skip("too many sequences for the interpreter")
    seed = torch.tensor([11, -4, 2**40], device=device)
    bare = round_of(seed, device, batch=3)
    full = round_of(torch.nn.functional.pad(seed, (0, padded - 3), value=99), device, batch=padded)
    for row in range(3):
        assert cases.sequence_of(full, row) == cases.sequence_of(bare, row)


@pytest.mark.gpu
@fault("B27", "B28")
def test_replays_of_a_captured_graph_read_new_seeds_and_positions(backend: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    target, draft = cases.random_rows(4, 4, 257).to(device), cases.random_rows(4, 3, 257).to(device)
    tokens = torch.tensor([[1, 2, 3]] * 4, device=device)
    seed = torch.arange(4, device=device)
    position = torch.zeros(4, dtype=torch.int64, device=device)
    specker.verify(tokens, target, draft, seed=seed, position=position)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = specker.verify(tokens, target, draft, seed=seed, position=position)
    drawn = set()
    for replay in range(4):
        seed.copy_(torch.arange(4) + 100 * replay)
        position.fill_(replay // 2)
        graph.replay()
        fresh = specker.verify(tokens, target, draft, seed=seed, position=position)
        assert captured.token_ids.tolist() == fresh.token_ids.tolist()
        drawn.add(str(captured.token_ids.tolist()))
    assert len(drawn) > 1


@fault("B29")
def test_without_a_seed_torch_s_generator_moves_by_one_draw_of_seeds(device: torch.device) -> None:
    torch.manual_seed(0)
    first, second = round_of(None, device), round_of(None, device)
    following = torch.rand(1, device=device)
    torch.manual_seed(0)
    seeds = [torch.randint(-(2**63), 2**63 - 1, (2,), device=device) for _ in range(2)]
    assert [first.seed.tolist(), second.seed.tolist()] == [seed.tolist() for seed in seeds]
    assert first.seed.tolist() != second.seed.tolist()
    assert following.tolist() == torch.rand(1, device=device).tolist()


@fault("B30")
def test_a_tail_far_below_the_peak_keeps_its_mass(backend: str, device: torch.device) -> None:
    vocab = 129_280
    target = torch.zeros(vocab, device=device)
    target[0] = 18.0
    peak = float(np.exp(18.0) / (np.exp(18.0) + vocab - 1))
    # Float32 exponentials may move a boundary by 1e-6, which is 66 ids of the tail.
    shares = [0.3]
    if not interpreted(backend):
        shares = [0.001, 0.3, 0.5, 0.999]
        assert cases.bonus_tokens(target, [0.0, peak - 1e-6]) == [0, 0]
    drawn = cases.bonus_tokens(target, [peak + (1 - peak) * share for share in shares])
    assert drawn == [pytest.approx(1 + share * (vocab - 1), abs=70) for share in shares]


@fault("B30")
def test_own_uniforms_reach_the_tail_as_often_as_they_should() -> None:
    draws, tail = 100_000, 1.965e-3
    emission = specker.random.uniforms(torch.arange(draws), 0, specker.random.VERIFY_PURPOSE)[1]
    hits = int((emission >= 1 - tail).sum())
    assert abs(hits - draws * tail) <= 4 * (draws * tail) ** 0.5


@fault("B31")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniforms_do_not_depend_on_the_dtype_of_the_logits(
    dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    batch = 2 if interpreted(backend) else 4
    target = cases.random_rows(batch, 3, 33, dtype=dtype).to(device)
    draft = cases.random_rows(batch, 2, 33, dtype=dtype).to(device)
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], device=device)[:batch]
    half = specker.verify(tokens, target, draft, seed=9, return_logprobs=True, return_accept_probs=True)
    full = specker.verify(tokens, target.float(), draft.float(), seed=9, return_logprobs=True, return_accept_probs=True)
    for row in range(batch):
        assert cases.sequence_of(half, row) == cases.sequence_of(full, row)


@fault("B32")
@pytest.mark.parametrize("uniform", [1.0, -(2.0**-60), 1.5, float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1], ids=["accept", "emission"])
def test_a_uniform_outside_its_interval_is_refused(uniform: float, which: int, device: torch.device) -> None:
    pairs = cases.uniforms([[(0.5, 0.5)] * 2] * 2, device)
    pairs[1, 0, which] = uniform
    arguments = torch.tensor([[0], [0]], device=device), cases.log([[[0.5, 0.5, 0.0]] * 2] * 2, device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"sequence 1: uniforms: expected values in \[0, 1\)"):
            specker.verify(*arguments, uniforms=pairs)
        return
    result = specker.verify(*arguments, uniforms=pairs)
    assert result.status.tolist() == [0, Status.INVALID_UNIFORMS]
    assert result.num_emitted.tolist()[1] == 0


ROUNDS = [
    fault_case("B32", Round([], [[0.5, 0.5, 0.0]], None, [(0.5, ALMOST_ONE)], [1]), "last uniform"),
    fault_case("B33", Round([], [[0.0] + [1 / 31] * 31 + [0.0]], None, [(0.5, 0.0)], [1]), "first uniform"),
    *(
        fault_case("B33", Round([], [[0.0] + [1 / 31] * 31 + [0.0]], None, [(0.5, emission)], [31]), f"{emission!r}")
        for emission in (1 - 2.0**-24, ALMOST_ONE)
    ),
    fault_case("B35", Round([], [[0.0, 1e-9, 1 - 1e-9, 0.0]], None, [(0.0, 0.0)], [1]), "small first"),
    fault_case("B35", Round([], [[0.0, 0.5, 0.5, 0.0]], None, [(0.0, 1e-9)], [1]), "masked first"),
    fault_case("B36", Round([], [[0.5, 0.25, 0.25, 0.0]], None, [(ALMOST_ONE, ALMOST_ONE)], [2])),
    fault_case(
        "B36", Round([0], [[0.5, 0.25, 0.25]] * 2, [[0.6, 0.2, 0.2]], [(ALMOST_ONE, 0.0), (0, 0)], [1]), "residual"
    ),
]


@pytest.mark.parametrize("case", ROUNDS)
def test_end_points_of_the_uniforms_give_ids_with_mass(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B34")
@pytest.mark.parametrize("kind", ["bonus", "point-mass residual", "residual"])
def test_a_flat_row_of_262144_ids_is_drawn_evenly(kind: str, backend: str, device: torch.device) -> None:
    vocab, shares = 2**18, [0.5] if interpreted(backend) else [0.001, 0.25, 0.5, 0.75, 0.999]
    target = torch.zeros(vocab, device=device)
    draft = torch.full((vocab,), -np.inf, device=device)
    draft[vocab - 1] = 0.0
    draw: dict[str, Callable[[], list[int]]] = {
        "bonus": lambda: cases.bonus_tokens(target, shares),
        "point-mass residual": lambda: cases.first_tokens(target, None, vocab - 1, shares),
        "residual": lambda: cases.first_tokens(target, draft, vocab - 1, shares),
    }
    for token, share in zip(draw[kind](), shares, strict=True):
        assert abs(token - share * (vocab - (kind != "bonus"))) <= 1


@fault("B37")
def test_all_64_bits_of_a_seed_count(device: torch.device) -> None:
    # A flat row of a power of two shows the leading bits of the emission uniform.
    seed = torch.tensor(SEEDS, device=device)
    drawn = specker.sample(torch.zeros((len(SEEDS), 64), device=device), seed=seed, position=3)
    emission = specker.random.uniforms(torch.tensor(SEEDS), 3, specker.random.DRAFT_PURPOSE)[1]
    assert drawn.token_ids.tolist() == (emission * 64).long().tolist()
    assert len(set(emission.tolist())) == len(SEEDS)
    for row, value in enumerate(SEEDS):
        alone = specker.sample(torch.zeros((1, 64), device=device), seed=value, position=3)
        assert alone.token_ids.tolist() == drawn.token_ids.tolist()[row : row + 1]
        assert alone.seed.tolist() == [value]
    # A Python int counts modulo 2**64 and up with the row, round the end of int64.
    wrapped = specker.sample(torch.zeros((2, 64), device=device), seed=2**63 - 1 + 2**64, position=3)
    assert wrapped.seed.tolist() == [2**63 - 1, -(2**63)]
    assert wrapped.token_ids.tolist() == [drawn.token_ids.tolist()[SEEDS.index(seed)] for seed in wrapped.seed.tolist()]


@fault("B37")
@pytest.mark.parametrize("position", [0, 2**31, 2**32 + 5, 2**62])
def test_verify_draws_from_its_own_counter_at_each_position(position: int, backend: str, device: torch.device) -> None:
    # Certain drafts of even odds show the accept uniform, a flat row the emission uniform.
    for seed in (-5,) if interpreted(backend) else (5, -5):
        result = specker.verify(torch.zeros((1, 2), dtype=torch.int64, device=device),
            torch.zeros((1, 3, 64), device=device), seed=seed, position=position, return_accept_probs=True,
        )  # fmt: skip
        pairs = [specker.random.uniforms(seed, position + step, specker.random.VERIFY_PURPOSE) for step in range(3)]
        accepted = 0
        while accepted < 2 and float(pairs[accepted][0]) < 1 / 64:
            accepted += 1
        emission = float(pairs[accepted][1])
        wanted = int(emission * 64) if accepted == 2 else 1 + int(emission * 63)
        assert result.num_accepted.tolist() == [accepted]
        assert int(result.token_ids[0, accepted]) == wanted


@fault("B39")
def test_accept_and_emission_uniforms_are_uncorrelated() -> None:
    draws = 100_000
    numbers = [
        uniform.numpy()
        for purpose in (specker.random.DRAFT_PURPOSE, specker.random.VERIFY_PURPOSE)
        for position in (0, 1)
        for uniform in specker.random.uniforms(torch.arange(draws), position, purpose)
    ]
    correlation = np.corrcoef(numbers) - np.eye(len(numbers))
    assert np.abs(correlation).max() <= 5 / draws**0.5


@fault("B40")
@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 0, 0.0), (2**32 - 1, 2**32 - 1, ALMOST_ONE), (2**11 - 1, 0, 0.0), (2**11, 0, 2.0**-53)],
)
def test_raw_words_map_into_the_interval(low: int, high: int, wanted: float) -> None:
    assert float(specker.random.uniform_from_words(low, high)) == wanted
    assert float(specker.random.uniform_from_words(torch.tensor(low), torch.tensor(high))) == wanted
