"""The Triton kernels in the interpreter against the reference, operator to operator, and against themselves."""

from __future__ import annotations

import math

import pytest
import torch

from specker.status import Status

from . import differential, random_calls
from .random_calls import CallMaker
from .triton_rounds import needs_interpreter, plain_call, poison_memory, random_rounds

contract = pytest.importorskip("specker.kernels.contract")
rounds = pytest.importorskip("specker.kernels.rounds")
# The interpreter takes the maximum of invalid rows in numpy, which says so.
pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_memory(monkeypatch)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_agree_with_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The last one takes more than MAX_CANDIDATES: its thresholds come from the histogram.
    monkeypatch.setattr(random_calls, "VOCABS", (1, 2, 5, 63, 257, 1000, 1500))
    maker = CallMaker(100 + seed)
    calls = [maker.verify_call() for _ in range(12)]
    assert sum(differential.assert_agrees("triton", call) for call in calls) <= 1
    assert sum(call["target"].shape[0] for call in calls) > 15


@pytest.mark.parametrize(("vocab", "dtype"), [(8191, torch.float16), (16385, torch.bfloat16), (20000, torch.float32)])
@pytest.mark.parametrize("point_mass", [False, True])
def test_rows_of_several_shards_agree_with_the_reference(vocab: int, dtype: torch.dtype, point_mass: bool) -> None:
    call = random_rounds(vocab, dtype)
    mixed = {"temperature": torch.tensor([1.0, 0.0, 0.6]), "draft_temperature": torch.tensor([1.0, 0.0, 0.6])}
    assert differential.assert_agrees("triton", call | mixed | ({"draft": None} if point_mass else {})) == 0


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
    with_rows, with_receipts = (
        differential.run("triton", call),
        differential.run("triton", call, draft_receipt=receipts),
    )
    for name in differential.OUTPUTS:
        assert torch.equal(with_rows[name], with_receipts[name]), name
    accepted = with_rows["num_accepted"] == 2
    assert accepted.any()
    # All accepted: the draft rows decide nothing once the receipts are there.
    tokens = call["draft_token_ids"].unsqueeze(-1)
    poisoned = torch.full_like(call["draft"], math.nan).scatter(-1, tokens, call["draft"].gather(-1, tokens))
    unread = differential.run("triton", call, draft_receipt=receipts, draft=poisoned)
    assert torch.equal(unread["token_ids"][accepted], with_rows["token_ids"][accepted])
    assert torch.equal(unread["accept_probs"], with_rows["accept_probs"])


def test_identical_rows_leave_a_residual_of_exactly_nothing() -> None:
    target = torch.randn(1, 2, 9000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    target[..., 17] = -math.inf
    # An id without mass is rejected for sure, and the two rows, of different dtypes, cancel everywhere.
    call = plain_call(target, target[:, :1].float(), torch.tensor([[17]]))
    outputs = differential.run("triton", call)
    assert int(outputs["status"]) == Status.DRAFT_TOKEN_IMPOSSIBLE | Status.RESIDUAL_EMPTY
    assert int(outputs["num_accepted"]) == 0


def test_a_sequence_does_not_depend_on_its_batch_or_on_how_the_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_rounds(20000, torch.float32, batch=2, gamma=1)
    together = differential.run("triton", call)
    for sequence in range(2):
        one = slice(sequence, sequence + 1)
        per_sequence = {name: call[name][one] for name in ("draft_token_ids", "target", "draft", "seed")}
        alone = differential.run("triton", call | per_sequence)
        for name in differential.OUTPUTS:
            assert torch.equal(alone[name][0], together[name][sequence]), name
    for programs in (1, 10**6):
        monkeypatch.setattr(contract, "ENOUGH_PROGRAMS", programs)
        divided = differential.run("triton", call)
        assert all(torch.equal(divided[name], together[name]) for name in differential.OUTPUTS)


@pytest.mark.parametrize("vocab", [5, 300, 9001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_do_not_depend_on_where_rows_lie_in_memory(vocab: int, dtype: torch.dtype) -> None:
    call = random_rounds(vocab, dtype) | {"temperature": torch.tensor([1.0, 0.0, 0.6])}
    width = -(-vocab // 16) * 16
    padded = {
        name: torch.nn.functional.pad(call[name], (0, width - vocab))[..., :vocab] for name in ("target", "draft")
    }
    assert rounds._aligned(*padded.values())
    expected = differential.run("triton", call | padded)
    for shift in (1, 3):
        moved = {}
        for name in ("target", "draft"):
            rows = call[name]
            memory = torch.full((shift + rows.numel(),), math.nan, dtype=dtype)
            moved[name] = memory[shift:].view_as(rows).copy_(rows)
        assert not rounds._aligned(*moved.values())
        found = differential.run("triton", call | moved)
        assert all(torch.equal(found[name], expected[name]) for name in differential.OUTPUTS), shift
    filtered = {"top_k": torch.tensor([7]), "top_p": torch.tensor([0.9])}
    expected = differential.run("triton", call | padded | filtered)
    found = differential.run("triton", call | moved | filtered)
    assert all(torch.equal(found[name], expected[name]) for name in differential.OUTPUTS)
