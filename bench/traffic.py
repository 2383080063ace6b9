"""How many bytes a round reads and how many kernels it launches, next to the floor: `python -m bench.traffic`.

With T and D the bytes of a target and a draft row and rho the probability of a rejection, a round cannot read less than

    batch * (gamma * (T + D) + T + rho * D)     batch * (gamma * T + T + rho * D) with receipts of the draft's sampler

if all positions are scored at once. The model counts reads of rows by kernel, as their docstrings state them: rows that
are read again come out of the cache where the batch is small enough, and are counted all the same.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from specker.kernels import contract

from . import traffic_engines


class Round(NamedTuple):
    """What one round is asked for."""

    batch: int
    gamma: int
    vocab: int
    bytes_per_logit: int
    draft_rows: bool = True
    receipt: bool = False
    filtered: bool = False
    rejected: float = 0.76
    """Share of sequences that reject a token: 1 - 0.7 ** 4 for gamma 4 at an acceptance of 0.7."""

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.vocab * self.bytes_per_logit

    @property
    def shard(self) -> int:
        """Bytes of the one shard that a draw reads."""
        return min(self.vocab, contract.shard_size(self.vocab)) * self.bytes_per_logit


class Traffic(NamedTuple):
    """Bytes that each part of a round reads of rows, and what it launches."""

    statistics: float
    filters: float
    """Candidates, collected by a second read of every row that is filtered, and no more where they settle it."""
    residual: float
    """Emission rows that are read again: target and draft of a rejection; all target rows where filters are on."""
    draw: float
    small: float
    """Shard sums, candidates, records: written once and read by the kernels behind."""
    launches: int

    @property
    def total(self) -> float:
        """Bytes in all."""
        return self.statistics + self.filters + self.residual + self.draw + self.small


def floor(asked: Round) -> float:
    """Return the least bytes of a round."""
    draft = asked.row if asked.draft_rows else 0
    rows = asked.gamma * (asked.row + (0 if asked.receipt else draft)) + asked.row + asked.rejected * draft
    return asked.batch * rows


def launches(asked: Round) -> int:
    """Return the kernels that a round launches, whatever the batch, gamma and parameters."""
    if asked.filtered:
        return 5
    return 3 if asked.draft_rows else 2


def traffic(asked: Round) -> Traffic:
    """Return the bytes of a round as the kernels read them."""
    batch, gamma, row = asked.batch, asked.gamma, asked.row
    streamed = gamma + 1 + (gamma if asked.draft_rows and not asked.receipt else 0)
    rejections = batch * asked.rejected if asked.draft_rows else 0.0
    again = batch * row if asked.filtered else rejections * row
    shards = -(-asked.vocab // contract.shard_size(asked.vocab))
    # A maximum and a sum a shard, written once; every program of the residual and of the draw merges them.
    sums = batch * streamed * shards * 12 * 3
    candidates = batch * streamed * contract.MAX_CANDIDATES * 4 if asked.filtered else 0
    return Traffic(
        statistics=batch * streamed * row,
        filters=batch * streamed * row if asked.filtered else 0.0,
        residual=again + rejections * row,
        draw=batch * asked.shard + rejections * asked.shard,
        small=sums + candidates,
        launches=launches(asked),
    )


CASES = {
    "rows": {},
    "receipt": {"receipt": True},
    "point mass": {"draft_rows": False},
    "filters": {"filtered": True},
    "filters, receipt": {"filtered": True, "receipt": True},
    "filters, point mass": {"filtered": True, "draft_rows": False},
}


def ours(asked: Round) -> traffic_engines.Counts:
    """Return launches, sweeps over rows a sequence, and bytes of one round, small buffers included."""
    found = traffic(asked)
    moved = found.statistics + found.filters + found.residual
    return traffic_engines.Counts(found.launches, moved / (asked.batch * asked.row), found.total)


def compare(batch: int, gamma: int, vocab: int) -> list[tuple[str, traffic_engines.Counts, float]]:
    """Return (who, counts, bytes by those of the floor) for this package and for other engines, without filters."""
    asked = Round(batch, gamma, vocab, 2)
    rows = [("specker", ours(asked)), ("specker, receipt", ours(asked._replace(receipt=True)))]
    rows += [
        (engine.name, traffic_engines.counts(engine, batch, gamma, vocab, asked.rejected))
        for engine in traffic_engines.ENGINES
    ]
    return [(name, counted, counted.bytes / floor(asked)) for name, counted in rows]


def main() -> None:
    """Print one line a case, megabytes by part, then one line an engine."""
    heading = ("statistics", "filters", "residual", "draw", "small", "total", "floor", "ratio", "launches")
    for batch, vocab in ((1, 128_256), (32, 128_256), (256, 151_936)):
        sys.stdout.write(f"\nbatch {batch} x gamma 4 x {vocab:,} bfloat16, MB\n{'':22}")
        sys.stdout.write("".join(f"{name:>12}" for name in heading) + "\n")
        for name, flags in CASES.items():
            asked = Round(batch, 4, vocab, 2, **flags)
            found, least = traffic(asked), floor(asked)
            megabytes = [value / 1e6 for value in (*found[:5], found.total, least)]
            line = "".join(f"{value:12.2f}" for value in megabytes) + f"{found.total / least:12.2f}{found.launches:12}"
            sys.stdout.write(f"{name:22}{line}\n")
    sys.stdout.write(f"\nbatch 32 x gamma 4 x 128,256 bfloat16, draft rows, no filters\n{'':36}{'launches':>10}")
    sys.stdout.write(f"{'sweeps':>10}{'MB':>10}{'by floor':>10}\n")
    for name, counted, ratio in compare(32, 4, 128_256):
        sys.stdout.write(
            f"{name:36}{counted.launches:10}{counted.sweeps:10.1f}{counted.bytes / 1e6:10.0f}{ratio:10.2f}\n"
        )
    for engine in traffic_engines.ENGINES:
        sys.stdout.write(f"{engine.name}: {engine.source}\n")


if __name__ == "__main__":
    main()
