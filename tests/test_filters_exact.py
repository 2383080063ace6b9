"""The kept sets of the C++ backend are those of a sort in float64, and of transformers' processors but for ties.

`pytest tests/test_filters_exact.py --filter-rows 1000000` checks so many rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation import logits_process

import specker

from . import filter_rows
from .filter_rows import KINDS, Filters, Kept, kept_by_sorting

pytestmark = [pytest.mark.usefixtures("on_backend"), pytest.mark.parametrize("backend", ["cpp"])]
CHUNK = 1000
# Up to 4096 entries take one path of the kernels; larger rows are sampled and binned.
LARGE_VOCABS = (4096, 4097, 9000, 20000)
LARGE_CHUNK = 20


def kept_counts(logits: torch.Tensor, filters: Filters, kept: Kept) -> npt.NDArray[np.int64]:
    """Return how many values the receipt's threshold keeps; its weight sum and its token belong to them."""
    result = specker.sample(logits, **filters.as_tensors(), seed=0)
    result.raise_for_status()
    threshold = result.receipt.threshold.numpy()
    counts = np.asarray((logits.double().numpy() >= threshold[:, None]).sum(axis=1))
    same = counts == kept.count
    np.testing.assert_allclose(result.receipt.values[:, 3].numpy()[same], kept.weight_sum[same], rtol=1e-6)
    assert (result.receipt.token_logit >= result.receipt.threshold).all()
    return counts


def check_chunk(kind: str, generator: np.random.Generator, rows: int, vocab: int, seen: Counter[str]) -> None:
    """Compare so many rows of one kind and vocabulary."""
    logits = filter_rows.random_logits(kind, generator, rows, vocab)
    filters = filter_rows.random_filters(generator, rows, vocab)
    if kind == "float32 boundary" or kind in filter_rows.ROUNDED:
        filters = filter_rows.at_a_boundary(kind, generator, logits.double().numpy(), filters)
    kept = kept_by_sorting(logits.double().numpy(), filters)
    counts = kept_counts(logits, filters, kept)
    wrong = np.flatnonzero((counts < kept.fewest) | (counts > kept.most))
    if wrong.size:
        row = int(wrong[0])
        values = [float(parameter[row]) for parameter in filters[:4]]
        pytest.fail(f"{kind}, vocab {vocab}: kept {counts[row]}, expected {kept.count[row]}; {values}; {logits[row]}")
    rounded = kept.fewest < kept.most
    seen[kind] += rows
    seen["large"] += rows if vocab > min(LARGE_VOCABS) else 0
    seen["left to rounding"] += 0 if kind in filter_rows.ROUNDED else int(rounded.sum())
    seen["on a boundary"] += int(rounded.sum()) if kind in filter_rows.ROUNDED else 0
    seen["other side of it"] += int((counts != kept.count).sum())


def test_kept_sets_are_those_of_a_sort(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    wanted = request.config.getoption("--filter-rows")
    generator, seen = np.random.default_rng(0), Counter[str]()
    while sum(seen[kind] for kind in KINDS) < wanted:
        for kind in KINDS:
            check_chunk(kind, generator, CHUNK, int(generator.integers(8, 301)), seen)
            check_chunk(kind, generator, LARGE_CHUNK, int(generator.choice(LARGE_VOCABS)), seen)
    record_property("rows", dict(seen))
    assert seen["left to rounding"] <= 1e-5 * wanted
    assert seen["on a boundary"] > 0.5 * seen["float64 boundary"]


def probed(probs: torch.Tensor, top_p: torch.Tensor, tokens: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Return whether each token of `(rows, count)` has probability after top-p, as verify tells."""
    rows, count = tokens.shape
    target = probs.unsqueeze(1).expand(rows, count + 1, probs.shape[1])
    result = specker.verify_from_probs(tokens, target, top_p=top_p, seed=0, return_accept_probs=True)
    assert result.accept_probs is not None
    return np.asarray((result.accept_probs > 0).numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("vocab", "share"), [(8, 0.2), (100, 0.2), (300, 0.1), (5000, 0.004), (20000, 0.001)])
def test_a_top_p_in_the_last_place_of_a_prefix_sum_decides(
    dtype: torch.dtype, vocab: int, share: float, request: pytest.FixtureRequest
) -> None:
    rows = int(max(40, share * request.config.getoption("--filter-rows") / 4))
    generator = np.random.default_rng(vocab)
    misses = Counter[str]()
    for begin in range(0, rows, 500):
        count = min(500, rows - begin)
        made = filter_rows.dyadic_rows(generator, count, vocab, dtype)
        zeros = np.zeros(count)
        filters = Filters(zeros + 1, zeros.astype(np.int64), made.top_p, zeros, dtype)
        values = made.probs.astype(np.float64)
        kept = kept_by_sorting(values, filters, is_probs=True).count
        order = np.argsort(-values, axis=1, kind="stable")
        edge = np.stack([kept - 1, np.minimum(kept, vocab - 1)], axis=1)
        probes = order if vocab <= 8 else np.take_along_axis(order, edge, axis=1)
        rank = np.arange(vocab)[None, :] if vocab <= 8 else edge
        got = probed(torch.from_numpy(made.probs), torch.from_numpy(made.top_p).to(dtype), torch.from_numpy(probes))
        np.testing.assert_array_equal(got, rank < kept[:, None])
        # One place higher and the prefix no longer reaches top-p: the rows do lie at the boundary.
        beyond = filters._replace(top_p=np.nextafter(made.top_p, 2.0))
        changed = kept_by_sorting(values, beyond, is_probs=True).count > kept
        misses["at it"] += int(changed[made.offset == 0].sum())
        misses["beside it"] += int(changed[made.offset == 1].sum())
    assert misses["at it"] > rows / 10
    assert misses["beside it"] == 0


class Scalars(NamedTuple):
    """Parameters of a whole batch, as transformers takes them."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    def filters(self, rows: int) -> Filters:
        """Return the same for each row."""
        temperature, top_k, top_p, min_p = (np.full(rows, value) for value in self)
        return Filters(temperature, top_k.astype(np.int64), top_p, min_p, torch.float64)


SCALARS = [
    Scalars(*values) for values in itertools.product((0.7, 1.0, 1.5), (0, 20), (0.3, 0.9, 0.99, 1.0), (0.0, 0.02))
]  # fmt: skip


def kept_by_transformers(logits: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """Return which logits transformers' processors keep."""
    ids, scores = torch.zeros(logits.shape[0], 1, dtype=torch.int64), logits.clone()
    processors = [logits_process.TemperatureLogitsWarper(scalars.temperature)] if scalars.temperature != 1 else []
    if scalars.top_k:
        processors.append(logits_process.TopKLogitsWarper(scalars.top_k))
    if scalars.top_p < 1:
        processors.append(logits_process.TopPLogitsWarper(scalars.top_p))
    if scalars.min_p:
        processors.append(logits_process.MinPLogitsWarper(scalars.min_p))
    for processor in processors:
        scores = processor(ids, scores)
    return torch.isfinite(scores)


def kept_by_us(logits: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """Return which logits we keep."""
    receipt = specker.sample(logits, **scalars._asdict(), seed=0).receipt
    return logits.double() >= receipt.threshold.unsqueeze(-1)


def near_a_boundary(logits: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """Return which rows the processors' float32 may decide otherwise: a share within 1e-6 of top-p or of min-p."""
    kept = kept_by_sorting(logits.double().numpy(), scalars.filters(logits.shape[0]), slack=1e-6)
    return torch.from_numpy(kept.fewest < kept.most)


def test_transformers_processors_keep_the_same_tokens() -> None:
    generator, near, filtered = torch.Generator().manual_seed(0), 0, 0
    for scalars in SCALARS:
        logits = 3 * torch.randn(500, 300, generator=generator)
        # Without equal values in a row, every set of tokens that the processors keep is one of ours.
        logits = logits[[row.unique().numel() == 300 for row in logits]]
        ours, theirs = kept_by_us(logits, scalars), kept_by_transformers(logits, scalars)
        excused = near_a_boundary(logits, scalars)
        assert torch.equal(ours[~excused], theirs[~excused]), scalars
        near += int(excused.sum())
        filtered += int((~ours).any(dim=-1).sum())
    assert near <= 1e-3 * 500 * len(SCALARS)
    assert filtered > 0.9 * 500 * (len(SCALARS) - 3)


def test_of_tied_tokens_at_a_top_p_boundary_transformers_drops_some() -> None:
    generator, larger = torch.Generator().manual_seed(1), 0
    for scalars in SCALARS:
        logits = (8 * torch.randn(500, 300, generator=generator)).round() / 4
        ours, theirs = kept_by_us(logits, scalars), kept_by_transformers(logits, scalars)
        usual = ~near_a_boundary(logits, scalars)
        ours, theirs, logits = ours[usual], theirs[usual], logits[usual]
        assert (ours | ~theirs).all(), scalars
        # What we keep beyond theirs are the tokens tied with the smallest that both keep.
        smallest = torch.where(theirs, logits, math.inf).amin(dim=-1, keepdim=True)
        assert torch.equal(ours & ~theirs, (logits == smallest) & ~theirs), scalars
        larger += int((ours & ~theirs).any(dim=-1).sum())
        if scalars.top_p == 1:
            assert torch.equal(ours, theirs), scalars
    assert larger > 1000


@pytest.mark.parametrize("logits", [[0.4, 0.2, 0.2, 0.2], [0.2, 0.4, 0.2, 0.2]])
def test_the_smallest_tie_at_a_top_p_boundary(logits: list[float]) -> None:
    rows, scalars = torch.tensor([logits]).log(), Scalars(1.0, 0, 0.5, 0.0)
    assert kept_by_us(rows, scalars).sum() == 4
    assert kept_by_transformers(rows, scalars).sum() == 2


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "top_k": lambda top_k: torch.where(top_k > 1, top_k - 1, top_k),
    "top_p": lambda top_p: (top_p - 1e-4).clamp(min=1e-9),
    "min_p": lambda min_p: min_p * 1.001,
    "temperature": lambda temperature: temperature * 1.0001,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_slightly_wrong_filter_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, right = np.random.default_rng(0), Filters.as_tensors

    def wrong(filters: Filters) -> dict[str, torch.Tensor]:
        tensors = right(filters)
        return {**tensors, name: CHANGES[name](tensors[name])}

    monkeypatch.setattr(Filters, "as_tensors", wrong)
    with pytest.raises((pytest.fail.Exception, AssertionError), match=r"kept \d+, expected|Not equal to tolerance"):
        check_chunk("random", generator, CHUNK, 300, Counter())
