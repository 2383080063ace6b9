"""Faults seen in other systems: graphs and compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specker
from specker import operators

from . import cases
from .cases import interpreted
from .faults import fault

TOKENS = [[1, 2], [3, 4]]


def verify_arguments(device: torch.device, flat: bool, full: bool) -> tuple[Any, ...]:
    """Return the arguments of the operator, with every optional tensor or with none."""
    target, draft = cases.random_rows(2, 3, 11).to(device), cases.random_rows(2, 2, 11).to(device)
    tokens = torch.tensor(TOKENS, device=device)
    lengths = torch.tensor([2, 1], device=device) if full and not flat else None
    bounds = torch.tensor([0, 2, 4], device=device) if flat else None
    index = torch.tensor([1, 0], device=device) if full and not flat else None
    temperature = torch.tensor([0.7, 1.0], device=device)
    filters = (torch.tensor([5, 0], device=device), temperature, temperature / 10) if full else (None, None, None)
    if flat:
        target, draft, tokens = target.reshape(6, 11), draft.reshape(4, 11), tokens.flatten()
    seed = torch.tensor([1, 2], device=device)
    return (
        tokens, target, draft if full else None, None, lengths, bounds, index, temperature, *filters,
        temperature, *filters, *[None] * 10, seed, torch.tensor([0], device=device), None, 2, False, False, full, full,
    )  # fmt: skip


@fault("B113")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("flat", [False, True], ids=["padded", "flat"])
@pytest.mark.parametrize("full", [False, True], ids=["bare", "all options"])
def test_operator_verify_passes_opcheck(flat: bool, full: bool, backend: str, device: torch.device) -> None:
    if interpreted(backend) and flat != full:
        pytest.skip("two of the combinations are enough for the interpreter")
    check: Any = operators.operator("verify", device)
    torch.library.opcheck(check, verify_arguments(device, flat, full))


@fault("B113")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("filtered", [False, True])
def test_operator_sample_passes_opcheck(filtered: bool, backend: str, device: torch.device) -> None:
    if interpreted(backend) and not filtered:
        pytest.skip("one of the combinations is enough for the interpreter")
    temperature = torch.tensor([0.7, 1.0], device=device)
    filters = (torch.tensor([5, 0], device=device), temperature, temperature / 10) if filtered else (None, None, None)
    seed, position = torch.tensor([1, 2], device=device), torch.tensor([0], device=device)
    check: Any = operators.operator("sample", device)
    torch.library.opcheck(
        check,
        (cases.random_rows(2, 11).to(device), temperature, *filters, *[None] * 4, seed, position),
    )


@fault("B113")
@pytest.mark.usefixtures("on_backend")
def test_compiled_calls_have_the_bits_of_eager_ones(device: torch.device) -> None:
    rows = cases.random_rows(2, 2, 3, 11).to(device)
    tokens, seed = torch.tensor(TOKENS, device=device), torch.tensor([5, 6], device=device)
    temperature = torch.tensor([0.0, 0.8], device=device)

    def step(rows: torch.Tensor, tokens: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Views of one input: an operator that claimed to write to its inputs would not compile.
        drawn = specker.sample(rows[1][:, 0], seed=seed, temperature=temperature)
        result = specker.verify(
            tokens, rows[0], rows[1][:, :2], seed=seed, position=7, temperature=temperature, top_p=0.9,
            return_logprobs=True, return_accept_probs=True,
        )  # fmt: skip
        return drawn.token_ids, *(value for value in result if value is not None)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(rows, tokens, seed), step(rows, tokens, seed), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
@fault("B114")
@pytest.mark.usefixtures("on_backend")
def test_no_call_waits_for_the_device(backend: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    target, draft = cases.random_rows(2, 3, 257).to(device), cases.random_rows(2, 2, 257).to(device)
    tokens, seed = torch.tensor(TOKENS, device=device), torch.tensor([5, 6], device=device)
    temperature, lengths = torch.tensor([0.0, 0.8], device=device), torch.tensor([2, 1], device=device)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            drawn = specker.sample(draft[:, 0], seed=seed, temperature=temperature)
            specker.verify(
                tokens, target, draft, num_draft_tokens=lengths, seed=seed, temperature=temperature, top_p=0.9
            )
            specker.DraftReceipt.stack([drawn.receipt] * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@fault("B115", "B116")
@pytest.mark.usefixtures("on_backend")
def test_a_captured_graph_reads_new_lengths_and_parameters(backend: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    target, draft = cases.random_rows(2, 3, 257).to(device), cases.random_rows(2, 2, 257).to(device)
    tokens, seed = target.argmax(-1)[:, :2].contiguous(), torch.tensor([5, 6], device=device)
    temperature, lengths = torch.zeros(2, device=device), torch.tensor([2, 2], device=device)

    def call() -> specker.VerifyResult:
        return specker.verify(tokens, target, draft, num_draft_tokens=lengths, seed=seed, temperature=temperature)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for new_lengths, new_temperature in (([2, 2], 0.0), ([0, 1], 0.0), ([1, 2], 1.5), ([0, 0], 0.3)):
        lengths.copy_(torch.tensor(new_lengths))
        temperature.fill_(new_temperature)
        graph.replay()
        assert captured.token_ids.tolist() == call().token_ids.tolist()
        if new_temperature == 0.0:
            assert captured.num_accepted.tolist() == new_lengths
