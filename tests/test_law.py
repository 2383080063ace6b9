"""The law of verify: exact enumeration, stratified uniforms, and sample feeding verify with its own numbers."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

import specker

from . import laws

pytestmark = pytest.mark.law
ERROR_RATE = 1e-6
NAMES = sorted(laws.ORACLES["distributions"])


def slow_interpreter(backend: str) -> bool:
    """Interpreted Triton takes milliseconds a program; a GPU does not."""
    return backend == "triton" and not torch.cuda.is_available()


@pytest.fixture
def fast_backend(on_backend: str) -> str:
    """Run on a backend that verifies many thousand sequences a second."""
    if slow_interpreter(on_backend):
        pytest.skip("too many sequences for the interpreter")
    return on_backend


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("name", NAMES)
def test_gamma_1_equals_the_exact_joint_law(name: str, backend: str, device: torch.device) -> None:
    if slow_interpreter(backend) and name not in ("cat_dog_fox", "disjoint_corners", "one_hot_target"):
        pytest.skip("the interpreter runs three of the distributions; the others differ only in their numbers")
    law = laws.enumerated_law(specker.verify, laws.oracle_rows(name), gamma=1, device=device)
    assert law == _fractions(laws.ORACLES["distributions"][name]["token"]["gamma_1"]["joint_law"])


@pytest.mark.usefixtures("fast_backend")
@pytest.mark.parametrize("name", NAMES)
def test_gamma_2_equals_the_exact_joint_law(name: str, device: torch.device) -> None:
    law = laws.enumerated_law(specker.verify, laws.oracle_rows(name), gamma=2, device=device)
    assert law == _fractions(laws.ORACLES["distributions"][name]["token"]["gamma_2"]["joint_law"])


@pytest.mark.usefixtures("fast_backend")
@pytest.mark.parametrize("name", NAMES)
def test_gamma_3_equals_the_exact_law_of_num_accepted(name: str, device: torch.device) -> None:
    oracle = laws.ORACLES["distributions"][name]["token"]["gamma_3"]
    law = laws.num_accepted_law(
        laws.enumerated_law(specker.verify, laws.oracle_rows(name), 3, emissions=False, device=device)
    )
    assert law == _fractions(oracle["num_accepted_law"])
    assert sum(int(key) * value for key, value in law.items()) == Fraction(oracle["expected_accepted"])


@pytest.mark.usefixtures("fast_backend")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "reversed_four"])
def test_gamma_3_equals_the_joint_law_written_down_afresh(name: str, device: torch.device) -> None:
    # Two million sequences would go to the one left out; its joint law at gamma 2 is checked above.
    rows = laws.oracle_rows(name)
    law = laws.enumerated_law(specker.verify, rows, gamma=3, device=device)
    target, draft = (np.array([[float(value) for value in probs]]) for probs in rows)
    wanted = laws.joint_law(target.repeat(4, axis=0), draft.repeat(3, axis=0), gamma=3)
    assert set(law) == set(wanted)
    assert max(abs(float(law[key]) - wanted[key]) for key in law) < 1e-12


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("name", NAMES)
def test_expected_accepted_is_the_mean_of_num_accepted(name: str, device: torch.device) -> None:
    rows = laws.oracle_rows(name)
    drawn = torch.tensor([token for token in range(len(rows.draft)) if rows.draft[token]])
    weight = torch.tensor([float(rows.draft[token]) for token in drawn.tolist()], dtype=torch.float64)
    result = specker.verify(
        drawn.unsqueeze(-1).to(device),
        laws.logits_of(rows.target, len(drawn), 2).to(device),
        laws.logits_of(rows.draft, len(drawn), 1).to(device),
        seed=0,
        return_accept_probs=True,
    )
    assert result.expected_accepted is not None
    mean = float((weight * result.expected_accepted.cpu()).sum())
    assert mean == pytest.approx(float(Fraction(laws.ORACLES["distributions"][name]["overlap_sum_min"])), abs=1e-6)


@pytest.mark.usefixtures("on_backend")
def test_stratified_uniforms_give_the_emission_law_to_two_strata(backend: str, device: torch.device) -> None:
    # Stratified uniforms sweep the inverse CDF once: each id's count is off by at most its two interval ends.
    strata = 60 if slow_interpreter(backend) else 20_000
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(1, 2, 37, generator=generator), torch.randn(1, 1, 37, generator=generator)
    uniforms = torch.empty(strata, 2, 2, dtype=torch.float64)
    uniforms[:, :, 0] = 1 - 2.0**-53
    uniforms[:, :, 1] = ((torch.arange(strata) + 0.5) / strata).unsqueeze(-1)
    target, draft, uniforms = target.to(device), draft.to(device), uniforms.to(device)
    target_probs, draft_probs = target[0, 0].double().softmax(-1), draft[0, 0].double().softmax(-1)
    token = int((draft_probs - target_probs).argmax())
    residual = (target_probs - draft_probs).clamp(min=0)
    for rows, wanted in (
        ((target, draft), residual),
        ((target, None), target_probs.index_fill(0, torch.tensor([token], device=device), 0)),
    ):
        result = specker.verify(
            torch.full((strata, 1), token, device=device),
            rows[0].expand(strata, 2, 37),
            None if rows[1] is None else rows[1].expand(strata, 1, 37),
            uniforms=uniforms,
        )
        assert int(result.num_accepted.sum()) == 0
        frequency = torch.bincount(result.token_ids[:, 0], minlength=37).double() / strata
        assert float((frequency - wanted / wanted.sum()).abs().max()) <= 2 / strata


@pytest.mark.usefixtures("fast_backend")
@pytest.mark.parametrize("draft_name", ["ranked alike", "ranked opposite"])
def test_sample_feeding_verify_has_the_target_law(draft_name: str, backend: str, device: torch.device) -> None:
    rounds = 300_000 if backend == "cpp" else 100_000
    counts, law = _own_rounds(rounds, draft_name, device)
    assert laws.p_value(counts, law) > ERROR_RATE


@pytest.mark.usefixtures("fast_backend")
def test_power_a_draft_at_another_temperature_is_caught(device: torch.device) -> None:
    counts, law = _own_rounds(100_000, "ranked opposite", device, draft_temperature=1.1)
    assert laws.p_value(counts, law) < ERROR_RATE


def _own_rounds(
    rounds: int, draft_name: str, device: torch.device, draft_temperature: float = 1.0
) -> tuple[Counter[str], dict[str, float]]:
    """Draw gamma 2 blocks by sample, verify them by the same seeds, and return outcome counts and their law."""
    target = np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4]])
    draft = np.array([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])
    if draft_name == "ranked opposite":
        draft = np.array([[0.7, 0.05, 0.25], [0.1, 0.6, 0.3]])
    seed = torch.arange(rounds, device=device)
    target_logits = torch.from_numpy(np.log(target)).float().to(device).expand(rounds, 3, 3)
    draft_logits = torch.from_numpy(np.log(draft)).float().to(device).expand(rounds, 2, 3)
    steps = [
        specker.sample(draft_logits[:, step], seed=seed, position=step, temperature=draft_temperature)
        for step in range(2)
    ]
    result = specker.verify(
        torch.stack([step.token_ids for step in steps], dim=1),
        target_logits,
        draft_logits,
        seed=seed,
        position=0,
    )
    return laws.outcome_counts(result), laws.joint_law(target, draft, 2)


def _fractions(law: dict[str, str]) -> dict[str, Fraction]:
    return {key: Fraction(value) for key, value in law.items() if Fraction(value)}
