"""Faults seen in other systems: which distribution the draft token was drawn from."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import specker
from specker import Sampling, Status

from . import cases, laws
from .cases import ALMOST_ONE, Round, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
TARGET, DRAFT = [0.3, 0.2, 0.5], [0.2, 0.5, 0.3]


@pytest.fixture
def fast_backend(backend: str) -> str:
    """Skip where the interpreter would need minutes."""
    if interpreted(backend):
        pytest.skip("too many sequences for the interpreter")
    return backend


def first_token_p_value(rounds: int, draft_tokens: torch.Tensor, draft: torch.Tensor | None, **arguments: Any) -> float:
    """Return the p-value of the first token's law when these drafts are verified with seeds 0, 1, ..."""
    device = draft_tokens.device
    result = specker.verify(
        draft_tokens.reshape(rounds, 1),
        cases.log(TARGET, device).expand(rounds, 2, 3),
        None if draft is None else draft.expand(rounds, 1, 3),
        seed=torch.arange(rounds, device=device),
        **arguments,
    )
    counts = torch.bincount(result.token_ids[:, 0], minlength=3).tolist()
    law = {str(token): weight for token, weight in enumerate(TARGET)}
    return laws.p_value({str(token): count for token, count in enumerate(counts)}, law)


@fault("B41")
@pytest.mark.law
@pytest.mark.usefixtures("fast_backend")
def test_a_filtered_draft_keeps_the_law_and_its_raw_row_does_not(device: torch.device) -> None:
    rounds, draft = 100_000, cases.log([0.5, 0.3, 0.2], device)
    drawn = specker.sample(draft.expand(rounds, 3), top_k=2, seed=torch.arange(rounds, device=device)).token_ids
    assert first_token_p_value(rounds, drawn, draft, draft_sampling=Sampling(top_k=2)) > 1e-6
    assert first_token_p_value(rounds, drawn, draft) < 1e-6


@fault("B42")
@pytest.mark.law
@pytest.mark.usefixtures("fast_backend")
def test_an_arg_max_draft_is_a_point_mass_and_its_soft_row_is_wrong(device: torch.device) -> None:
    rounds, draft = 100_000, cases.log([0.2, 0.6, 0.2], device)
    drawn = torch.ones(rounds, dtype=torch.int64, device=device)
    assert first_token_p_value(rounds, drawn, None) > 1e-6
    assert first_token_p_value(rounds, drawn, draft, draft_sampling=Sampling(temperature=0.0)) > 1e-6
    assert first_token_p_value(rounds, drawn, draft) < 1e-6


@fault("B43")
def test_draft_rows_are_found_by_index_after_a_permutation(backend: str, device: torch.device) -> None:
    target, draft = cases.random_rows(3, 3, 19).to(device), cases.random_rows(5, 2, 19).to(device)
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device)
    some = interpreted(backend)
    for slots in [[4, 0, 2]] if some else [[4, 0, 2], [2, 4, 0], [1, 1, 3]]:
        index = torch.tensor(slots, device=device)
        for order in [[2, 0, 1]] if some else [[0, 1, 2], [2, 0, 1]]:
            options: dict[str, Any] = {
                "seed": torch.tensor([7, 8, 9], device=device)[order],
                "return_logprobs": True,
                "return_accept_probs": True,
            }
            indexed = specker.verify(tokens[order], target[order], draft, draft_index=index[order], **options)
            gathered = specker.verify(tokens[order], target[order], draft[index[order]], **options)
            for row in range(3):
                assert cases.sequence_of(indexed, row) == cases.sequence_of(gathered, row)


@fault("B43")
def test_a_receipt_goes_by_sequence_where_draft_rows_go_by_index(device: torch.device) -> None:
    target, draft = cases.random_rows(2, 3, 19).to(device), cases.random_rows(2, 2, 19, seed=1).to(device)
    steps = [specker.sample(draft[:, step], seed=7, position=step) for step in range(2)]
    tokens = torch.stack([step.token_ids for step in steps], dim=1)
    options: dict[str, Any] = {"seed": 7, "return_logprobs": True, "return_accept_probs": True}
    options["draft_receipt"] = specker.DraftReceipt.stack([step.receipt for step in steps])
    plain = specker.verify(tokens, target, draft, **options)
    swapped = specker.verify(tokens, target, draft.flip(0), draft_index=torch.tensor([1, 0], device=device), **options)
    assert [cases.sequence_of(swapped, row) for row in range(2)] == [cases.sequence_of(plain, row) for row in range(2)]


ARG_MAX = {"draft_sampling": Sampling(temperature=0.0)}
IMPOSSIBLE = Status.DRAFT_TOKEN_IMPOSSIBLE
ROUNDS = [
    fault_case(
        "B42", Round([1], [TARGET] * 2, [[0.2, 0.6, 0.2]], [(0.199, 0.6)] * 2, [1, 2], sampling=ARG_MAX), "accepted"
    ),
    *(
        fault_case(
            "B42",
            Round([1], [TARGET] * 2, [[0.2, 0.6, 0.2]], [(0.201, emission)] * 2, [token], sampling=ARG_MAX),
            f"rejected, emission {emission}",
        )
        for emission, token in ((0.0, 0), (0.374, 0), (0.376, 2), (ALMOST_ONE, 2))
    ),
    fault_case(
        "B42",
        Round([0], [TARGET] * 2, [[0.2, 0.6, 0.2]], [(0.9, 0.6)] * 2, [0, 2], IMPOSSIBLE, sampling=ARG_MAX),
        "not its arg-max",
    ),
    fault_case("B44", Round([1], [[0.2, 0.7, 0.1]] * 2, None, [(0.6999, 0.89)] * 2, [1, 1]), "accepted"),
    *(
        fault_case(
            "B44",
            Round([1], [[0.2, 0.7, 0.1]] * 2, None, [(0.7001, emission), (0, 0)], [token]),
            f"rejected, emission {emission}",
        )
        for emission, token in ((0.0, 0), (0.666, 0), (0.667, 2), (ALMOST_ONE, 2))
    ),
    *(
        fault_case(
            "B45", Round([1], [TARGET] * 2, [DRAFT], [(0.4001, emission), (0, 0)], [token]), f"emission {emission}"
        )
        for emission, token in ((0.0, 0), (0.3333, 0), (0.3334, 2), (ALMOST_ONE, 2))
    ),
]


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_has_its_right_result(case: Round, device: torch.device) -> None:
    cases.check(case, device)


@fault("B44")
def test_a_certain_draft_is_accepted_with_the_target_s_probability(device: torch.device) -> None:
    assert cases.token_probs(cases.log([0.2, 0.7, 0.1], device)).tolist() == pytest.approx([0.2, 0.7, 0.1], rel=1e-6)


@fault("B46")
@pytest.mark.parametrize("target_ids", [[2, 0, 1], [1, 1, 0]], ids=["permuted", "shared"])
def test_draft_mass_is_added_into_target_ids(target_ids: list[int], device: torch.device) -> None:
    draft, target = torch.tensor([0.7, 0.2, 0.1]), [0.3, 0.3, 0.4]
    wanted = torch.zeros(3).index_add(0, torch.tensor(target_ids), draft)
    for token in set(target_ids):
        tokens, draws = torch.tensor([[token]], device=device), cases.uniforms([[(0.9999, 0.4)] * 2], device)
        arguments: dict[str, Any] = {"uniforms": draws, "return_accept_probs": True}
        reduced: dict[str, Any] = {"draft_to_target_ids": torch.tensor(target_ids, device=device)}
        mapped = specker.verify(
            tokens, cases.log([[target] * 2], device), cases.log([[draft.tolist()]], device),
            **reduced, **arguments,
        )  # fmt: skip
        full = specker.verify(
            tokens, cases.log([[target] * 2], device), cases.log([[wanted.tolist()]], device), **arguments
        )
        assert mapped.token_ids.tolist() == full.token_ids.tolist()
        assert mapped.accept_probs is not None
        assert full.accept_probs is not None
        torch.testing.assert_close(mapped.accept_probs, full.accept_probs, rtol=1e-6, atol=0)


@fault("B47")
def test_absent_draft_rows_are_never_read(device: torch.device) -> None:
    target = cases.random_rows(2, 3, 33).to(device)
    tokens = torch.tensor([[1, 2], [3, 4]], device=device)
    results = []
    for poison in (float("nan"), 0.0, 1e30):
        # Freed memory of the sizes in play is what an allocation of the call would find.
        junk = [torch.full((size,), poison, device=device) for size in (2, 4, 6, 64, 99, 132, 198)]
        del junk
        results.append(
            specker.verify(tokens, target, seed=5, temperature=0.7, return_logprobs=True, return_accept_probs=True)
        )
    for result in results[1:]:
        assert [cases.sequence_of(result, row) for row in range(2)] == [
            cases.sequence_of(results[0], row) for row in range(2)
        ]


@fault("B48", "B72")
def test_target_and_draft_take_the_parameters_of_their_sequence(device: torch.device) -> None:
    target, draft = cases.random_rows(9), cases.random_rows(9, seed=1)
    temperature, top_p = [0.2, 1.0, 0.7], [0.5, 0.9, 1.0]
    tokens = torch.stack([target.topk(3).indices[index] for index in range(3)])
    result = specker.verify(
        tokens.reshape(3, 1).to(device),
        target.to(device).expand(3, 2, 9),
        draft.to(device).expand(3, 1, 9),
        temperature=torch.tensor(temperature, device=device),
        top_p=torch.tensor(top_p, device=device),
        seed=0,
        return_accept_probs=True,
    )
    assert result.accept_probs is not None
    for row in range(3):
        probs = [nucleus(logits, temperature[row], top_p[row])[int(tokens[row])] for logits in (target, draft)]
        wanted = 0.0 if probs[0] == 0 else min(1.0, probs[0] / probs[1]) if probs[1] else 1.0
        assert float(result.accept_probs[row, 0]) == pytest.approx(wanted, rel=1e-6)


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """Return the tempered distribution cut to its nucleus, by a sort in float64."""
    probs = (logits.double() / temperature).softmax(-1).numpy()
    order = np.argsort(-probs)
    size = int((np.cumsum(probs[order]) < top_p).sum()) + 1
    kept = np.where(np.isin(np.arange(len(probs)), order[:size]), probs, 0.0)
    return np.asarray(kept / kept.sum())


@fault("B49")
def test_each_ragged_row_is_read_where_it_lies(device: torch.device) -> None:
    # Row r of the target peaks at id r, so that the emitted ids are the rows that were read.
    lengths = [2, 1, 0, 3]
    bounds = torch.tensor([0, 2, 3, 3, 6], device=device)
    target = torch.full((10, 10), -5.0, device=device).fill_diagonal_(5.0)
    starts = [0, 3, 5, 6]
    drafted = [start + step for start, length in zip(starts, lengths, strict=True) for step in range(length)]
    result = specker.verify_flat(
        torch.tensor(drafted, device=device),
        target,
        cu_num_draft_tokens=bounds,
        max_num_draft_tokens=3,
        temperature=0.0,
    )
    assert result.token_ids.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1], [5, -1, -1, -1], [6, 7, 8, 9]]
    assert result.num_accepted.tolist() == lengths


@fault("B49")
def test_each_ragged_draft_row_is_read_where_it_lies(device: torch.device) -> None:
    target, draft = cases.random_rows(5, 7).to(device), cases.random_rows(3, 7).to(device)
    tokens = torch.tensor([1, 2, 3], device=device)
    flat = specker.verify_flat(
        tokens,
        target,
        draft,
        cu_num_draft_tokens=torch.tensor([0, 2, 3], device=device),
        max_num_draft_tokens=2,
        seed=0,
        return_accept_probs=True,
    )
    rows = [(0, 0, 1), (1, 1, 2), (3, 2, 3)]
    wanted = [
        min(1.0, float(target[at].softmax(-1)[token] / draft[drafted].softmax(-1)[token]))
        for at, drafted, token in rows
    ]
    assert flat.accept_probs is not None
    assert flat.accept_probs.flatten().tolist() == pytest.approx([*wanted, 0.0], rel=1e-5)


@fault("B50")
@pytest.mark.law
@pytest.mark.usefixtures("fast_backend")
@pytest.mark.parametrize("name", ["cat_dog_fox", "disjoint_corners"])
def test_certain_drafts_from_anywhere_keep_the_exact_law(name: str) -> None:
    target = laws.oracle_rows(name).target
    for token, weight in enumerate(target):
        # All thresholds lie on the lines of this grid: those of the whole row and of the row without the token.
        whole = [value.denominator for value in target]
        rest = [(value / (1 - weight)).denominator for value in target] if weight < 1 else []
        grid = int(np.lcm.reduce([*whole, *rest]))
        cells = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).double().add(0.5).div(grid)
        uniforms = torch.full((len(cells), 2, 2), 0.5, dtype=torch.float64)
        uniforms[:, 0] = cells
        # What the bonus row draws does not matter to the first token.
        result = specker.verify(
            torch.full((len(cells), 1), token), laws.logits_of(target, len(cells), 2), uniforms=uniforms
        )
        counts = torch.bincount(result.token_ids[:, 0], minlength=len(target)).tolist()
        assert [Fraction(count, len(cells)) for count in counts] == list(target)
        assert Fraction(int(result.num_accepted.sum()), len(cells)) == weight


@fault("B41")
def test_a_draft_token_that_its_filter_removed_is_told(device: torch.device) -> None:
    cases.check(
        Round(
            [2], [TARGET] * 2, [[0.5, 0.3, 0.2]], [(0.5, 0.25)] * 2, [2, 0], Status.DRAFT_TOKEN_IMPOSSIBLE,
            {"draft_sampling": Sampling(top_k=1)},
        ),
        device,
    )  # fmt: skip
