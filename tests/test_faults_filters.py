"""Faults seen in other systems: filters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import specker

from . import cases
from .cases import ALMOST_ONE, interpreted
from .faults import fault, fault_case

pytestmark = pytest.mark.usefixtures("on_backend")
NAN = math.nan


def sorted_reference(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the kept distribution of one row by sorts in float64: temperature, top-k, top-p, min-p, ties all kept."""
    weights = np.exp((row - row.max()) / temperature)
    kept = np.ones(len(row), dtype=bool)
    if 0 < top_k < len(row):
        kept = row >= np.sort(row)[-top_k]
    if top_p < 1:
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(np.where(kept, weights, 0.0)[order])
        size = min(int((mass < top_p * mass[-1]).sum()), len(row) - 1)
        kept &= row >= row[order[size]]
    kept &= weights >= min_p * weights.max()
    return np.asarray(np.where(kept, weights, 0.0) / weights[kept].sum())


# Probabilities of one row, the filters, and the ids that they keep.
KEPT: list[Any] = [
    # Of .91 that top-k keeps, .85 reaches top-p 0.86; of the whole row it would not.
    fault_case("B61", ([0.4, 0.25, 0.2, 0.06, 0.05, 0.04], {"top_k": 4, "top_p": 0.86}, [0, 1, 2])),
    fault_case("B61", ([0.4, 0.25, 0.2, 0.06, 0.05, 0.04], {"top_p": 0.86}, [0, 1, 2, 3]), "without top-k"),
    fault_case("B61", ([0.4, 0.25, 0.2, 0.05, 0.05, 0.05], {"top_k": 4, "top_p": 0.86}, [0, 1, 2, 3, 4, 5]), "ties"),
    fault_case("B62", ([0.5, 0.2, 0.2, 0.1], {"top_k": 2}, [0, 1, 2])),
    fault_case("B62", ([0.2, 0.5, 0.1, 0.2], {"top_k": 2}, [0, 1, 3]), "apart"),
    fault_case("B64", ([0.4, 0.3, 0.3], {"top_p": 0.69}, [0, 1, 2])),
    fault_case("B64", ([0.3, 0.4, 0.3], {"top_p": 0.39}, [1]), "first alone"),
    *(
        fault_case("B67", ([0.5, 0.2, 0.2, 0.1], {"top_k": k}, [0, 1, 2, 3]), f"top_k {k}")
        for k in (-1, 0, 4, 5, 2**30)
    ),
    fault_case("B67", ([0.2, 0.5, 0.2, 0.1], {"top_k": 1}, [1]), "top_k 1"),
    fault_case("B67", ([0.2, 0.4, 0.4, 0.0], {"top_p": 0.0}, [1]), "top_p 0"),
    fault_case("B67", ([0.2, 0.4, 0.4, 0.0], {"top_p": 1e-9}, [1, 2]), "top_p tiny"),
    fault_case("B67", ([0.2, 0.4, 0.3, 0.1], {"top_p": 1.0}, [0, 1, 2, 3]), "top_p 1"),
    fault_case("B67", ([0.2, 0.4, 0.3, 0.1], {"top_p": 1.1}, [0, 1, 2, 3]), "top_p 1.1"),
    fault_case("B67", ([0.2, 0.4, 0.4, 0.0], {"min_p": 1.0}, [1, 2]), "min_p 1"),
    fault_case("B67", ([0.2, 0.4, 0.3, 0.1], {"min_p": 0.49}, [0, 1, 2]), "min_p inside"),
    fault_case("B67", ([0.2, 0.4, 0.3, 0.1], {"min_p": 0.0}, [0, 1, 2, 3]), "min_p 0"),
    fault_case("B67", ([0.6, 0.3, 0.1], {"min_p": 0.3, "temperature": 0.5}, [0]), "min_p tempered"),
    fault_case("B67", ([0.6, 0.3, 0.1], {"min_p": 0.2, "temperature": 0.5}, [0, 1]), "min_p tempered, lower"),
]


@pytest.mark.parametrize("case", KEPT)
def test_filters_keep_the_right_ids(
    case: tuple[list[float], dict[str, float], list[int]], device: torch.device
) -> None:
    probs, sampling, kept = case
    assert cases.kept_ids(cases.log(probs, device), **sampling) == kept


@pytest.mark.parametrize("case", KEPT)
def test_filters_given_as_tensors_keep_the_same_ids(
    case: tuple[list[float], dict[str, float], list[int]], backend: str, device: torch.device
) -> None:
    if interpreted(backend):
        pytest.skip("the kernels take numbers as tensors, and the interpreter is slow")
    probs, sampling, kept = case
    tensors = {name: torch.tensor([value], device=device) for name, value in sampling.items()}
    assert cases.kept_ids(cases.log(probs, device), **tensors) == kept


@fault("B62", "B63")
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_are_kept_whatever_the_batch(batch: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    ids = [1, 3, 6] if interpreted(backend) else list(range(8))
    row = torch.tensor([2.0, 1.0, 1.0, 0.0, 1.0, -1.0, 1.0, 0.0], dtype=dtype, device=device)
    result = specker.verify(
        torch.tensor([ids] * batch, device=device),
        row.expand(batch, len(ids) + 1, 8),
        top_k=3,
        seed=0,
        return_accept_probs=True,
    )
    assert result.accept_probs is not None
    wanted = sorted_reference(row.double().cpu().numpy(), 1.0, 3, 1.0, 0.0)
    assert (wanted > 0).tolist() == [True, True, True, False, True, False, True, False]
    for probs in result.accept_probs.tolist():
        assert probs == pytest.approx(wanted[ids].tolist(), rel=1e-6)


@fault("B64")
def test_a_drawn_token_is_in_the_kept_set_and_has_a_finite_logprob(device: torch.device) -> None:
    row = cases.log([0.4, 0.3, 0.3], device)
    result = specker.verify(
        torch.empty((8, 0), dtype=torch.int64, device=device),
        row.expand(8, 1, 3),
        top_p=0.7,
        uniforms=cases.uniforms([[(0.5, (step + 0.5) / 8)] for step in range(8)], device),
        return_logprobs=True,
    )
    kept = cases.kept_ids(row, top_p=0.7)
    assert result.logprobs is not None
    assert bool(torch.isfinite(result.logprobs).all())
    assert set(result.token_ids.flatten().tolist()) <= set(kept)


@fault("B65")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_a_top_p_on_a_prefix_sum_keeps_its_boundary_token(
    seed: int, ulps: int, backend: str, device: torch.device
) -> None:
    if interpreted(backend) and seed > 0:
        pytest.skip("one row is enough for the interpreter")
    row = cases.random_rows(500, seed=seed)
    order = row.argsort(descending=True)
    mass = row.double().softmax(-1)[order].cumsum(-1)
    last = int((mass < 0.9).sum())
    top_p = float(mass[last])
    for _ in range(abs(ulps)):
        top_p = math.nextafter(top_p, ulps)
    kept = (cases.token_probs(row.to(device), order[last - 2 : last + 3].tolist(), top_p=top_p) > 0).tolist()
    # Rounding decides whether the set ends on the boundary or one token behind it, and nothing else.
    assert kept[:3] == [True] * 3
    assert kept[4] is False


@fault("B65")
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, [0]), (0.5 + 2.0**-52, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2, 3])]
)
def test_a_prefix_that_is_top_p_to_the_last_bit_is_enough(top_p: float, kept: list[int], device: torch.device) -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device)
    result = specker.verify_from_probs(
        torch.tensor([[0, 1, 2, 3]], device=device),
        probs.expand(1, 5, 4),
        top_p=top_p,
        seed=0,
        return_accept_probs=True,
    )
    assert result.accept_probs is not None
    assert result.accept_probs[0].nonzero().flatten().tolist() == kept


@fault("B66")
@pytest.mark.parametrize(
    "identity", [{"top_p": 1.0}, {"top_p": 1.5}, {"top_k": 21}, {"top_k": 0}, {"min_p": 0.0}], ids=str
)
def test_identities_change_no_bit(identity: dict[str, float], backend: str, device: torch.device) -> None:
    row = cases.log([1 - 20e-9] + [1e-9] * 20, device)
    ids = [0, 20] if interpreted(backend) else range(21)
    plain = cases.token_probs(row, ids)
    assert bool((plain > 0).all())
    assert cases.token_probs(row, ids, **identity).tolist() == plain.tolist()
    tensors = {name: torch.tensor([value], device=device) for name, value in identity.items()}
    assert cases.token_probs(row, ids, **tensors).tolist() == plain.tolist()


@fault("B67")
@pytest.mark.parametrize("value", [-0.1, NAN, -math.inf])
@pytest.mark.parametrize("name", ["top_p", "min_p", "temperature"])
def test_values_outside_raise(name: str, value: float, device: torch.device) -> None:
    row = cases.log([0.5, 0.5], device)
    with pytest.raises(ValueError, match=f"{name}: expected a value .*, got {value}"):
        cases.bonus_tokens(row, [0.5], **{name: value})
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"sequence 0: {name}: expected a .*value"):
            cases.bonus_tokens(row, [0.5], **{name: torch.tensor([value])})


ROWS = {
    "one token above 60 percent": [0.6, *np.linspace(0.5, 1.5, 99) / 99 * 0.4],
    "geometric": list(0.8 ** np.arange(60.0) / (0.8 ** np.arange(60.0)).sum()),
    "two levels": [0.02] * 20 + [0.0075] * 80,
    "masked": [0.0, 0.3, 0.0, 0.0, 0.4, 0.3, 0.0],
}


@fault("B68")
@pytest.mark.parametrize("probs", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("sampling", [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (0.7, 30, 0.95, 0.02)], ids=str)
def test_awkward_rows_keep_what_a_sort_keeps(
    probs: list[float], sampling: tuple[float, int, float, float], backend: str, device: torch.device
) -> None:
    row = cases.log(probs)
    wanted = sorted_reference(row.double().numpy(), *sampling)
    ids = range(0, len(probs), max(len(probs) // 3, 1) if interpreted(backend) else 1)
    temperature, top_k, top_p, min_p = sampling
    got = cases.token_probs(row.to(device), ids, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert got.tolist() == pytest.approx(wanted[list(ids)].tolist(), rel=1e-5)


@fault("B68")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows_keep_what_a_sort_keeps(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    count, vocab = (3, 48) if interpreted(backend) else (600, 48)
    rows = cases.random_rows(count, vocab, dtype=dtype)
    generator = np.random.default_rng(0)
    temperature = generator.uniform(0.3, 2.0, count)
    top_k = generator.integers(0, vocab + 2, count)
    top_p = np.where(generator.random(count) < 0.3, 1.0, generator.uniform(0.05, 1.0, count))
    min_p = np.where(generator.random(count) < 0.5, 0.0, generator.uniform(0.0, 0.3, count))
    tokens = torch.stack(
        [torch.randperm(vocab, generator=torch.Generator().manual_seed(row))[:8] for row in range(count)]
    )
    result = specker.verify(
        tokens.to(device),
        rows.to(device).unsqueeze(1).expand(count, 9, vocab),
        temperature=torch.from_numpy(temperature).to(device),
        top_k=torch.from_numpy(top_k).to(device),
        top_p=torch.from_numpy(top_p).to(device),
        min_p=torch.from_numpy(min_p).to(device),
        seed=0,
        return_accept_probs=True,
    )
    wanted = np.stack(
        [
            sorted_reference(row, *parameters)[drafted]
            for row, drafted, *parameters in zip(
                rows.double().numpy(), tokens.numpy(), temperature, top_k, top_p, min_p, strict=True
            )
        ]
    )
    assert result.accept_probs is not None
    np.testing.assert_allclose(result.accept_probs.cpu().numpy(), wanted, rtol=1e-5)


@fault("B69")
def test_filters_run_along_the_vocabulary(device: torch.device) -> None:
    target, draft = cases.random_rows(2, 4, 5).to(device), cases.random_rows(2, 3, 5).to(device)
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]], device=device)
    result = specker.verify(tokens, target, draft, top_k=3, top_p=0.8, seed=0, return_accept_probs=True)
    assert result.accept_probs is not None
    for sequence in range(2):
        for position in range(3):
            token = int(tokens[sequence, position])
            shares = [
                sorted_reference(rows[sequence, position].double().cpu().numpy(), 1.0, 3, 0.8, 0.0)[token]
                for rows in (target, draft)
            ]
            wanted = min(1.0, shares[0] / shares[1]) if shares[1] else float(shares[0] > 0)
            assert float(result.accept_probs[sequence, position]) == pytest.approx(wanted, rel=1e-5)


@fault("B70")
def test_filters_leave_their_input_as_it_was(device: torch.device) -> None:
    target, draft = cases.random_rows(2, 4, 33).to(device), cases.random_rows(2, 3, 33).to(device)
    before = target.clone(), draft.clone()
    sampling: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.05}
    specker.verify(torch.tensor([[0, 1, 2]] * 2, device=device), target, draft, seed=0, **sampling)
    specker.sample(draft[:, 0], seed=0, **sampling)
    assert torch.equal(target, before[0])
    assert torch.equal(draft, before[1])


@fault("B71")
@pytest.mark.parametrize("name", ["repetition_penalty", "typical_p", "epsilon_cutoff", "generator"])
def test_a_parameter_that_does_not_exist_is_refused(name: str, device: torch.device) -> None:
    unknown: dict[str, Any] = {name: 1.1}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        specker.verify(torch.tensor([[0]], device=device), torch.zeros((1, 2, 4), device=device), **unknown)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        specker.sample(torch.zeros((1, 4), device=device), **unknown)


@fault("B71")
@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_each_parameter_reaches_sample_and_verify(sampling: dict[str, Any], backend: str, device: torch.device) -> None:
    batch = 6 if interpreted(backend) else 32
    row = torch.tensor([0.0, 1.0, 0.2], device=device)
    assert cases.bonus_tokens(row, [0.0, ALMOST_ONE], **sampling) == [1, 1]
    assert set(specker.sample(row.expand(batch, 3), seed=0, **sampling).token_ids.tolist()) == {1}
    assert len(set(specker.sample(row.expand(batch, 3), seed=0).token_ids.tolist())) > 1


@fault("B72")
def test_accepted_tokens_come_back_in_order(device: torch.device) -> None:
    target = torch.full((2, 4, 9), -9.0, device=device)
    tokens = torch.tensor([[7, 1, 4], [2, 8, 0]], device=device)
    for row in range(2):
        for position in range(3):
            target[row, position, tokens[row, position]] = 9.0
    target[:, 3, 5] = 9.0
    temperature = torch.tensor([0.0, 0.1], device=device)
    result = specker.verify(
        tokens, target, num_draft_tokens=torch.tensor([3, 2], device=device), temperature=temperature, seed=0
    )
    assert result.token_ids.tolist() == [[7, 1, 4, 5], [2, 8, 0, -1]]
