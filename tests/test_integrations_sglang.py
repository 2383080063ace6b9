"""SGLang's chain verify functions, as its workers call them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import specker
from specker import Status, checks
from specker.integrations.sglang import chain_speculative_sampling_triton, verify_tree_greedy

from .copies import large_results

VOCAB = 9


def links(lengths: list[int], slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return children and siblings of chains of so many draft tokens."""
    children = torch.full((len(lengths), slots), -1, dtype=torch.int64)
    for request, length in enumerate(lengths):
        children[request, :length] = torch.arange(1, length + 1)
    return children, torch.full_like(children, -1)


def batch(lengths: list[int], slots: int = 4, vocab: int = VOCAB, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a batch as a worker prepares them; outputs hold what must not remain."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    target_logits = torch.randn(count, slots, vocab, generator=generator) * 2
    draft_probs = (target_logits + torch.randn(count, slots, vocab, generator=generator))[:, :-1].softmax(-1)
    drafts = torch.multinomial(draft_probs.reshape(-1, vocab), 1, generator=generator).reshape(count, slots - 1)
    children, siblings = links(lengths, slots)
    return {
        "predicts": torch.full((count * slots,), 77, dtype=torch.int32),
        "accept_index": torch.full((count, slots), 55, dtype=torch.int32),
        "accept_token_num": torch.full((count,), 66, dtype=torch.int32),
        "candidates": torch.cat([torch.full((count, 1), 999), drafts], dim=1),
        "retrive_index": torch.arange(count * slots).reshape(count, slots),
        "retrive_next_token": children,
        "retrive_next_sibling": siblings,
        "uniform_samples": torch.rand(count, slots, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(count, generator=generator),
        "target_probs": target_logits.softmax(-1),
        "draft_probs": draft_probs,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }


def one_by_one(inputs: dict[str, Any], lengths: list[int]) -> list[list[int]]:
    """Return the tokens that verify emits for each request alone under the same uniforms."""
    emitted = []
    for request, length in enumerate(lengths):
        uniforms = torch.zeros(1, length + 1, 2, dtype=torch.float64)
        uniforms[0, :length, 0] = inputs["uniform_samples"][request, :length]
        uniforms[0, :, 1] = inputs["uniform_samples_for_final_sampling"][request]
        result = specker.verify_from_probs(
            inputs["candidates"][request, 1 : length + 1].unsqueeze(0),
            inputs["target_probs"][request, : length + 1].unsqueeze(0),
            inputs["draft_probs"][request, :length].unsqueeze(0),
            uniforms=uniforms,
        )
        emitted.append(result.token_ids[0, : int(result.num_emitted)].tolist())
    return emitted


def written(inputs: dict[str, Any], emitted: list[list[int]]) -> list[Any]:
    """Return what the outputs hold when those tokens were emitted."""
    slots = inputs["candidates"].shape[1]
    predicts = torch.zeros(len(emitted) * slots, dtype=torch.int64)
    accept_index = torch.full((len(emitted), slots), -1)
    for request, tokens in enumerate(emitted):
        places = inputs["retrive_index"][request, : len(tokens)]
        predicts[places] = torch.tensor(tokens)
        accept_index[request, : len(tokens)] = places
    return [predicts.tolist(), accept_index.tolist(), [len(tokens) - 1 for tokens in emitted]]


def outputs(inputs: dict[str, Any]) -> list[Any]:
    """Return what the outputs hold."""
    return [inputs[name].tolist() for name in ("predicts", "accept_index", "accept_token_num")]


def test_each_request_is_one_round_of_verify(on_backend: str) -> None:
    lengths = [3, 0, 2, 3]
    inputs = batch(lengths, seed=3)
    emitted = one_by_one(inputs, lengths)
    chain_speculative_sampling_triton(**inputs)
    assert outputs(inputs) == written(inputs, emitted)


def test_many_batches_agree_with_one_round_each() -> None:
    seen = set()
    for trial in range(40):
        lengths = [(trial + request) % 4 for request in range(5)]
        inputs = batch(lengths, seed=trial)
        # Requests may stand anywhere in the flat output.
        inputs["retrive_index"] = torch.randperm(20, generator=torch.Generator().manual_seed(trial)).reshape(5, 4)
        emitted = one_by_one(inputs, lengths)
        chain_speculative_sampling_triton(**inputs)
        assert outputs(inputs) == written(inputs, emitted)
        seen |= {(length, len(tokens)) for length, tokens in zip(lengths, emitted, strict=True)}
    assert seen == {(length, count) for length in range(4) for count in range(1, length + 2)}


def test_without_links_a_request_is_a_full_chain() -> None:
    inputs = batch([3, 3], seed=1)
    emitted = one_by_one(inputs, [3, 3])
    chain_speculative_sampling_triton(**{**inputs, "retrive_next_token": None, "retrive_next_sibling": None})
    assert outputs(inputs) == written(inputs, emitted)


def test_a_coin_of_zero_accepts_no_impossible_token(on_backend: str) -> None:
    inputs = batch([1], slots=2, vocab=4)
    inputs["candidates"] = torch.tensor([[999, 2]])
    inputs["target_probs"] = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [0.25] * 4]])
    inputs["draft_probs"] = torch.tensor([[[0.0, 0.0, 1.0, 0.0]]])
    inputs["uniform_samples"][:] = 0.0
    inputs["uniform_samples_for_final_sampling"][:] = 0.0
    chain_speculative_sampling_triton(**inputs)
    assert outputs(inputs) == [[1, 0], [[0, -1]], [0]]


def test_equal_rows_leave_no_residual_and_no_last_token() -> None:
    """Where SGLang falls through to the last id, the token is drawn from the target."""
    inputs = batch([1], slots=2, vocab=3)
    inputs["candidates"] = torch.tensor([[999, 0]])
    inputs["target_probs"] = torch.tensor([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    inputs["draft_probs"] = inputs["target_probs"][:, :1].clone()
    inputs["uniform_samples_for_final_sampling"][:] = 0.2
    status = torch.zeros(1, dtype=torch.int32)
    chain_speculative_sampling_triton(**inputs, output_status=status)
    assert outputs(inputs) == [[1, 0], [[0, -1]], [0]]
    assert Status(int(status)) == Status.DRAFT_TOKEN_IMPOSSIBLE | Status.RESIDUAL_EMPTY


def test_an_invalid_row_concerns_its_own_request_only() -> None:
    inputs = batch([3, 3, 3], seed=2)
    emitted = one_by_one(inputs, [3, 3, 3])
    emitted[1] = [-1]
    inputs["target_probs"][1, 0] = math.nan
    status = torch.zeros(3, dtype=torch.int32)
    chain_speculative_sampling_triton(**inputs, output_status=status)
    assert outputs(inputs) == written(inputs, emitted)
    assert status.tolist() == [0, int(Status.TARGET_INVALID), 0]


def test_rows_are_read_where_they_lie() -> None:
    inputs = batch([3, 3], vocab=5000)
    padded = torch.full((2, 4, 5003), math.nan, dtype=torch.bfloat16)
    padded[:, :, :5000] = inputs["target_probs"]
    sliced = {**inputs, "target_probs": padded[:, :, :5000]}
    emitted = one_by_one({**sliced, "target_probs": padded[:, :, :5000].contiguous()}, [3, 3])
    assert large_results(lambda: chain_speculative_sampling_triton(**sliced), 5000) == []
    assert outputs(sliced) == written(sliced, emitted)


def greedy(
    lengths: list[int], target_predict: list[list[int]], candidates: list[list[int]], width: int
) -> dict[str, Any]:
    """Return the arguments of a greedy call."""
    slots = len(candidates[0])
    children, siblings = links(lengths, slots)
    return {
        "predicts": torch.full((len(lengths) * slots,), 77, dtype=torch.int32),
        "accept_index": torch.full((len(lengths), width), 55, dtype=torch.int32),
        "accept_token_num": torch.full((len(lengths),), 66, dtype=torch.int32),
        "candidates": torch.tensor(candidates),
        "retrive_index": torch.arange(len(lengths) * slots).reshape(-1, slots),
        "retrive_next_token": children,
        "retrive_next_sibling": siblings,
        "target_predict": torch.tensor(target_predict),
    }


def test_greedy_keeps_what_the_arg_max_agrees_with() -> None:
    inputs = greedy([2, 2, 1], [[4, 5, 6], [4, 5, 6], [4, 5, 6]], [[9, 4, 5], [9, 4, 8], [9, 4, 5]], width=3)
    verify_tree_greedy(**inputs)
    assert outputs(inputs) == [
        [4, 5, 6, 4, 5, 0, 4, 5, 0],
        [[0, 1, 2], [3, 4, -1], [6, 7, -1]],
        [2, 1, 1],
    ]


def test_greedy_keeps_no_more_than_its_output_holds() -> None:
    inputs = greedy([2], [[4, 5, 6]], [[9, 4, 5]], width=2)
    verify_tree_greedy(**inputs)
    assert outputs(inputs) == [[4, 5, 77], [[0, 1]], [1]]


def test_greedy_does_not_take_up_again_behind_a_rejection() -> None:
    inputs = greedy([3], [[4, 5, 6, 7]], [[9, 1, 5, 6]], width=4)
    verify_tree_greedy(**inputs)
    assert outputs(inputs) == [[4, 0, 0, 0], [[0, -1, -1, -1]], [0]]


def test_greedy_without_links_is_a_full_chain() -> None:
    inputs = greedy([1], [[4, 5, 6]], [[9, 4, 5]], width=3)
    verify_tree_greedy(**{**inputs, "retrive_next_token": None, "retrive_next_sibling": None})
    assert outputs(inputs) == [[4, 5, 6], [[0, 1, 2]], [2]]


@pytest.mark.parametrize(
    ("children", "siblings"),
    [
        ([1, -1, -1, -1], [-1, 2, -1, -1]),
        ([2, -1, 1, -1], [-1, -1, -1, -1]),
        ([1, 2, 3, 4], [-1, -1, -1, -1]),
        ([1, 3, -1, -1], [-1, -1, -1, -1]),
        (None, [-1, 2, -1, -1]),
    ],
    ids=["siblings", "other order", "no end", "a slot left out", "siblings alone"],
)
def test_trees_are_refused(children: list[int] | None, siblings: list[int]) -> None:
    inputs = batch([3, 3])
    changed = {"retrive_next_sibling": torch.stack([links([3], 4)[1][0], torch.tensor(siblings)])}
    changed["retrive_next_token"] = (
        None if children is None else torch.stack([links([3], 4)[0][0], torch.tensor(children)])
    )
    with pytest.raises(NotImplementedError, match=r"expected chains, .* got a tree in requests \[1\]"):
        chain_speculative_sampling_triton(**{**inputs, **changed})
    outputs_only = {name: inputs[name] for name in list(inputs)[:5]}
    with pytest.raises(NotImplementedError, match=r"got a tree in requests \[1\]"):
        verify_tree_greedy(**outputs_only, **changed, target_predict=torch.zeros(2, 4).long())


@pytest.mark.parametrize("linked", [True, False], ids=["links", "no links"])
def test_greedy_is_the_same_without_looking_at_a_value(linked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    for slots in (1, 2, 5):
        for width in (1, slots, slots + 2):
            lengths = torch.randint(0, slots, (30,), generator=generator).tolist()
            numbers = torch.randint(0, 3, (2, 30, slots), generator=generator).tolist()
            inputs = greedy(lengths, numbers[1], numbers[0], width)
            if not linked:
                inputs |= {"retrive_next_token": None, "retrive_next_sibling": None}
            inputs["retrive_index"] = torch.randperm(30 * slots, generator=generator).view(30, slots)
            copy = {name: None if value is None else value.clone() for name, value in inputs.items()}
            verify_tree_greedy(**inputs)
            with monkeypatch.context() as patched:
                # As on a GPU, where looking would wait.
                patched.setattr(checks, "host_readable", lambda _: False)
                verify_tree_greedy(**copy)
            assert outputs(copy) == outputs(inputs)


def test_unreachable_slots_may_hold_anything() -> None:
    """Padding slots behind the end of a chain have links nobody follows."""
    inputs = batch([1, 3], seed=1)
    emitted = one_by_one(inputs, [1, 3])
    inputs["retrive_next_token"][0] = torch.tensor([1, -1, 3, 7])
    inputs["retrive_next_sibling"][0, 2:] = 1
    chain_speculative_sampling_triton(**inputs)
    assert outputs(inputs) == written(inputs, emitted)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"threshold_single": 0.9}, NotImplementedError, "threshold_single: expected 1.0, got 0.9"),
        ({"threshold_acc": 0.5}, NotImplementedError, "threshold_acc: expected 1.0, got 0.5"),
        ({"block_verification": True}, NotImplementedError, "block_verification: expected False"),
        ({"draft_probs": torch.ones(2, 2, VOCAB)}, ValueError, "draft_probs: expected at least 3 rows"),
        ({"draft_probs": torch.ones(2, 3, VOCAB + 1)}, ValueError, "draft_probs: expected shape"),
        ({"uniform_samples": torch.ones(2, 2)}, ValueError, "uniform_samples: expected at least 3 columns, got 2"),
        ({"uniform_samples": torch.ones(2, 4)}, ValueError, r"uniforms: expected values in \[0, 1\)"),
        ({"uniform_samples_for_final_sampling": torch.ones(3)}, ValueError, "uniform_samples_for_final_sampling: "),
        ({"accept_index": torch.zeros(2, 3).int()}, ValueError, "accept_index: expected at least 4 columns, got 3"),
        ({"accept_index": torch.zeros(2, 0).int()}, ValueError, "accept_index: expected at least one column"),
        ({"accept_token_num": torch.zeros(3).int()}, ValueError, r"accept_token_num: expected shape \(2,\)"),
        ({"predicts": torch.zeros(8)}, TypeError, "predicts: expected dtype int32 or int64"),
        ({"candidates": torch.zeros(2, 3).int()}, ValueError, r"candidates: expected shape \(2, 4\)"),
        ({"retrive_index": torch.zeros(2, 3).int()}, ValueError, r"retrive_index: expected shape \(2, 4\)"),
        ({"retrive_index": torch.tensor([[0, 1, 2, 3], [4, 5, 6, 8]])}, ValueError,
         r"retrive_index: expected indices into predicts, 0\.\.7, got 0 to 8"),
        ({"retrive_index": torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1]])}, ValueError, "got -1 to 6"),
        ({"retrive_next_token": torch.zeros(2, 3).int()}, ValueError, r"retrive_next_token: expected shape"),
        ({"retrive_next_sibling": torch.zeros(2).int()}, ValueError, r"retrive_next_sibling: expected shape"),
        ({"output_status": torch.zeros(2)}, TypeError, "output_status: expected dtype int32"),
        ({"target_probs": torch.ones(2, 0, VOCAB)}, ValueError, "candidates: expected a root slot"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        chain_speculative_sampling_triton(**{**batch([3, 3]), **change})


def test_greedy_names_bad_arguments() -> None:
    inputs = greedy([2], [[4, 5, 6]], [[9, 4, 5]], width=3)
    with pytest.raises(ValueError, match=r"target_predict: expected shape \(1, 3\), got \(1, 2\)"):
        verify_tree_greedy(**{**inputs, "target_predict": torch.zeros(1, 2).long()})
    with pytest.raises(TypeError, match="candidates: expected dtype"):
        verify_tree_greedy(**{**inputs, "candidates": torch.zeros(1, 3)})
