"""Laws under sampling parameters, in long tails, and over chains of rounds, all with the library's own numbers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

import specker

from . import laws

pytestmark = pytest.mark.law
ERROR_RATE = 1e-6
PARAMETERS = {
    "plain": specker.Sampling(),
    "warm": specker.Sampling(temperature=1.7),
    "greedy": specker.Sampling(temperature=0.0),
    "top-k": specker.Sampling(top_k=3),
    "top-p": specker.Sampling(temperature=0.9, top_p=0.7),
    "min-p": specker.Sampling(min_p=0.25),
    "all four": specker.Sampling(temperature=0.8, top_k=4, top_p=0.9, min_p=0.05),
}
TARGET = np.array([[1.2, 0.3, -0.5, 0.0, 0.9, -2.0], [0.1, 1.5, 0.2, -0.7, 0.4, 0.8], [-0.3, 0.6, 0.5, 1.1, 0.0, -1.0]])
DRAFTS = {
    "ranked alike": TARGET[:2] * 0.6 + np.array([[0.3, -0.2, 0.1, 0.0, -0.1, 0.2]] * 2),
    "ranked opposite": -TARGET[:2],
}


@pytest.fixture
def rounds(on_backend: str, device: torch.device) -> int:
    """Return how many rounds a backend runs in a test; the interpreter runs too few to judge a law."""
    if on_backend == "triton" and device.type == "cpu":
        pytest.skip("too many sequences for the interpreter")
    return {"reference": 70_000, "cpp": 1_000_000, "triton": 10_000_000}[on_backend]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draft_name", DRAFTS)
def test_mixed_parameters_in_one_batch(draft_name: str, dtype: torch.dtype, rounds: int, device: torch.device) -> None:
    group, parameters = _mixed(rounds, device)
    target, draft = (torch.from_numpy(rows).to(dtype).to(device) for rows in (TARGET, DRAFTS[draft_name]))
    seed = torch.arange(rounds, device=device)
    steps = [specker.sample(draft[step].expand(rounds, 6), seed=seed, position=step, **parameters) for step in range(2)]
    result = specker.verify(
        torch.stack([step.token_ids for step in steps], dim=1),
        target.expand(rounds, 3, 6),
        draft.expand(rounds, 2, 6),
        draft_receipt=specker.DraftReceipt.stack([step.receipt for step in steps]),
        seed=seed,
        **parameters,
    )
    # Where greedy drafts and targets disagree the draft token has no draft mass to speak of, and no fault of its own.
    assert int(result.status.max()) == 0
    for index, (name, sampling) in enumerate(PARAMETERS.items()):
        law = laws.joint_law(
            laws.filtered(target.double().cpu().numpy(), *sampling),
            laws.filtered(draft.double().cpu().numpy(), *sampling),
            gamma=2,
        )
        assert laws.p_value(laws.outcome_counts(result, group == index), law) > ERROR_RATE, name


def _mixed(rounds: int, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the parameter group of every sequence, and the parameters as tensors."""
    group = torch.arange(rounds, device=device) % len(PARAMETERS)
    table = list(PARAMETERS.values())
    columns = {
        "temperature": torch.tensor([entry.temperature for entry in table], dtype=torch.float64, device=device),
        "top_k": torch.tensor([entry.top_k for entry in table], dtype=torch.int64, device=device),
        "top_p": torch.tensor([entry.top_p for entry in table], dtype=torch.float64, device=device),
        "min_p": torch.tensor([entry.min_p for entry in table], dtype=torch.float64, device=device),
    }
    return group, {name: column[group] for name, column in columns.items()}


TAILS = {
    "one logit 18 above 129,279 others": (129_280, 18.0),
    "flat 262,144": (262_144, 0.0),
}


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("name", TAILS)
def test_long_tails_keep_their_mass(name: str, backend: str, device: torch.device) -> None:
    vocab, peak = TAILS[name]
    row = torch.zeros(vocab, device=device)
    row[vocab // 3] = peak
    probs = row.double().softmax(-1)
    few = 3 if backend == "reference" else 400
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.tensor([vocab // 3]), torch.randint(0, vocab, (few,), generator=generator)]).to(device)
    lengths = _first_uniform(row, ids + 1) - _first_uniform(row, ids)
    deviation = (lengths - probs[ids]).abs()
    # Total variation is half the sum of the deviations, estimated from ids drawn uniformly besides the peak.
    assert float(deviation[0] + vocab * deviation[1:].mean()) / 2 <= 1e-6


def _first_uniform(row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return, by bisection, the smallest uniform that emits an id >= `ids`; 1 where there is none."""
    low, high = torch.zeros(len(ids), dtype=torch.float64), torch.ones(len(ids), dtype=torch.float64)
    low, high = low.to(row.device), high.to(row.device)
    no_tokens = torch.empty(len(ids), 0, dtype=torch.int64, device=row.device)
    for _ in range(50):
        middle = (low + high) / 2
        uniforms = middle.reshape(-1, 1, 1).expand(-1, 1, 2)
        emitted = specker.verify(no_tokens, row.expand(len(ids), 1, -1), uniforms=uniforms).token_ids[:, 0]
        low, high = torch.where(emitted < ids, middle, low), torch.where(emitted < ids, high, middle)
    return torch.where(ids >= len(row), 1.0, high)


@pytest.mark.parametrize("draft_kind", ["model", "point mass"])
def test_chains_of_rounds_have_the_target_law(draft_kind: str, rounds: int, device: torch.device) -> None:
    chains = min(rounds, 300_000)
    counts = _chain_counts(chains, device, draft_kind, lambda position: position)
    assert laws.p_value(counts, _chain_law()) > ERROR_RATE


def test_power_chains_that_never_move_their_position_are_caught(rounds: int, device: torch.device) -> None:
    chains = min(rounds, 100_000)
    counts = _chain_counts(chains, device, "model", lambda position: 0 * position)
    assert laws.p_value(counts, _chain_law()) < ERROR_RATE


TARGET_STEP = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
DRAFT_STEP = np.array([[0.3, 0.3, 0.4], [0.5, 0.2, 0.3], [0.2, 0.6, 0.2]])
LENGTH = 4


def _chain_counts(
    chains: int, device: torch.device, draft_kind: str, position_of: Callable[[torch.Tensor], torch.Tensor]
) -> Counter[str]:
    """Decode LENGTH tokens of a Markov chain from token 0, in rounds of gamma 2, and count the sequences."""
    target, draft = (torch.from_numpy(np.log(step)).float().to(device) for step in (TARGET_STEP, DRAFT_STEP))
    seed = torch.arange(chains, device=device)
    tokens = torch.zeros(chains, LENGTH + 4, dtype=torch.int64, device=device)
    length = torch.ones(chains, dtype=torch.int64, device=device)
    for _ in range(LENGTH):
        last = tokens.gather(1, (length - 1).unsqueeze(1)).squeeze(1)
        position = position_of(length)
        path, draft_rows = [last], []
        for step in range(2):
            draft_rows.append(draft[path[-1]])
            drawn = specker.sample(draft_rows[-1], seed=seed, position=position + step).token_ids
            path.append(drawn if draft_kind == "model" else draft_rows[-1].argmax(-1))
        result = specker.verify(
            torch.stack(path[1:], dim=1),
            torch.stack([target[token] for token in path], dim=1),
            torch.stack(draft_rows, dim=1) if draft_kind == "model" else None,
            seed=seed,
            position=position,
        )
        emitted = torch.arange(3, device=device) < result.num_emitted.unsqueeze(1)
        columns = length.unsqueeze(1) + torch.arange(3, device=device)
        emitted &= (columns <= LENGTH) & (length <= LENGTH).unsqueeze(1)
        rows = torch.arange(chains, device=device).unsqueeze(1).expand_as(columns)
        tokens[rows[emitted], columns[emitted]] = result.token_ids[emitted]
        length = torch.minimum(length + result.num_emitted, torch.full_like(length, LENGTH + 1))
    distinct, counts = torch.unique(tokens[:, 1 : LENGTH + 1], dim=0, return_counts=True)
    return Counter(
        {",".join(map(str, row)): count for row, count in zip(distinct.tolist(), counts.tolist(), strict=True)}
    )


def _chain_law() -> dict[str, float]:
    law = {}
    for sequence in np.ndindex(*(3,) * LENGTH):
        path = (0, *sequence)
        law[",".join(map(str, sequence))] = math.prod(
            TARGET_STEP[before, after] for before, after in itertools.pairwise(path)
        )
    return law
