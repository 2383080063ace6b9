"""The Triton kernels in the interpreter against the reference, operator to operator, and against themselves."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import specker
from specker import random as specker_random
from specker.reference import RECEIPT_FIELDS
from specker.sampling import GREEDY_TEMPERATURE
from specker.status import INVALID_ARGUMENT, Status

from . import random_calls
from .random_calls import CallMaker

contract = pytest.importorskip("specker.kernels.contract")
rounds = pytest.importorskip("specker.kernels.rounds")
sample = pytest.importorskip("specker.kernels.sample")
variants = pytest.importorskip("specker.kernels.variants")
verify = pytest.importorskip("specker.kernels.verify")
pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["triton"]) or torch.cuda.is_available(),
    reason=specker.available_backends()["triton"] or "kernels are compiled here, not interpreted",
)
OUTPUTS = ("token_ids", "num_accepted", "num_emitted", "status", "logprobs", "accept_probs", "expected_accepted")
TOLERANCE = 1e-6
Outputs = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what the launchers allocate with NaN and absurd integers: what is not written, or read before, shows."""

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return poisoned_empty if name == "empty" else getattr(torch, name)

    for module in (rounds, sample, verify):
        monkeypatch.setattr(module, "torch", Poisoned())
    with warnings.catch_warnings():
        # The interpreter computes on NaN and infinities in numpy, which says so.
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def poisoned_empty(*arguments: Any, **options: Any) -> torch.Tensor:
    tensor = torch.empty(*arguments, **options)
    return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min + 5)


def run(namespace: str, call: dict[str, Any], **changes: Any) -> Outputs:
    return dict(zip(OUTPUTS, getattr(torch.ops, namespace).verify(**{**call, **changes}), strict=True))


def plain_call(
    target: torch.Tensor, draft: torch.Tensor | None, tokens: torch.Tensor, **changes: Any
) -> dict[str, Any]:
    """Return the arguments of a round at temperature 1 with seeds, all outputs asked for."""
    one = torch.ones(1, dtype=torch.float64)
    call = dict.fromkeys(CallMaker(0).verify_call()) | {
        "draft_token_ids": tokens, "target": target, "draft": draft, "temperature": one, "draft_temperature": one,
        "seed": torch.arange(tokens.shape[0]), "position": torch.zeros(1, dtype=torch.int64),
        "max_num_draft_tokens": tokens.shape[1], "target_is_probs": False, "draft_is_probs": False,
        "return_logprobs": True, "return_accept_probs": True,
    }  # fmt: skip
    return call | changes


def shifted(call: dict[str, Any], accept: float, emission: float) -> dict[str, Any]:
    """Return a call with its random numbers injected and moved a little."""
    uniforms = call["uniforms"]
    if uniforms is None:
        positions = call["position"].unsqueeze(-1) + torch.arange(call["max_num_draft_tokens"] + 1)
        pair = specker_random.uniforms(call["seed"].unsqueeze(-1), positions, specker_random.VERIFY_PURPOSE)
        uniforms = torch.stack(pair, dim=-1).expand(call["seed"].shape[0], -1, -1)
        if call["cu_num_draft_tokens"] is not None:
            lengths = call["cu_num_draft_tokens"].long().diff()
            uniforms = uniforms[torch.arange(uniforms.shape[1]) <= lengths.unsqueeze(-1)]
    moved = (uniforms + torch.tensor([accept, emission], dtype=torch.float64)).clamp(0.0, 1 - 2.0**-53)
    return call | {"seed": None, "position": None, "uniforms": moved}


def straddles(call: dict[str, Any], sequence: int, triton: Outputs) -> bool:
    """Return whether moving a uniform by the tolerance makes the reference decide as Triton did."""
    accepted = int(triton["num_accepted"][sequence])
    if accepted != int(run("specker_reference", call)["num_accepted"][sequence]):
        fewer, more = (run("specker_reference", shifted(call, by, 0.0)) for by in (TOLERANCE, -TOLERANCE))
        return int(fewer["num_accepted"][sequence]) <= accepted <= int(more["num_accepted"][sequence])
    lower, upper = (run("specker_reference", shifted(call, 0.0, by)) for by in (-TOLERANCE, TOLERANCE))
    token = int(triton["token_ids"][sequence, accepted])
    return int(lower["token_ids"][sequence, accepted]) <= token <= int(upper["token_ids"][sequence, accepted])


def assert_agrees(call: dict[str, Any]) -> int:
    """Compare every output of one call; return how many sequences were decided differently at a threshold."""
    triton, reference = run("specker_triton", call), run("specker_reference", call)
    for name in OUTPUTS:
        assert triton[name].shape == reference[name].shape, name
        assert triton[name].dtype == reference[name].dtype, name
    same = (triton["token_ids"] == reference["token_ids"]).all(dim=-1)
    same &= triton["num_accepted"] == reference["num_accepted"]
    differing = (~same).nonzero().flatten().tolist()
    assert all(straddles(call, sequence, triton) for sequence in differing)
    for name in ("num_emitted", "status"):
        assert torch.equal(triton[name][same], reference[name][same]), name
    for name in ("logprobs", "accept_probs", "expected_accepted"):
        if triton[name].numel():
            torch.testing.assert_close(triton[name][same], reference[name][same], rtol=1e-5, atol=2e-6, equal_nan=True)
    return len(differing)


def random_rounds(vocab: int, dtype: torch.dtype, batch: int = 3, gamma: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(vocab)
    target = (torch.randn(batch, gamma + 1, vocab, generator=generator) * 3).to(dtype)
    draft = (target[:, :gamma].float() + torch.randn(batch, gamma, vocab, generator=generator)).to(dtype)
    tokens = torch.multinomial(draft.float().softmax(-1).view(-1, vocab), 1, generator=generator).view(batch, gamma)
    return plain_call(target, draft, tokens)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_agree_with_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The last one takes more than MAX_CANDIDATES: its thresholds come from the histogram.
    monkeypatch.setattr(random_calls, "VOCABS", (1, 2, 5, 63, 257, 1000, 1500))
    maker = CallMaker(100 + seed)
    calls = [maker.verify_call() for _ in range(12)]
    assert sum(assert_agrees(call) for call in calls) <= 1
    assert sum(call["target"].shape[0] for call in calls) > 15


@pytest.mark.parametrize(("vocab", "dtype"), [(8191, torch.float16), (16385, torch.bfloat16), (20000, torch.float32)])
@pytest.mark.parametrize("point_mass", [False, True])
def test_rows_of_several_shards_agree_with_the_reference(vocab: int, dtype: torch.dtype, point_mass: bool) -> None:
    call = random_rounds(vocab, dtype)
    mixed = {"temperature": torch.tensor([1.0, 0.0, 0.6]), "draft_temperature": torch.tensor([1.0, 0.0, 0.6])}
    assert assert_agrees(call | mixed | ({"draft": None} if point_mass else {})) == 0


def test_filters_of_large_rows_agree_with_the_reference() -> None:
    filters = {
        "top_k": torch.tensor([50, 3000, 0]), "top_p": torch.tensor([0.9, 0.8, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.01]),
    }  # fmt: skip
    call = random_rounds(9000, torch.bfloat16) | filters | {f"draft_{name}": value for name, value in filters.items()}
    assert assert_agrees(call) == 0
    assert assert_agrees(call | {"draft": None}) == 0


def filter_rows(kind: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, vocab, generator=generator) * 3
    if kind == "tied":
        return logits.to(torch.bfloat16)
    if kind == "flat":
        return torch.zeros_like(logits)
    if kind == "masked":
        return logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.9, -math.inf)
    if kind == "narrow":
        # Distinct neighbours beside far outliers: the histogram has to divide its bin again, by keys.
        logits = 1.0 + torch.arange(vocab, dtype=torch.float32).expand(2, -1) * 2.0**-23
        return torch.cat([logits, torch.tensor([[-1e30, 1.01]]).expand(2, -1)], dim=1)
    return logits


@pytest.mark.parametrize("kind", ["random", "tied", "flat", "masked", "narrow"])
@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p"),
    [
        (40, 7, 0.5),
        (3000, 50, None),
        (3000, 2500, None),
        (3000, None, 0.95),
        (3000, 2500, 0.9),
        (3000, None, 1 - 1e-12),
    ],
)
def test_filters_find_the_thresholds_of_a_sort(kind: str, vocab: int, top_k: int | None, top_p: float | None) -> None:
    arguments = (
        filter_rows(kind, vocab), torch.tensor([1.0, 0.7], dtype=torch.float64),
        None if top_k is None else torch.tensor([top_k]),
        None if top_p is None else torch.tensor([top_p], dtype=torch.float64), None, *[None] * 4,
        torch.arange(2), torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    triton, reference = torch.ops.specker_triton.sample(*arguments), torch.ops.specker_reference.sample(*arguments)
    names = dict(zip(RECEIPT_FIELDS, triton[2].unbind(-1), strict=True))
    expected = dict(zip(RECEIPT_FIELDS, reference[2].unbind(-1), strict=True))
    assert torch.equal(names["threshold"], expected["threshold"])
    torch.testing.assert_close(names["weight_sum"], expected["weight_sum"], rtol=5e-7, atol=0.0)
    assert torch.equal(triton[1], reference[1])


def test_sample_agrees_with_the_reference() -> None:
    maker = CallMaker(5)
    straddling = 0
    for _ in range(12):
        batch, vocab = maker.pick((0, 1, 3)), maker.pick((1, 5, 257, 1500))
        logits = maker.strided(maker.rows((batch,), vocab, is_probs=False))
        arguments = (
            logits, *maker.parameters(batch).values(),
            *maker.adjustments(batch, 1, False, vocab, prefix="").values(), maker.integers(-(2**62), 2**62, batch),
            maker.integers(-5, 2**40, maker.pick((1, batch))),
        )  # fmt: skip
        triton, reference = torch.ops.specker_triton.sample(*arguments), torch.ops.specker_reference.sample(*arguments)
        assert torch.equal(triton[1], reference[1])
        same = triton[0] == reference[0]
        straddling += int((~same).sum())
        torch.testing.assert_close(triton[2][same], reference[2][same], rtol=5e-7, atol=0.0, equal_nan=True)
    assert straddling <= 1


def test_receipts_of_sample_serve_verify_without_the_draft_rows() -> None:
    call = random_rounds(300, torch.bfloat16)
    seed, zero = torch.arange(3), torch.zeros(1, dtype=torch.int64)
    one = torch.ones(1, dtype=torch.float64)
    draws = [torch.ops.specker_triton.sample(call["draft"][:, i], one, *[None] * 7, seed, zero + i) for i in range(2)]
    call["draft_token_ids"] = torch.stack([draw[0] for draw in draws], dim=1)
    receipts = torch.stack([draw[2] for draw in draws], dim=1)
    with_rows, with_receipts = run("specker_triton", call), run("specker_triton", call, draft_receipt=receipts)
    for name in OUTPUTS:
        assert torch.equal(with_rows[name], with_receipts[name]), name
    accepted = with_rows["num_accepted"] == 2
    assert accepted.any()
    # All accepted: the draft rows decide nothing once the receipts are there.
    tokens = call["draft_token_ids"].unsqueeze(-1)
    poisoned = torch.full_like(call["draft"], math.nan).scatter(-1, tokens, call["draft"].gather(-1, tokens))
    unread = run("specker_triton", call, draft_receipt=receipts, draft=poisoned)
    assert torch.equal(unread["token_ids"][accepted], with_rows["token_ids"][accepted])
    assert torch.equal(unread["accept_probs"], with_rows["accept_probs"])


def test_identical_rows_leave_a_residual_of_exactly_nothing() -> None:
    target = torch.randn(1, 2, 9000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    target[..., 17] = -math.inf
    # An id without mass is rejected for sure, and the two rows, of different dtypes, cancel everywhere.
    call = plain_call(target, target[:, :1].float(), torch.tensor([[17]]))
    outputs = run("specker_triton", call)
    assert int(outputs["status"]) == Status.DRAFT_TOKEN_IMPOSSIBLE | Status.RESIDUAL_EMPTY
    assert int(outputs["num_accepted"]) == 0


def test_a_sequence_does_not_depend_on_its_batch_or_on_how_the_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_rounds(20000, torch.float32, batch=2, gamma=1)
    together = run("specker_triton", call)
    for sequence in range(2):
        one = slice(sequence, sequence + 1)
        per_sequence = {name: call[name][one] for name in ("draft_token_ids", "target", "draft", "seed")}
        alone = run("specker_triton", call | per_sequence)
        for name in OUTPUTS:
            assert torch.equal(alone[name][0], together[name][sequence]), name
    for programs in (1, 10**6):
        monkeypatch.setattr(contract, "ENOUGH_PROGRAMS", programs)
        divided = run("specker_triton", call)
        assert all(torch.equal(divided[name], together[name]) for name in OUTPUTS)


def test_more_filtered_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_rounds(50, torch.float32) | {"top_k": torch.tensor([3, 0, 7]), "top_p": torch.tensor([0.9, 0.5, 1.0])}
    expected = run("specker_triton", call)
    monkeypatch.setattr(contract, "MAX_FILTER_PROGRAMS", 2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run("specker_triton", call).items())


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
    run("specker_triton", random_rounds(40, torch.float32, batch, gamma) | changes)
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
    run("specker_triton", random_rounds(40, torch.float32) | {"top_p": half, "top_k": torch.tensor([2])})
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
    run("specker_triton", call)
    assert sum(sizes) < 0.1 * rows * vocab * target.element_size()


def test_a_vocabulary_with_too_many_shards_is_refused() -> None:
    assert contract.num_shards(1024 * 1024, 1024 * 1024) == 1024
    with pytest.raises(ValueError, match="vocab: expected at most 1048576 on the Triton backend, got 1048577"):
        contract.num_shards(1024 * 1024 + 1, 1024 * 1024 + 1)


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
    run("specker_triton", plain_call(torch.zeros(5, 3, 4), None, tokens, seed=seeds, position=positions))
    accept, emission = specker_random.uniforms(seeds.unsqueeze(-1), positions.unsqueeze(-1) + torch.arange(3), 1)
    assert torch.equal(records[0][..., contract.ACCEPT_FIELD.value], accept)
    assert torch.equal(records[0][..., contract.EMISSION_FIELD.value], emission)
