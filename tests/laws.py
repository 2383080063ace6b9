"""Exact enumeration and goodness of fit: the tools of every test of a law."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats

from specker import VerifyResult

ORACLES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "oracles.json").read_text())
Verify = Callable[..., VerifyResult]
_CPU = torch.device("cpu")


class Rows(NamedTuple):
    """A target and a draft distribution as exact fractions."""

    target: tuple[Fraction, ...]
    draft: tuple[Fraction, ...]


def oracle_rows(name: str) -> Rows:
    """Return the fractions of a distribution of the oracles."""
    entry = ORACLES["distributions"][name]
    return Rows(tuple(map(Fraction, entry["target"])), tuple(map(Fraction, entry["draft"])))


def logits_of(probs: Sequence[Fraction], *leading: int) -> torch.Tensor:
    """Return float32 logits of a distribution, repeated over leading axes; -inf where there is no mass."""
    row = torch.tensor([math.log(value) if value else -math.inf for value in probs], dtype=torch.float32)
    return row.expand(*leading, len(probs))


def enumerated_law(
    verify: Verify, rows: Rows, gamma: int, *, emissions: bool = True, device: torch.device = _CPU
) -> dict[str, Fraction]:
    """Return the joint law of (num_accepted, emitted tokens) of a verify function, as exact fractions.

    Every draft block is weighted by its exact probability; the uniforms run over the midpoints of grids fine enough
    that every threshold of the rule lies on a grid line, so counting cells integrates over them without error.
    """
    accept_grid = _grid([min(Fraction(1), t / d) for t, d in zip(*rows, strict=True) if d])
    emission_grid = _grid([*itertools.accumulate(rows.target), *_residual_cdf(rows)]) if emissions else 1
    blocks = [block for block in itertools.product(range(len(rows.draft)), repeat=gamma) if _weight(rows, block)]
    cells = list(itertools.product(range(accept_grid), repeat=gamma))
    block_of, cell_of, emission_of = (
        torch.from_numpy(axis.reshape(-1))
        for axis in np.meshgrid(range(len(blocks)), range(len(cells)), range(emission_grid), indexing="ij")
    )
    batch = len(block_of)
    uniforms = torch.empty(batch, gamma + 1, 2, dtype=torch.float64)
    uniforms[:, :gamma, 0] = (torch.tensor(cells, dtype=torch.float64).reshape(-1, gamma)[cell_of] + 0.5) / accept_grid
    uniforms[:, gamma, 0] = 0.5
    uniforms[:, :, 1] = ((emission_of.double() + 0.5) / emission_grid).unsqueeze(-1)
    result = verify(
        torch.tensor(blocks, dtype=torch.int64).reshape(-1, gamma)[block_of].to(device),
        logits_of(rows.target, batch, gamma + 1).to(device),
        logits_of(rows.draft, batch, gamma).to(device),
        uniforms=uniforms.to(device),
    )
    cell_weight = Fraction(1, len(cells) * emission_grid)
    law: dict[str, Fraction] = {}
    for (key, block), count in Counter(zip(outcome_keys(result), block_of.tolist(), strict=True)).items():
        law[key] = law.get(key, Fraction(0)) + count * cell_weight * _weight(rows, blocks[block])
    return law


def outcome_keys(result: VerifyResult) -> list[str]:
    """Return 'num_accepted|emitted token ids' of every sequence."""
    return [
        f"{accepted}|{','.join(map(str, tokens[:emitted]))}"
        for accepted, emitted, tokens in zip(
            result.num_accepted.tolist(), result.num_emitted.tolist(), result.token_ids.tolist(), strict=True
        )
    ]


def outcome_counts(result: VerifyResult, rows: torch.Tensor | None = None) -> Counter[str]:
    """Count the outcomes of all sequences, or of those that the mask `rows` picks."""
    columns = torch.cat([result.num_accepted.unsqueeze(1), result.num_emitted.unsqueeze(1), result.token_ids], dim=1)
    columns = columns if rows is None else columns[rows]
    # Numbers in a mixed base sort a hundred times faster than rows do.
    base = int(columns.max()) + 2
    code = torch.zeros(len(columns), dtype=torch.int64, device=columns.device)
    for column in columns.unbind(dim=1):
        code = code * base + column + 1
    distinct, counts = torch.unique(code, return_counts=True)
    outcomes: Counter[str] = Counter()
    for number, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        accepted, emitted, *tokens = _digits(number, base, columns.shape[1])
        outcomes[f"{accepted}|{','.join(map(str, tokens[:emitted]))}"] += count
    return outcomes


def _digits(number: int, base: int, width: int) -> list[int]:
    return [number // base**place % base - 1 for place in range(width - 1, -1, -1)]


def num_accepted_law(law: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Return the marginal law of num_accepted."""
    marginal: dict[str, Fraction] = {}
    for key, weight in law.items():
        accepted = key.split("|")[0]
        marginal[accepted] = marginal.get(accepted, Fraction(0)) + weight
    return marginal


def joint_law(target: np.ndarray, draft: np.ndarray, gamma: int) -> dict[str, float]:
    """Return the law of (num_accepted, emitted tokens) in float64, by the rule written down afresh.

    `target` is (gamma + 1, vocab), `draft` (gamma, vocab); rows do not depend on the tokens before them.
    """
    law: dict[str, float] = {}
    prefixes: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for index in range(gamma):
        overlap = np.minimum(target[index], draft[index])
        residual = target[index] - overlap
        longer: list[tuple[tuple[int, ...], float]] = []
        for tokens, weight in prefixes:
            for token in range(target.shape[1]):
                if residual[token] > 0:
                    law[f"{index}|{','.join(map(str, (*tokens, token)))}"] = weight * residual[token]
                if overlap[token] > 0:
                    longer.append(((*tokens, token), weight * overlap[token]))
        prefixes = longer
    for tokens, weight in prefixes:
        for token in range(target.shape[1]):
            if target[gamma, token] > 0:
                law[f"{gamma}|{','.join(map(str, (*tokens, token)))}"] = weight * target[gamma, token]
    return law


def p_value(counts: Mapping[str, int], law: Mapping[str, float]) -> float:
    """Return the chi-square p-value of counts under a law, cells expecting fewer than ten pooled; 0 if impossible."""
    if set(counts) - set(law):
        return 0.0
    total = sum(counts.values())
    expected = np.array([law[key] * total for key in law])
    observed = np.array([counts.get(key, 0) for key in law], dtype=np.float64)
    small = expected < 10
    if small.any():
        expected = np.append(expected[~small], expected[small].sum())
        observed = np.append(observed[~small], observed[small].sum())
    if len(expected) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the filtered distribution of rows of logits, id by id, sharing no code with the package."""
    return np.apply_along_axis(_filtered_row, -1, logits.astype(np.float64), temperature, top_k, top_p, min_p)


def _filtered_row(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    if temperature < 1e-5 or top_p <= 0:
        return np.eye(len(row))[int(row.argmax())]
    weight = np.exp((row - row.max()) / temperature)
    kept = sorted(range(len(row)), key=lambda token: -row[token])
    if 0 < top_k < len(row):
        kept = [token for token in kept if row[token] >= row[kept[top_k - 1]]]
    if top_p < 1:
        total, mass, size = sum(weight[token] for token in kept), 0.0, 0
        while size < len(kept) and mass < top_p * total:
            mass += weight[kept[size]]
            size += 1
        kept = [token for token in kept if row[token] >= row[kept[size - 1]]]
    chosen = np.array([token in kept and weight[token] >= min_p for token in range(len(row))])
    return np.where(chosen, weight, 0.0) / weight[chosen].sum()


def _weight(rows: Rows, block: Sequence[int]) -> Fraction:
    return math.prod((rows.draft[token] for token in block), start=Fraction(1))


def _residual_cdf(rows: Rows) -> list[Fraction]:
    residual = [max(t - d, Fraction(0)) for t, d in zip(*rows, strict=True)]
    mass = sum(residual)
    return [value / mass for value in itertools.accumulate(residual)] if mass else []


def _grid(thresholds: Sequence[Fraction]) -> int:
    return math.lcm(*(value.denominator for value in thresholds))
