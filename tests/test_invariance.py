"""A sequence's result depends on its own rows, parameters, seed and position alone, to the last bit."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import specker

from . import cases
from .cases import interpreted

pytestmark = pytest.mark.usefixtures("on_backend")


class Rounds(NamedTuple):
    """The inputs of a batch of rounds; every field but a draft of None has one entry a sequence."""

    tokens: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor | None
    num_draft_tokens: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    def take(self, rows: Sequence[int]) -> Rounds:
        """Return some sequences, in this order."""
        return Rounds(*(None if field is None else field[list(rows)] for field in self))  # type: ignore[arg-type]

    def options(self) -> dict[str, Any]:
        """Return the arguments that all forms of verify share."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        return values | {"return_logprobs": True, "return_accept_probs": True}

    def verify(self, **changed: Any) -> specker.VerifyResult:
        """Verify the batch."""
        options = self.options() | {"num_draft_tokens": self.num_draft_tokens} | changed
        return specker.verify(self.tokens, self.target, self.draft, **options)


SHAPES = {"a small vocabulary": 37, "several shards": 9001}
DRAFTS = ["draft rows", "point mass"]
Base = Callable[..., list[list[object]]]


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def vocab(request: pytest.FixtureRequest, backend: str) -> int:
    """Return the size of the vocabulary."""
    if request.param > 100 and (backend == "reference" or interpreted(backend)):
        pytest.skip("the reference has no shards, and several take the interpreter too long")
    return int(request.param)


@pytest.fixture
def make(backend: str, device: torch.device, vocab: int) -> Callable[..., Rounds]:
    """Return the function that makes a batch: any mix of greedy, plain and filtered sequences, and of lengths."""

    def make(draft: str = "draft rows", dtype: torch.dtype = torch.float32) -> Rounds:
        batch, gamma = (3, 2) if interpreted(backend) else (6, 3)
        target = cases.random_rows(batch, gamma + 1, vocab, dtype=dtype)
        # Near the target, so that drafts are accepted and rejected at all positions.
        draft_rows = (target[:, :gamma] + 0.7 * cases.random_rows(batch, gamma, vocab)).to(dtype)
        tokens = torch.stack([draft_rows[:, step].argmax(-1) for step in range(gamma)], dim=1)
        fields = (
            tokens,
            target,
            draft_rows,
            torch.tensor([2, 1, 2, 3, 0, 3])[:batch],
            torch.tensor([0.8, 0.0, 1.0, 0.7, 1.3, 2.0])[:batch],
            torch.tensor([5, 0, 0, 0, 12, 20])[:batch],
            torch.tensor([0.9, 1.0, 1.0, 0.8, 1.0, 0.95])[:batch],
            torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.01])[:batch],
            torch.tensor([3, -7, 2**40, 11, -(2**63), 99])[:batch],
            torch.tensor([0, 5, 2**33, 7, 1, 123])[:batch],
        )
        rounds = Rounds(*(field.to(device) for field in fields))
        return rounds._replace(draft=None) if draft == "point mass" else rounds

    return make


_BASE: dict[object, list[list[object]]] = {}


@pytest.fixture
def base(backend: str, vocab: int, make: Callable[..., Rounds]) -> Base:
    """Return the function that gives the exact results of a batch, computed once."""

    def base(draft: str = "draft rows", dtype: torch.dtype = torch.float32) -> list[list[object]]:
        key = backend, vocab, draft, dtype
        if key not in _BASE:
            _BASE[key] = bits(make(draft, dtype).verify())
        return _BASE[key]

    return base


def bits(result: specker.VerifyResult) -> list[list[object]]:
    """Return the exact result of every sequence."""
    return [cases.sequence_of(result, row) for row in range(result.num_accepted.shape[0])]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_alone_equals_itself_in_a_batch(draft: str, dtype: torch.dtype, make: Callable[..., Rounds]) -> None:
    rounds = make(draft, dtype)
    together = bits(rounds.verify())
    alone = [bits(rounds.take([row]).verify())[0] for row in range(len(together))]
    assert alone == together
    assert len({str(row) for row in together}) == len(together)


@pytest.mark.parametrize("draft", DRAFTS)
def test_sequences_may_come_in_any_order_and_number(draft: str, make: Callable[..., Rounds], base: Base) -> None:
    rounds, wanted = make(draft), base(draft)
    last = len(wanted) - 1
    for order in ([*range(last, -1, -1)], [last, 0, 0], [1, last, 1]):
        assert bits(rounds.take(order).verify()) == [wanted[row] for row in order]


def test_calls_may_be_split_at_any_size(make: Callable[..., Rounds], base: Base) -> None:
    rounds, wanted = make(), base()
    for size in (2, 4):
        pieces = [range(len(wanted))[start : start + size] for start in range(0, len(wanted), size)]
        assert [row for piece in pieces for row in bits(rounds.take(piece).verify())] == wanted


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("extra", [1, 3])
def test_padding_behind_the_length_changes_nothing(
    draft: str, extra: int, make: Callable[..., Rounds], base: Base
) -> None:
    rounds, pad = make(draft), torch.nn.functional.pad
    wide = rounds._replace(
        tokens=pad(rounds.tokens, (0, extra), value=-1),
        target=pad(rounds.target, (0, 0, 0, extra), value=math.nan),
        draft=None if rounds.draft is None else pad(rounds.draft, (0, 0, 0, extra), value=math.nan),
    ).verify()
    assert wide.accept_probs is not None
    gamma = rounds.tokens.shape[1]
    assert wide.accept_probs[:, gamma:].eq(0).all()
    assert bits(wide._replace(accept_probs=wide.accept_probs[:, :gamma])) == base(draft)
    assert wide.token_ids[:, gamma + 1 :].eq(-1).all()


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_lies_behind_the_length_changes_nothing(draft: str, make: Callable[..., Rounds], base: Base) -> None:
    rounds, wanted = make(draft), base(draft)
    tokens, target = rounds.tokens.clone(), rounds.target.clone()
    rows = None if rounds.draft is None else rounds.draft.clone()
    for sequence, length in enumerate(rounds.num_draft_tokens.tolist()):
        tokens[sequence, length:] = 10**9
        target[sequence, length + 1 :] = math.nan
        if rows is not None:
            rows[sequence, length:] = math.inf
    assert bits(rounds._replace(tokens=tokens, target=target, draft=rows).verify()) == wanted


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_flat_form_equals_the_padded_one(draft: str, make: Callable[..., Rounds], base: Base) -> None:
    rounds = make(draft)
    lengths = rounds.num_draft_tokens.tolist()
    flat = specker.verify_flat(
        torch.cat([tokens[:length] for tokens, length in zip(rounds.tokens, lengths, strict=True)]),
        torch.cat([rows[: length + 1] for rows, length in zip(rounds.target, lengths, strict=True)]),
        None
        if rounds.draft is None
        else torch.cat([rows[:length] for rows, length in zip(rounds.draft, lengths, strict=True)]),
        cu_num_draft_tokens=torch.nn.functional.pad(rounds.num_draft_tokens.cumsum(0), (1, 0)),
        max_num_draft_tokens=rounds.tokens.shape[1],
        **rounds.options(),
    )
    assert bits(flat) == base(draft)


def test_strides_change_nothing(vocab: int, make: Callable[..., Rounds], base: Base) -> None:
    rounds, wanted = make(), base()
    assert rounds.draft is not None
    for views in (
        [torch.nn.functional.pad(rows, (0, 5), value=math.nan)[..., :vocab] for rows in (rounds.target, rounds.draft)],
        [rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (rounds.target, rounds.draft)],
        [rows.repeat_interleave(2, dim=0)[::2] for rows in (rounds.target, rounds.draft)],
    ):
        tokens = torch.nn.functional.pad(rounds.tokens, (1, 2), value=-9)[:, 1:-2]
        assert bits(rounds._replace(tokens=tokens, target=views[0], draft=views[1]).verify()) == wanted


def test_expanded_rows_equal_their_copies(make: Callable[..., Rounds]) -> None:
    rounds = make()
    assert rounds.draft is not None
    target, draft = rounds.target[:1].expand_as(rounds.target), rounds.draft[:1].expand_as(rounds.draft)
    copied = rounds._replace(target=target.contiguous(), draft=draft.contiguous())
    assert bits(rounds._replace(target=target, draft=draft).verify()) == bits(copied.verify())


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads behind a test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_number_of_threads_changes_nothing(draft: str, backend: str, make: Callable[..., Rounds]) -> None:
    if backend == "triton":
        pytest.skip("kernels do not use the threads of torch")
    rounds = make(draft)
    results = []
    for count in range(1, 9):
        torch.set_num_threads(count)
        results.append(bits(rounds.verify()))
        results.append(bits(rounds.take([2]).verify()))
    assert results[::2] == [results[0]] * 8
    assert results[1::2] == [results[0][2:3]] * 8


def test_repeated_and_after_other_calls_the_result_is_the_same(make: Callable[..., Rounds], base: Base) -> None:
    rounds, wanted = make(), base()
    rounds.take([0, 1]).verify(seed=5, position=9)
    specker.sample(rounds.target[:, 0], seed=1, temperature=0.3)
    torch.manual_seed(123)
    torch.rand(5)
    assert bits(rounds.verify()) == wanted


def test_calls_from_several_python_threads_do_not_meet(backend: str, make: Callable[..., Rounds], base: Base) -> None:
    if interpreted(backend):
        pytest.skip("the interpreter keeps its state in globals")
    rounds, wanted, got = make(), base(), {}

    def work(name: int) -> None:
        with specker.backend(backend):
            got[name] = [bits(rounds.verify()) for _ in range(5)]

    workers = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert got == {name: [wanted] * 5 for name in range(4)}


@pytest.mark.parametrize("draft", DRAFTS)
def test_inputs_are_not_modified(draft: str, make: Callable[..., Rounds]) -> None:
    rounds = make(draft)
    before = [None if field is None else field.clone() for field in rounds]
    rounds.verify()
    specker.sample(rounds.target[:, 0], temperature=rounds.temperature, top_k=rounds.top_k, seed=rounds.seed)
    for field, kept in zip(rounds, before, strict=True):
        assert field is kept is None or (field is not None and kept is not None and torch.equal(field, kept))


def test_identities_beside_filtered_neighbours_equal_a_call_without_filters(
    make: Callable[..., Rounds], base: Base
) -> None:
    # Sequence 2 is plain, at temperature 1.
    plain = make().take([2]).verify(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert bits(plain)[0] == base()[2]


def test_a_receipt_decides_as_its_draft_rows_do(make: Callable[..., Rounds]) -> None:
    rounds = make()
    assert rounds.draft is not None
    sampling = {name: getattr(rounds, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    steps = [
        specker.sample(rounds.draft[:, step], seed=rounds.seed, position=rounds.position + step, **sampling)
        for step in range(rounds.tokens.shape[1])
    ]
    drawn = rounds._replace(tokens=torch.stack([step.token_ids for step in steps], dim=1))
    receipt = specker.DraftReceipt.stack([step.receipt for step in steps])
    assert bits(drawn.verify(draft_receipt=receipt)) == bits(drawn.verify())


def test_sample_depends_on_its_own_row_alone(make: Callable[..., Rounds]) -> None:
    rounds = make()
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")

    def drawn(some: Rounds, logits: torch.Tensor) -> list[tuple[int, list[int]]]:
        result = specker.sample(logits, **{name: getattr(some, name) for name in names})
        values = result.receipt.values.view(torch.int64).tolist()
        return list(zip(result.token_ids.tolist(), values, strict=True))

    logits, vocab = rounds.target[:, 0], rounds.target.shape[-1]
    wanted = drawn(rounds, logits.contiguous())
    order = [*range(len(wanted))][::-1]
    assert drawn(rounds.take(order), logits[order]) == [wanted[row] for row in order]
    assert drawn(rounds.take([1]), logits[1:2]) == wanted[1:2]
    assert drawn(rounds, torch.nn.functional.pad(logits, (0, 3), value=math.nan)[:, :vocab]) == wanted
