"""Random rows with filters, and which of their tokens a sort in float64 keeps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]
KINDS = (
    "random", "tied", "peaked", "flat", "geometric", "one above 40 %", "masked", "float32 boundary", "float64 boundary",
    "top-p below 1",
)  # fmt: skip
ROUNDED = ("float64 boundary", "top-p below 1")
"""Kinds whose top-p is so near a prefix sum that the order of summing decides."""
ROUNDING = 1e-13
"""Share of a row's mass within which two orders of summing it in float64 may disagree."""


class Filters(NamedTuple):
    """Parameters of each row of a batch; 0, 1 and 0 are off."""

    temperature: Array
    top_k: npt.NDArray[np.int64]
    top_p: Array
    min_p: Array
    top_p_dtype: torch.dtype

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """Return the arguments of `sample`."""
        arrays = {"temperature": self.temperature, "top_k": self.top_k, "min_p": self.min_p}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {**tensors, "top_p": torch.from_numpy(self.top_p).to(self.top_p_dtype)}


class Kept(NamedTuple):
    """What the filters keep of each row: its `count` largest values, and nothing else."""

    count: npt.NDArray[np.int64]
    fewest: npt.NDArray[np.int64]
    """The same, where rounding decides to keep the fewest."""
    most: npt.NDArray[np.int64]
    """The same, where rounding decides to keep the most."""
    weight_sum: Array
    """Mass of the kept, relative to the largest weight."""


def last_tied(descending: Array) -> npt.NDArray[np.int64]:
    """Return for each entry of sorted rows where the last entry equal to it stands."""
    size = descending.shape[1]
    ends = np.full(descending.shape, size - 1)
    ends[:, :-1] = np.where(descending[:, :-1] != descending[:, 1:], np.arange(size - 1), size - 1)
    return np.asarray(np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1])


def kept_by_sorting(values: Array, filters: Filters, is_probs: bool = False, slack: float = ROUNDING) -> Kept:
    """Return what top-k, top-p and min-p keep, one after another, ties at each threshold included.

    `slack` is how much of a row's mass, and of a min-p threshold, rounding may shift.
    """
    descending = -np.sort(-values, axis=1)
    temperature = filters.temperature[:, None]
    weights = descending / descending[:, :1] if is_probs else np.exp((descending - descending[:, :1]) / temperature)
    size = values.shape[1]
    top_k = np.where((filters.top_k > 0) & (filters.top_k < size), filters.top_k, size)
    left = descending >= np.take_along_axis(descending, top_k[:, None] - 1, axis=1)
    mass = np.cumsum(np.where(left, weights, 0.0), axis=1)
    total = mass[:, -1]
    # Mass of all that is at least as large as each entry: that of the last one tied with it.
    ends = last_tied(descending)
    reached = np.take_along_axis(mass, ends, axis=1)
    min_p = np.where(filters.min_p > 0, filters.min_p, 1.0)[:, None]
    share = descending[:, :1] * min_p if is_probs else descending[:, :1] + temperature * np.log(min_p)

    def count(shift: float) -> npt.NDArray[np.int64]:
        wanted = np.where(filters.top_p < 1, filters.top_p, 1.0) * total + shift * total
        short = np.minimum((reached < wanted[:, None]).sum(axis=1), size - 1)
        nucleus = np.where(filters.top_p < 1, np.take_along_axis(ends, short[:, None], axis=1)[:, 0] + 1, size)
        floor = (descending >= share - shift * np.abs(share)).sum(axis=1)
        floor = np.where(filters.min_p > 0, np.maximum(floor, 1), size)
        return np.minimum(np.minimum(left.sum(axis=1), nucleus), floor)

    kept = count(0.0)
    weight_sum = np.take_along_axis(np.cumsum(weights, axis=1), kept[:, None] - 1, axis=1)[:, 0]
    return Kept(kept, np.minimum(count(-slack), kept), np.maximum(count(slack), kept), weight_sum)


def random_filters(generator: np.random.Generator, rows: int, vocab: int) -> Filters:
    """Return parameters of which each row has some, all or none."""
    top_k = np.where(generator.random(rows) < 0.5, 0, generator.integers(1, vocab + 1, rows))
    top_p = np.where(generator.random(rows) < 0.3, 1.0, generator.random(rows))
    top_p = np.where(generator.random(rows) < 0.1, generator.choice([1e-9, 0.99, 0.9999], rows), top_p)
    min_p = np.where(generator.random(rows) < 0.7, 0.0, generator.random(rows) ** 4)
    return Filters(generator.choice([1.0, 1.0, 0.7, 1.3, 0.1], rows), top_k, top_p, min_p, torch.float64)


def random_logits(kind: str, generator: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Return rows of one kind."""
    logits = generator.standard_normal((rows, vocab)) * generator.choice([1.0, 3.0], (rows, 1))
    if kind == "peaked":
        logits[np.arange(rows), generator.integers(0, vocab, rows)] += generator.uniform(4, 30, rows)
    elif kind == "flat":
        logits *= generator.choice([1e-6, 1e-3, 1e-1], (rows, 1))
    elif kind == "geometric":
        rate = generator.choice([0.01, 0.1, 0.7], (rows, 1))
        logits = generator.permuted(np.tile(-rate * np.arange(vocab), 1), axis=1)
    elif kind == "one above 40 %":
        share = generator.uniform(0.4, 0.99, rows)
        logits[:, vocab // 2] = -np.inf
        logits[:, vocab // 2] = np.log(np.exp(logits).sum(axis=1) * share / (1 - share))
    elif kind == "masked":
        logits[generator.random((rows, vocab)) < generator.choice([0.3, 0.9], (rows, 1))] = -np.inf
        logits[:, 0] = 0.0
    return torch.from_numpy(logits).to(torch.bfloat16 if kind == "tied" else torch.float32)


def at_a_boundary(kind: str, generator: np.random.Generator, values: Array, filters: Filters) -> Filters:
    """Return the filters with a top-p within one unit in the last place of a prefix sum of the sorted row."""
    count, vocab = values.shape
    if kind == "top-p below 1":
        return filters._replace(top_p=1 - 2.0 ** -generator.integers(44, 54, count))
    dtype = torch.float32 if kind == "float32 boundary" else torch.float64
    descending = -np.sort(-values, axis=1)
    weights = np.exp((descending - descending[:, :1]) / filters.temperature[:, None])
    top_k = np.where(filters.top_k > 0, filters.top_k, vocab)
    mass = np.cumsum(np.where(np.arange(vocab) < top_k[:, None], weights, 0.0), axis=1)
    prefix = mass[np.arange(count), generator.integers(0, vocab, count)] / mass[:, -1]
    return filters._replace(top_p=beside(generator, prefix, dtype), top_p_dtype=dtype)


def beside(generator: np.random.Generator, share: Array, dtype: torch.dtype) -> Array:
    """Return each number, or one of its neighbours in a dtype."""
    numbers = share.astype(np.float32 if dtype == torch.float32 else np.float64)
    target = generator.choice(np.array([0.0, 2.0], dtype=numbers.dtype), numbers.shape)
    near = np.where(generator.random(numbers.shape) < 1 / 3, numbers, np.nextafter(numbers, target))
    return np.asarray(near, dtype=np.float64)


class DyadicRows(NamedTuple):
    """Rows of probabilities whose sums are exact in float64 in any order, with a top-p at a prefix sum."""

    probs: npt.NDArray[np.float32]
    top_p: Array
    offset: npt.NDArray[np.int64]
    """-1, 0 or 1: where top-p lies beside the prefix sum, in units of its last place."""
    top_p_dtype: torch.dtype


def dyadic_rows(generator: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype) -> DyadicRows:
    """Return rows of multiples of 2^-24 that sum to 1, the largest a power of two."""
    units = 2**24
    bits = int(generator.integers(8, 24)) if vocab < 100 else 23
    largest = 2**bits
    if (units - largest) / (vocab - 1) > largest / 2:
        largest = units // 2
    spread = generator.choice([0.3, 5.0, 1000.0])
    shares = generator.dirichlet(np.full(vocab - 1, spread), rows)
    rest = units - largest - (vocab - 1)
    parts = np.floor(shares * rest).astype(np.int64) + 1
    parts[:, 0] += units - largest - parts.sum(axis=1)
    # Where a part exceeds what is to be the largest, half of the row is.
    too_large = parts.max(axis=1) > largest
    parts[too_large] = 1
    parts[too_large, 0] = units // 2 - (vocab - 2)
    heads = np.where(too_large, units // 2, largest)[:, None]
    row = generator.permuted(np.concatenate([heads, parts], axis=1), axis=1)
    descending = -np.sort(-row, axis=1)
    # The last of some tied entries, but not of the whole row.
    end = last_tied(descending)[np.arange(rows), generator.integers(0, vocab - 1, rows)]
    end = np.where(end == vocab - 1, 0, end)
    prefix = np.cumsum(descending, axis=1)[np.arange(rows), end]
    share = (prefix / units).astype(np.float32 if dtype == torch.float32 else np.float64)
    offset = generator.integers(-1, 2, rows)
    beyond = np.nextafter(share, np.where(offset < 0, 0.0, 2.0).astype(share.dtype))
    top_p = np.where(offset == 0, share, beyond).astype(np.float64)
    return DyadicRows((row / units).astype(np.float32), top_p, offset, dtype)
