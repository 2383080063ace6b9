"""Calls the operators of one build of the extension from Python, on one thread or on several at once.

    python_calls.py LIBRARY CALLS SEED THREADS

Run by run.py with a sanitizer's runtime loaded first. Threads must give the results of a single one.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LIBRARY, CALLS, SEED, THREADS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

_find_spec = importlib.util.find_spec


def _find_sanitized(name: str, *rest: Any) -> Any:
    return SimpleNamespace(origin=LIBRARY) if name == "specker._C" else _find_spec(name, *rest)


importlib.util.find_spec = _find_sanitized

import torch  # noqa: E402

import specker  # noqa: E402
from tests.engine_calls import WRITTEN, engine_call  # noqa: E402
from tests.random_calls import CallMaker  # noqa: E402

Results = list[tuple[torch.Tensor, ...]]


def random_results(seed: int) -> Results:
    """Return what the operators answer to random calls of one seed."""
    maker = CallMaker(seed)
    rows = maker.strided(maker.rows((3,), maker.pick((1, 63, 4097, 9001)), is_probs=False))
    adjustments = maker.adjustments(3, 1, False, rows.shape[-1], prefix="").values()
    sampled = torch.ops.specker.sample(
        rows, *maker.parameters(3).values(), *adjustments, maker.integers(-9, 9, 3), maker.integers(0, 9, 1)
    )
    delivered = engine_call(maker, wild=True)
    status = torch.ops.specker.verify_into(**delivered)
    written = tuple(delivered[name] for name in WRITTEN if delivered[name] is not None)
    return [torch.ops.specker.verify(**maker.verify_call()), sampled, (status, *written)]


def large_results(logits: torch.Tensor, tokens: torch.Tensor) -> Results:
    """Return answers to calls so large that several threads share each: its sequences, then the shards of its rows."""
    target, draft = logits, logits[:, 1:]
    results = []
    for batch in (logits.shape[0], 1):
        for filters in ({}, {"top_k": 5000, "top_p": 0.9}):
            answer = specker.verify(
                tokens[:batch], target[:batch], draft[:batch], seed=3, return_logprobs=True,
                return_accept_probs=not filters, **filters,
            )  # fmt: skip
            results.append(tuple(output for output in answer if output is not None))
            # Without the optional outputs it is another operator.
            plain = specker.verify(tokens[:batch], target[:batch], draft[:batch], seed=3, **filters)
            results.append((plain.token_ids, plain.num_accepted, plain.num_emitted, plain.status))
            drawn = specker.sample(target[:batch, 0], seed=3, **filters)
            results.append((drawn.token_ids, drawn.receipt.values))
    return results


def same(left: Results, right: Results) -> bool:
    """Return whether two lists of results have the same bits."""
    pairs = [pair for answers in zip(left, right, strict=True) for pair in zip(*answers, strict=True)]
    return all(got.numpy().tobytes() == expected.numpy().tobytes() for got, expected in pairs)


def call_from_threads() -> bool:
    """Return whether threads that call at once, each with threads of its own, give the results of a single one."""
    generator = torch.Generator().manual_seed(SEED)
    # One sequence of fewer than 131,072 logits stays on one thread.
    logits = torch.randn(4, 3, 45_001, generator=generator) * 3
    tokens = torch.randint(0, 45_001, (4, 2), generator=generator)
    torch.set_num_threads(1)
    expected = large_results(logits, tokens)
    torch.set_num_threads(2)
    differing = []

    def work(thread: int) -> None:
        for index in range(CALLS):
            random_results(SEED + index)
            if index % 4 == thread % 4 and not same(large_results(logits, tokens), expected):
                differing.append(thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not differing


if LIBRARY not in torch.ops.loaded_libraries:
    sys.exit(f"python_calls: expected the operators of {LIBRARY}, got those of {torch.ops.loaded_libraries}")
if THREADS > 1:
    if not call_from_threads():
        sys.exit("python_calls: threads change a result")
else:
    for index in range(CALLS):
        random_results(SEED + index)
