"""What other engines read and write of vocabulary-sized rows in one round, counted from their published sources.

The round: every sequence samples, no filter and no mask, a full draft distribution, logits of bfloat16, temperature
not 1 unless said otherwise. Counted are launches that touch rows of the vocabulary, once for each row read and each row
written, in the engines' favour: a softmax that goes over its row three times counts as one read, and kernels of a few
numbers (accepting, gathering, copying tokens) are left out. What the draft hands over ready made, probabilities in
float32, costs its reading only.
"""

from __future__ import annotations

from typing import NamedTuple

HALF = 2
FULL = 4


class Step(NamedTuple):
    """What one launch does to one kind of rows."""

    name: str
    rows: str
    """Which rows it touches, a key of `rows_touched`."""
    reads: tuple[float, ...]
    """Bytes read an entry, for each time that a row is gone through."""
    writes: tuple[float, ...] = ()
    """Bytes written an entry, likewise."""
    launches: int = 1
    """0 for other rows of the launch before."""


class Engine(NamedTuple):
    """One engine's round."""

    name: str
    source: str
    """Version and file that the steps were read from."""
    steps: tuple[Step, ...]


def rows_touched(kind: str, gamma: int, rejected: float) -> float:
    """Return how many rows a sequence has of one kind.

    Example:
        >>> rows_touched("all", 4, 0.76), rows_touched("rejected", 4, 0.76)
        (5, 0.76)
    """
    return {"all": gamma + 1, "target": gamma, "draft": gamma, "one": 1, "rejected": rejected}[kind]


def _chain(name: str) -> tuple[Step, ...]:
    """Return the launch that draws from probabilities: the row is summed, then scanned up to the token, half of it."""
    return (
        Step(name, "one", (FULL, FULL / 2)),
        Step(f"{name}, its draft rows", "rejected", (FULL, FULL / 2), launches=0),
    )


MULTINOMIAL = (Step("noise", "one", (), (FULL,)), Step("weights / noise", "one", (FULL, FULL), (FULL,)),
                Step("arg-max", "one", (FULL,)))  # fmt: skip

ENGINES = (
    Engine(
        "eager PyTorch",
        "bench/eager.py, which takes no temperature; another read and write of every row where there is one",
        (
            Step("float32 of target rows", "all", (HALF,), (FULL,)),
            Step("softmax of target rows", "all", (FULL,), (FULL,)),
            Step("float32 of draft rows", "draft", (HALF,), (FULL,)),
            Step("softmax of draft rows", "draft", (FULL,), (FULL,)),
            Step("target row to draw from", "one", (FULL,), (FULL,)),
            Step("draft row to draw from", "one", (FULL,), (FULL,)),
            Step("difference", "one", (FULL, FULL), (FULL,)),
            Step("clamp", "one", (FULL,), (FULL,)),
            Step("residual or target row", "one", (FULL, FULL), (FULL,)),
            *MULTINOMIAL,
        ),
    ),
    Engine(
        "vLLM, first runner",
        "0.33.0, vllm/v1/sample/rejection_sampler.py and sampler.py; the draft's probabilities are float32",
        (
            Step("bonus rows", "one", (HALF,), (HALF,)),
            Step("float32 of bonus rows", "one", (HALF,), (FULL,)),
            Step("temperature of bonus rows", "one", (FULL,), (FULL,)),
            Step("softmax of bonus rows", "one", (FULL,), (FULL,)),
            *MULTINOMIAL,
            Step("target rows", "target", (HALF,), (HALF,)),
            Step("float32", "target", (HALF,), (FULL,)),
            Step("clone", "target", (FULL,), (FULL,)),
            Step("temperature", "target", (FULL,), (FULL,)),
            Step("softmax", "target", (FULL,), (FULL,)),
            Step("noise of the recovered tokens", "one", (), (FULL,)),
            Step("reciprocal", "one", (FULL,), (FULL,)),
            Step("recovered tokens of all positions", "target", (FULL, FULL, FULL)),
        ),
    ),
    Engine(
        "vLLM, second runner",
        "0.33.0, vllm/v1/worker/gpu/spec_decode/rejection_sampler.py and rejection_sampler_utils.py",
        (
            Step("float32", "all", (HALF,), (FULL,)),
            Step("temperature", "all", (FULL,), (FULL,)),
            Step("statistics of blocks", "target", (FULL, HALF)),
            Step("resample", "one", (FULL,)),
            Step("resample, its draft rows", "rejected", (HALF,), launches=0),
        ),
    ),
    Engine(
        "vLLM, second runner, temperature 1",
        "the same, which skips the first two launches where no request of the batch asks for anything",
        (
            Step("statistics of blocks", "target", (HALF, HALF)),
            Step("resample", "one", (HALF,)),
            Step("resample, its draft rows", "rejected", (HALF,), launches=0),
        ),
    ),
    Engine(
        "SGLang, chain kernel",
        "0.5.23, sglang/srt/speculative/eagle_utils.py and kernels/ops/speculative/reject_sampling.py",
        (
            Step("temperature", "all", (HALF,), (FULL,)),
            Step("softmax", "all", (FULL,), (FULL,)),
            *_chain("verify"),
        ),
    ),
    Engine(
        "FlashInfer, chain kernel",
        "0.7.4, flashinfer/sampling.py (softmax with temperature) and include/flashinfer/sampling.cuh",
        (
            Step("float32", "all", (HALF,), (FULL,)),
            Step("softmax", "all", (FULL,), (FULL,)),
            *_chain("verify"),
        ),
    ),
)  # fmt: skip


class Counts(NamedTuple):
    """What one engine's round adds up to."""

    launches: int
    sweeps: float
    """Rows read and rows written, a sequence."""
    bytes: float


def counts(engine: Engine, batch: int, gamma: int, vocab: int, rejected: float) -> Counts:
    """Return launches, sweeps over rows and bytes of one round of an engine."""
    sweeps, moved = 0.0, 0.0
    for step in engine.steps:
        rows = rows_touched(step.rows, gamma, rejected)
        sweeps += rows * (len(step.reads) + len(step.writes))
        moved += rows * (sum(step.reads) + sum(step.writes))
    return Counts(sum(step.launches for step in engine.steps), sweeps, batch * vocab * moved)
