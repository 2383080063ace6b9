"""Differential fuzzing: hypothesis makes up calls of the operators, which every backend must answer as the reference.

A short run of fixed examples is part of the test suite; `pytest tests/test_fuzz.py --fuzz-minutes 20` searches on.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from . import random_calls
from .differential import assert_agrees
from .random_calls import CallMaker, Choice

EXAMPLES = {"cpp": 400, "triton": 12}
# The interpreter takes milliseconds a program; one, two and a few shards of the smallest size.
SMALL_VOCABS = (1, 2, 5, 31, 33, 63)


class DrawnCallMaker(CallMaker):
    """Makes calls whose every choice is hypothesis's, so that a failing one shrinks."""

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__(0)
        self.draw_from = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        self.choices = self  # type: ignore[assignment]

    def chance(self, probability: float) -> bool:
        """Return True with about this probability; a shrunk call has as few features as it can."""
        return self.draw_from(st.integers(0, 99)) >= 100 - round(100 * probability)

    def pick(self, options: Sequence[Choice]) -> Choice:
        """Return one of the options."""
        return options[self.draw_from(st.integers(0, len(options) - 1))]

    def randrange(self, stop: int) -> int:
        """Return an integer below `stop`."""
        return self.draw_from(st.integers(0, stop - 1))


@st.composite
def verify_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Return the arguments of a call of the operator `verify`."""
    return DrawnCallMaker(draw).verify_call()


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_made_up_calls_are_answered_as_by_the_reference(
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    if backend == "triton":
        monkeypatch.setattr(random_calls, "VOCABS", SMALL_VOCABS)
    minutes = request.config.getoption("--fuzz-minutes")
    deadline = time.monotonic() + 60 * minutes
    counts: Counter[str] = Counter()

    def compare(call: dict[str, Any]) -> None:
        counts["straddling"] += assert_agrees(backend, call)
        counts["sequences"] += call["target"].shape[0]
        counts["calls"] += 1

    fixed = settings(
        max_examples=EXAMPLES[backend], derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    fixed(given(verify_calls())(compare))()
    searching = settings(fixed, derandomize=False, database=None)
    while time.monotonic() < deadline:
        searching(given(verify_calls())(compare))()
    record_property("calls", dict(counts))
    assert counts["straddling"] <= max(3, 1e-5 * counts["sequences"])


def test_the_fuzzer_makes_every_kind_of_call() -> None:
    maker, seen = CallMaker(1), Counter[str]()
    maker.choices = random.Random(1)
    for _ in range(400):
        call = maker.verify_call()
        seen.update(name for name, value in call.items() if value is not None and value is not False)
        seen.update(str(call[name].dtype) for name in ("target", "draft") if call[name] is not None)
    expected = {
        "draft", "draft_receipt", "num_draft_tokens", "cu_num_draft_tokens", "draft_index", "top_k", "top_p", "min_p",
        "bias_offsets", "allowed_tokens", "draft_bias_offsets", "draft_allowed_tokens", "draft_columns", "uniforms",
        "seed", "target_is_probs", "draft_is_probs", "torch.float32", "torch.bfloat16", "torch.float16",
    }  # fmt: skip
    assert {name: seen[name] for name in expected if seen[name] < 10} == {}
