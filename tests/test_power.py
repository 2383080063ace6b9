"""The power of the tests: faults put into a copy of the reference, one at a time, each of which a check must catch.

Every fault is a replacement of source text, so that it is exactly what it says; a replacement that no longer finds
its text fails too. The healthy copy passes all checks.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

import specker

from . import laws

pytestmark = pytest.mark.law
ERROR_RATE = 1e-6
ROUNDS = 50_000
MODULES = ("random", "distribution", "layout", "scoring", "reference")


def exact_law() -> bool:
    """Enumerate gamma 2 exactly on two distributions."""
    return all(
        laws.enumerated_law(specker.verify, laws.oracle_rows(name), gamma=2)
        == {key: laws.Fraction(value) for key, value in law.items()}
        for name in ("cat_dog_fox", "disjoint_corners")
        for law in (laws.ORACLES["distributions"][name]["token"]["gamma_2"]["joint_law"],)
    )


def own_numbers_law() -> bool:
    """Let sample feed verify by the same seeds and positions, at temperature 0.8, rows differing by position."""
    target = np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.3, 0.3, 0.4]])
    draft = np.array([[0.7, 0.05, 0.25], [0.1, 0.6, 0.3]])
    logits = [torch.from_numpy(0.8 * np.log(rows)).float() for rows in (target, draft)]
    seed = torch.arange(ROUNDS)
    drawn = [
        specker.sample(logits[1][step].expand(ROUNDS, 3), seed=seed, position=step, temperature=0.8).token_ids
        for step in range(2)
    ]
    result = specker.verify(
        torch.stack(drawn, dim=1),
        logits[0].expand(ROUNDS, 3, 3),
        logits[1].expand(ROUNDS, 2, 3),
        seed=seed,
        temperature=0.8,
    )
    return laws.p_value(laws.outcome_counts(result), laws.joint_law(target, draft, 2)) > ERROR_RATE


def two_round_law() -> bool:
    """Chain two rounds of bonus tokens, whose positions must give independent numbers."""
    row = torch.tensor([0.5, 0.3, 0.2]).log().expand(ROUNDS, 3, 3)
    tokens = torch.zeros(ROUNDS, 2, dtype=torch.int64)
    bonuses = [
        specker.verify(tokens, row, row[:, :2], seed=torch.arange(ROUNDS), position=position).token_ids[:, 2].tolist()
        for position in (0, 3)
    ]
    pairs = Counter(f"{first},{second}" for first, second in zip(*bonuses, strict=True))
    probs = [0.5, 0.3, 0.2]
    law = {f"{i},{j}": probs[i] * probs[j] for i in range(3) for j in range(3)}
    return laws.p_value(pairs, law) > ERROR_RATE


def thresholds_are_strict() -> bool:
    """Reject where u * draft equals target exactly, and where the target has no mass at u = 0."""
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    draft = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]])
    uniforms = torch.tensor([[[0.5, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    result = specker.verify_from_probs(torch.tensor([[0], [0]]), target, draft, uniforms=uniforms)
    return result.num_accepted.tolist() == [0, 0] and result.token_ids[:, 0].tolist() == [1, 1]


def rows_are_independent() -> bool:
    """Give every sequence its own rows and rejection position and compare with single calls."""
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(6, 4, 9, generator=generator), torch.randn(6, 3, 9, generator=generator)
    tokens = torch.randint(0, 9, (6, 3), generator=generator)
    seed = torch.arange(6)
    together = specker.verify(tokens, target, draft, seed=seed).token_ids
    alone = [
        specker.verify(tokens[row : row + 1], target[row : row + 1], draft[row : row + 1], seed=seed[row : row + 1])
        for row in range(6)
    ]
    return len(set(together.ne(-1).sum(-1).tolist())) > 1 and torch.equal(
        together, torch.cat([result.token_ids for result in alone])
    )


def ties_are_kept() -> bool:
    """Keep every id tied at the boundary of top-k and of top-p; greedy takes the lowest id."""
    row = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0]).expand(400, 5)
    by_count = specker.sample(row, top_k=2, seed=0).token_ids
    by_mass = specker.sample(row, top_p=0.4, seed=0).token_ids
    greedy = specker.sample(row, temperature=0.0, seed=0).token_ids
    return set(by_count.tolist()) == {1, 2, 3} == set(by_mass.tolist()) and set(greedy.tolist()) == {1}


def flat_row_law() -> bool:
    """Draw from a flat row of 512 ids: each has the same chance, the odd ones too."""
    tokens = specker.sample(torch.zeros(1, 512).expand(ROUNDS, 512), seed=torch.arange(ROUNDS)).token_ids
    counts = Counter(str(token) for token in tokens.tolist())
    return laws.p_value(counts, {str(token): 1 / 512 for token in range(512)}) > ERROR_RATE


def bonus_uses_its_own_position() -> bool:
    """The bonus token at index gamma is drawn by the emission uniform of position + gamma."""
    token = specker.verify(
        torch.tensor([[0, 0]]), torch.zeros(1, 3, 1000), torch.full((1, 2, 1000), 0.0), seed=3, position=5
    ).token_ids[0, 2]
    return int(token) == int(specker.random.uniforms(3, 7, specker.random.VERIFY_PURPOSE)[1] * 1000)


def seeds_use_64_bits() -> bool:
    """Two seeds that differ in one high bit, and negative seeds, are streams of their own."""
    seeds = torch.tensor([1, 1 + (1 << 32), 1 + (1 << 53), -1, -(1 << 63)])
    tokens = [specker.sample(torch.zeros(5, 1000), seed=seeds, position=position).token_ids for position in range(4)]
    return len({tuple(column) for column in torch.stack(tokens, dim=1).tolist()}) == 5


CHECKS: tuple[Callable[[], bool], ...] = (
    exact_law,
    own_numbers_law,
    two_round_law,
    thresholds_are_strict,
    rows_are_independent,
    ties_are_kept,
    flat_row_law,
    bonus_uses_its_own_position,
    seeds_use_64_bits,
)


class Fault(NamedTuple):
    """A replacement in a module of the reference, and a check that must then fail."""

    module: str
    old: str
    new: str
    caught_by: Callable[[], bool]


FAULTS = {
    "inclusive compare": Fault(
        "scoring", "* draft_prob < target_prob)", "* draft_prob <= target_prob)", thresholds_are_strict
    ),
    "no guard on target mass": Fault(
        "scoring",
        "passes = passes & (target_prob > 0) &",
        "passes = passes | (accept_uniforms[:, :gamma] == 0); passes = passes &",
        thresholds_are_strict,
    ),
    "floor on the residual": Fault("reference", "position]).clamp(min=0)", "position]).clamp(min=1e-2)", exact_law),
    "recovered from a mixture": Fault(
        "reference",
        "residual, target_row)\n        bits",
        "residual + 0.5 * target_row, target_row)\n        bits",
        exact_law,
    ),
    "count of the raw mask": Fault(
        "reference", "scored.accepted.cumprod(dim=-1).sum(dim=-1)", "scored.accepted.sum(dim=-1)", exact_law
    ),
    "bonus from the wrong row": Fault(
        "reference",
        "target.probs[sequence, num_accepted]",
        "target.probs[sequence, (num_accepted - 1).clamp(min=0)]",
        own_numbers_law,
    ),
    "residual from the next row": Fault(
        "reference",
        "draft.probs[sequence, position]",
        "draft.probs[sequence, (position + 1) % layout.drafted.shape[-1]]",
        own_numbers_law,
    ),
    "recovered from the target": Fault(
        "reference", "wanted & ~empty).unsqueeze", "wanted & empty).unsqueeze", exact_law
    ),
    "residual only at the draft token": Fault(
        "reference",
        "(target_row - draft.probs[sequence, position]).clamp(min=0)",
        "target_row.scatter(-1, layout.draft_token_ids[sequence, position].unsqueeze(-1), 0.0)",
        exact_law,
    ),
    "acceptance by the target alone": Fault(
        "scoring",
        "| (target_prob >= draft_prob)",
        "& (accept_uniforms[:, :gamma] < target_prob)",
        exact_law,
    ),
    "noise shared by draft and verify": Fault(
        "layout", "random.VERIFY_PURPOSE", "random.DRAFT_PURPOSE", own_numbers_law
    ),
    "one uniform accepts and emits": Fault(
        "reference",
        "emission_uniforms[sequence, num_accepted])",
        "layout_accept[sequence, num_accepted])",
        own_numbers_law,
    ),
    "position not advanced": Fault(
        "layout", "position.unsqueeze(-1) + offsets", "position.unsqueeze(-1) + 0 * offsets", own_numbers_law
    ),
    "bonus position off by one": Fault(
        "layout",
        "position.unsqueeze(-1) + offsets",
        "position.unsqueeze(-1) + offsets + 1",
        bonus_uses_its_own_position,
    ),
    "rounds share their numbers": Fault(
        "layout", "position.unsqueeze(-1) + offsets", "0 * position.unsqueeze(-1) + offsets", two_round_law
    ),
    "half-precision uniforms": Fault(
        "random",
        "upper_bits.to(torch.float64) * 2.0**-53",
        "(upper_bits.to(torch.float64) * 2.0**-53).bfloat16().double()",
        flat_row_law,
    ),
    "draft at another temperature": Fault(
        "reference", "_per_position(draft_temperature,", "_per_position(draft_temperature * 1.1,", own_numbers_law
    ),
    "Cartesian indexing": Fault(
        "reference",
        "target.probs[sequence, num_accepted]",
        "target.probs[sequence[:1], num_accepted]",
        rows_are_independent,
    ),
    "ties dropped": Fault(
        "distribution",
        "torch.where(values >= threshold, weights, 0.0)\n    one_hot",
        "torch.where(values > threshold, weights, 0.0)\n    one_hot",
        ties_are_kept,
    ),
    "arg-max takes the last of a tie": Fault(
        "distribution", "ids, values.shape[-1]).amin(dim=-1)", "ids, -1).amax(dim=-1)", ties_are_kept
    ),
    "seed cut to 32 bits": Fault("random", "(seed_bits >> 32) & _WORD)", "(seed_bits >> 32) & 0)", seeds_use_64_bits),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault | None], None]]:
    """Return a function that serves the reference backend by a copy of the reference with a fault."""
    libraries: list[torch.library.Library] = []

    def install_copy(fault: Fault | None) -> None:
        copies: dict[str, ModuleType] = {}
        for name in MODULES:
            source = (Path(specker.__file__).parent / f"{name}.py").read_text()
            if fault is not None and fault.module == name:
                assert source.count(fault.old) >= 1, f"the text of the fault is gone: {fault.old}"
                source = source.replace(fault.old, fault.new)
                source = source.replace(
                    "emitted = _emit(",
                    "global layout_accept; layout_accept = accept_uniforms\n    emitted = _emit(",
                )
            spec = importlib.util.spec_from_loader(f"faulty_{name}", loader=None)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            for other in copies:
                source = source.replace(f"from specker.{other} import", f"from faulty_{other} import")
            source = source.replace("from specker import random", "import faulty_random as random")
            monkeypatch.setitem(sys.modules, f"faulty_{name}", module)
            exec(compile(source, f"faulty_{name}.py", "exec"), module.__dict__)
            copies[name] = module
        library = torch.library.Library("specker_reference", "IMPL")
        for operator in ("verify", "verify_plain", "sample"):
            library.impl(operator, getattr(copies["reference"], operator), "CPU")
        libraries.append(library)

    yield install_copy
    for library in libraries:
        library._destroy()


def test_the_healthy_copy_passes_every_check(install: Callable[[Fault | None], None]) -> None:
    install(None)
    with specker.backend("reference"):
        assert [check.__name__ for check in CHECKS if not check()] == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_caught(name: str, install: Callable[[Fault | None], None]) -> None:
    install(FAULTS[name])
    with specker.backend("reference"):
        assert not FAULTS[name].caught_by()
