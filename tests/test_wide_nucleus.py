"""top-p on rows that keep more tokens than are gathered: the kept sets of the C++ backend are those of a sort."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch

import specker

from .filter_rows import Filters, kept_by_sorting

pytestmark = [pytest.mark.usefixtures("on_backend"), pytest.mark.parametrize("backend", ["cpp"])]
# Vocabularies behind a bound of the kernels, with a last shard that is short, and of real models.
# At the last two a bracket by the sample holds more than can be gathered, and is narrowed.
VOCABS = (16_385, 20_001, 32_000, 50_257, 151_936, 262_144)
ROWS = 12


def spread_rows(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows whose nucleus is wide, each kind for a reason."""
    noise = torch.randn(ROWS, vocab, generator=generator)
    return {
        # The weights of a wide row, and its edge among many entries of like weight.
        "normal": 2.0 * noise,
        # Half-precision logits are tied in hundreds.
        "tied": (2.0 * noise).bfloat16().float(),
        # A trend over the ids, as in vocabularies sorted by frequency, which a sample has to follow.
        "trend": noise - torch.linspace(0.0, 4.0, vocab),
        # All entries alike: the bracket holds more than can be gathered.
        "flat": 1e-3 * noise,
        # One token with most of the mass; the rest is a wide tail.
        "peak": torch.cat([torch.full((ROWS, 1), 9.0), 1.5 * noise[:, 1:]], dim=-1),
        "masked": torch.where(noise > 1.0, float("-inf"), 1.8 * noise),
    }[kind]


def random_filters(generator: np.random.Generator, min_p: float) -> Filters:
    """Return top-p from almost nothing to almost all, alone or before a min-p."""
    top_p = np.concatenate([generator.uniform(0.3, 0.99, ROWS - 3), [0.9999, 1 - 1e-9, 0.02]])
    temperature = generator.uniform(0.7, 1.4, ROWS)
    return Filters(temperature, np.zeros(ROWS, dtype=np.int64), top_p, np.full(ROWS, min_p), torch.float64)


@pytest.mark.parametrize("min_p", [0.0, 1e-4])
@pytest.mark.parametrize("kind", ["normal", "tied", "trend", "flat", "peak", "masked"])
def test_wide_kept_sets_are_those_of_a_sort(kind: str, min_p: float) -> None:
    wide = 0
    for vocab in VOCABS:
        generator = torch.Generator().manual_seed(vocab)
        logits = spread_rows(kind, vocab, generator)
        filters = random_filters(np.random.default_rng(vocab), min_p)
        kept = kept_by_sorting(logits.double().numpy(), filters)
        receipt = specker.sample(logits, **filters.as_tensors(), seed=0).receipt
        counts = (logits.double() >= receipt.threshold.unsqueeze(-1)).sum(dim=-1).numpy()
        assert ((counts >= kept.fewest) & (counts <= kept.most)).all(), (vocab, counts, kept)
        # The mass that emission draws from, kept apart by shards, is that of the kept set.
        np.testing.assert_allclose(receipt.values[:, 3].numpy(), kept.weight_sum, rtol=1e-6)
        wide += int((kept.count > 4096).sum())
    assert wide > ROWS


def test_a_wide_nucleus_of_a_large_vocabulary_costs_some_plain_rows() -> None:
    logits = torch.randn(8, 151_936, generator=torch.Generator().manual_seed(3))
    times: dict[float, list[float]] = {0.95: [], 1.0: []}
    for _ in range(9):
        for top_p, taken in times.items():
            start = time.process_time()
            specker.sample(logits, top_p=top_p, seed=0)
            taken.append(time.process_time() - start)
    # 6 to 12 here; a search of the whole row by its bits takes 40.
    assert statistics.median(times[0.95]) < 25 * statistics.median(times[1.0])


def test_a_wide_threshold_is_sharp() -> None:
    logits = spread_rows("normal", 32_000, torch.Generator().manual_seed(1))
    counts = []
    for top_p in (0.9, 0.9 + 2e-6):
        threshold = specker.sample(logits, top_p=top_p, seed=0).receipt.threshold
        counts.append((logits.double() >= threshold.unsqueeze(-1)).sum(dim=-1))
    assert (counts[1] >= counts[0]).all()
    assert (counts[1] > counts[0]).any()


def test_a_draw_falls_where_the_kept_mass_lies() -> None:
    vocab, draws = 20_000, 4_000
    logits = spread_rows("trend", vocab, torch.Generator().manual_seed(2))[:1]
    result = specker.sample(logits.expand(draws, -1), top_p=0.8, seed=0)
    kept = logits[0].double() >= result.receipt.threshold[0]
    assert kept[result.token_ids].all()
    mass = torch.where(kept, logits[0].double().exp(), 0.0)
    # Shares of the shards, which are drawn from first.
    share = torch.stack([part.sum() for part in mass.split(4096)]) / mass.sum()
    counted = torch.bincount(result.token_ids // 4096, minlength=len(share)).double()
    expected = share * draws
    statistic = float(((counted - expected).square() / expected).sum())
    # The quantile of chi-square with 4 degrees of freedom at an error rate of 1e-6.
    assert statistic < 33.4
