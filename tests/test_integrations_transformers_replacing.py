"""The replaced acceptance step of transformers: which versions, which threads, and how it comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specker.integrations.transformers import accelerate

from . import acceptance_step
from .acceptance_step import UTILS, call_step, set_version

seeded_and_clean = acceptance_step.seeded_and_clean
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("version", ["4.56.2", "5.25.0", "6.0.0.dev0"])
def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    set_version(monkeypatch, version)
    with (
        pytest.raises(ValueError, match=rf"transformers: expected version 4\.57 to 5\.24, got {version}"),
        accelerate(),
    ):
        pass


@pytest.mark.parametrize("step", [None, lambda candidate_input_ids, new_logits: None])
def test_unknown_acceptance_functions_are_refused(monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(UTILS, "_speculative_sampling", step)
        got = "none" if step is None else r"\(candidate_input_ids, new_logits\)"
        with pytest.raises(ValueError, match=rf"_speculative_sampling: expected a function .* got {got}"), accelerate():
            pass
        assert UTILS._speculative_sampling is step


def test_the_original_is_back_after_an_exception_and_blocks_nest() -> None:
    original = UTILS._speculative_sampling
    with pytest.raises(RuntimeError, match="stop"), accelerate():
        raise RuntimeError("stop")
    assert UTILS._speculative_sampling is original
    with accelerate() as outer:
        with accelerate() as inner:
            call_step(torch.tensor([0, 1]))
        call_step(torch.tensor([0, 1]))
        assert UTILS._speculative_sampling is not original
    assert UTILS._speculative_sampling is original
    assert (outer.rounds, inner.rounds) == (2, 1)


@pytest.fixture
def original_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count the calls that reach transformers' own function, by the name of the thread."""
    calls: list[str] = []

    def step(
        candidate_input_ids: Any, candidate_logits: Any, candidate_length: Any, new_logits: Any, is_done_candidate: Any
    ) -> tuple[torch.Tensor, int]:
        calls.append(threading.current_thread().name)
        return torch.tensor([[9]]), 0

    with monkeypatch.context() as patch:
        patch.setattr(UTILS, "_speculative_sampling", step)
        yield calls


def test_a_thread_that_did_not_enter_keeps_transformers_own_function(original_calls: list[str]) -> None:
    with accelerate() as seen:
        outside = threading.Thread(target=call_step, args=[torch.tensor([0, 1])], kwargs={"is_done_candidate": None})
        outside.start()
        outside.join(timeout=60)
        call_step(torch.tensor([0, 1]))
    assert original_calls == [outside.name]
    assert seen.rounds == 1


def test_the_last_of_two_threads_to_leave_restores(original_calls: list[str]) -> None:
    original = UTILS._speculative_sampling
    entered, leave = threading.Event(), threading.Event()
    rounds: list[int] = []

    def long_block() -> None:
        with accelerate() as seen:
            entered.set()
            leave.wait(timeout=60)
            call_step(torch.tensor([0, 1]))
            rounds.append(seen.rounds)

    thread = threading.Thread(target=long_block)
    thread.start()
    assert entered.wait(timeout=60)
    with accelerate():
        pass
    assert UTILS._speculative_sampling is not original
    call_step(torch.tensor([0, 1]), is_done_candidate=None)
    leave.set()
    thread.join(timeout=60)
    assert UTILS._speculative_sampling is original
    assert (rounds, original_calls) == ([1], ["MainThread"])


def test_many_threads_may_enter_and_leave_at_once() -> None:
    original = UTILS._speculative_sampling
    totals: list[int] = []

    def work() -> None:
        for _ in range(20):
            with accelerate() as seen:
                call_step(torch.tensor([0, 1]))
            totals.append(seen.rounds)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert totals == [1] * 80
    assert UTILS._speculative_sampling is original


def test_what_somebody_else_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = UTILS._speculative_sampling
    with accelerate():
        ours = UTILS._speculative_sampling

        def theirs(*arguments: Any) -> Any:
            return ours(*arguments)

        UTILS._speculative_sampling = theirs
    assert UTILS._speculative_sampling is theirs
    UTILS._speculative_sampling = original
