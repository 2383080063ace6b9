"""What a round launches, compiles for and allocates, and the numbers that kernels and library share."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from specker import random as specker_random
from specker.sampling import GREEDY_TEMPERATURE
from specker.status import INVALID_ARGUMENT, Status

from . import differential
from .triton_rounds import needs_interpreter, plain_call, random_rounds

contract = pytest.importorskip("specker.kernels.contract")
rounds = pytest.importorskip("specker.kernels.rounds")
variants = pytest.importorskip("specker.kernels.variants")
pytestmark = needs_interpreter


@pytest.mark.parametrize(
    ("changes", "launches"),
    [
        ({}, ["row_statistics", "residual_mass", "emit_tokens"]),
        ({"draft": None}, ["row_statistics", "emit_tokens"]),
        (
            {"top_k": torch.tensor([2])},
            ["row_statistics", "filter_candidates", "filter_thresholds", "residual_mass", "emit_tokens"],
        ),
    ],
)
@pytest.mark.parametrize(("batch", "gamma"), [(1, 1), (5, 3)])
def test_launches_do_not_depend_on_batch_or_gamma(
    batch: int, gamma: int, changes: dict[str, Any], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    grids: list[tuple[int, ...]] = []

    def record(kernel: Any, grid: tuple[int, ...], *rest: Any) -> None:
        seen.append(kernel.__name__)
        grids.append(grid)

    monkeypatch.setattr(rounds, "_launch", record)
    differential.run("triton", random_rounds(40, torch.float32, batch, gamma) | changes)
    assert seen == launches
    # Rows lie along the first axis, the only one that is not limited to 65,535 programs.
    assert all(size <= 1024 for grid in grids for size in grid[1:])


def test_types_told_without_a_launch_are_those_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64", torch.float32: "*fp32"}
    checked = []

    def compare(kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], *arguments: Any) -> None:
        told = variants.variant(kernel, 40, torch.float32, torch.float32, variants.NOTHING_ABSENT)
        runtime = [name for name in told.signature if name not in rounds.CONSTANTS[kernel.__name__]]
        for name, argument in zip(runtime, arguments, strict=True):
            actual = types[argument.dtype] if isinstance(argument, torch.Tensor) else "i32"
            assert argument is None or told.signature[name] == actual, (kernel.__name__, name)
        assert {name: constants[name] for name in rounds.CONSTANTS[kernel.__name__]} == {
            name: value for name, value in told.constexprs.items() if name in constants
        }
        checked.append(kernel)

    monkeypatch.setattr(rounds, "_launch", compare)
    half = torch.tensor([0.5], dtype=torch.float64)
    differential.run("triton", random_rounds(40, torch.float32) | {"top_p": half, "top_k": torch.tensor([2])})
    assert checked == list(rounds.KERNELS)


def test_nothing_of_the_size_of_the_vocabulary_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return self.empty if name == "empty" else getattr(torch, name)

        def empty(self, *arguments: Any, **options: Any) -> torch.Tensor:
            tensor = torch.empty(*arguments, **options)
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

    monkeypatch.setattr(rounds, "torch", Recorder())
    monkeypatch.setattr(rounds, "_launch", lambda *arguments: None)
    vocab, rows = 128256, 9
    target = torch.zeros(1, 1, vocab, dtype=torch.bfloat16).expand(1, 5, vocab)
    call = plain_call(target, target[:, :4], torch.zeros(1, 4, dtype=torch.int64), top_p=torch.tensor([0.9]))
    differential.run("triton", call)
    assert sum(sizes) < 0.1 * rows * vocab * target.element_size()


def test_a_vocabulary_with_too_many_shards_is_refused() -> None:
    assert contract.num_shards(8192 * 1024, 8192 * 1024) == 8192
    with pytest.raises(ValueError, match="vocab: expected at most 8388608 on the Triton backend, got 8388609"):
        contract.num_shards(8192 * 1024 + 1, 8192 * 1024 + 1)


def test_the_contract_holds_the_numbers_of_the_library() -> None:
    assert {status.name: getattr(contract, str(status.name)).value for status in Status} == {
        status.name: int(status) for status in Status
    }
    assert contract.INVALID_ARGUMENT.value == int(INVALID_ARGUMENT)
    assert contract.GREEDY_TEMPERATURE.value == GREEDY_TEMPERATURE
    assert (contract.DRAFT_PURPOSE, contract.VERIFY_PURPOSE) == (
        specker_random.DRAFT_PURPOSE, specker_random.VERIFY_PURPOSE
    )  # fmt: skip


def test_random_numbers_are_those_of_the_library_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, -1, 2**40, 2**63 - 2, 7])
    records: list[torch.Tensor] = []
    launch = rounds._launch

    def keep_records(kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], *arguments: Any) -> None:
        launch(kernel, grid, constants, *arguments)
        if kernel is rounds.row_statistics:
            records.append(arguments[list(inspect.signature(kernel.fn).parameters).index("records_ptr")])

    monkeypatch.setattr(rounds, "_launch", keep_records)
    tokens = torch.zeros(5, 2, dtype=torch.int64)
    differential.run("triton", plain_call(torch.zeros(5, 3, 4), None, tokens, seed=seeds, position=positions))
    accept, emission = specker_random.uniforms(seeds.unsqueeze(-1), positions.unsqueeze(-1) + torch.arange(3), 1)
    assert torch.equal(records[0][..., contract.ACCEPT_FIELD.value], accept)
    assert torch.equal(records[0][..., contract.EMISSION_FIELD.value], emission)
