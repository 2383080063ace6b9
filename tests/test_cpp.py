"""The C++ kernels against the reference, operator to operator, and against themselves on other instruction sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import specker
from specker.reference import RECEIPT_FIELDS
from specker.status import Status

from .differential import assert_agrees, run
from .random_calls import DTYPES, CallMaker

pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["cpp"]), reason=specker.available_backends()["cpp"] or "never"
)
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_agree_with_the_reference(seed: int) -> None:
    maker = CallMaker(seed)
    straddling, sequences = 0, 0
    for _ in range(250):
        call = maker.verify_call()
        straddling += assert_agrees("cpp", call)
        sequences += call["target"].shape[0]
    assert straddling <= 3
    assert sequences > 300


@pytest.mark.parametrize(("vocab", "dtype"), list(zip((128257, 50257, 32000), DTYPES, strict=True)))
def test_real_vocabularies_agree_with_the_reference(vocab: int, dtype: torch.dtype) -> None:
    maker = CallMaker(vocab)
    call = maker.verify_call()
    target = (torch.randn(3, 3, vocab, generator=maker.generator) * 3).to(dtype)
    draft = (target[:, :2].float() + torch.randn(3, 2, vocab, generator=maker.generator)).to(dtype)
    tokens = torch.multinomial(draft.float().softmax(-1).view(-1, vocab), 1, generator=maker.generator).view(3, 2)
    one = torch.ones(1, dtype=torch.float64)
    plain = dict.fromkeys(call, None) | {
        "draft_token_ids": tokens, "target": target, "draft": draft, "temperature": one, "draft_temperature": one,
        "seed": torch.arange(3), "position": torch.zeros(1, dtype=torch.int64), "max_num_draft_tokens": 2,
        "target_is_probs": False, "draft_is_probs": False, "return_logprobs": True, "return_accept_probs": True,
    }  # fmt: skip
    nucleus = {"top_p": torch.tensor([0.9, 0.99, 0.5]), "draft_top_p": torch.tensor([0.9, 0.99, 0.5])}
    several = {"top_k": torch.tensor([50, 3000, 0]), "min_p": torch.tensor([0.0, 0.0, 0.02])}
    for filters in ({}, nucleus, several, {**nucleus, **several}):
        assert_agrees("cpp", plain | filters)


class _Edges(NamedTuple):
    """One round of one draft token for many sequences, with its laws in float64."""

    tokens: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor | None
    ratio: torch.Tensor
    boundaries: torch.Tensor


def _edges(draft_is_given: bool, batch: int, vocab: int) -> _Edges:
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(batch, 2, vocab, generator=generator) * 2
    draft = target[:, :1] + torch.randn(batch, 1, vocab, generator=generator)
    tokens = torch.multinomial(draft[:, 0].softmax(-1), 1, generator=generator)
    law, drawn_law = target[:, 0].double().softmax(-1), draft[:, 0].double().softmax(-1)
    point_mass = torch.zeros_like(law).scatter(-1, tokens, 1.0)
    proposal = drawn_law if draft_is_given else point_mass
    residual = (law - proposal).clamp(min=0.0)
    ratio = (law / proposal).gather(-1, tokens).squeeze(-1)
    boundaries = residual.cumsum(-1) / residual.sum(-1, keepdim=True)
    return _Edges(tokens, target, draft if draft_is_given else None, ratio, boundaries)


@pytest.mark.parametrize("draft_is_given", [True, False])
@pytest.mark.parametrize("side", [-1, 1])
def test_acceptance_flips_at_the_ratio(draft_is_given: bool, side: int) -> None:
    edges = _edges(draft_is_given, batch=3000, vocab=100)
    uniforms = torch.full((3000, 2, 2), 0.5, dtype=torch.float64)
    uniforms[:, 0, 0] = (edges.ratio + side * 2e-6).clamp(0.0, 1 - 2.0**-53)
    result = specker.verify(edges.tokens, edges.target, edges.draft, uniforms=uniforms)
    assert torch.equal(result.num_accepted == 1, edges.ratio > uniforms[:, 0, 0])
    assert int((edges.ratio < 1).sum()) > 1000


@pytest.mark.parametrize("draft_is_given", [True, False])
@pytest.mark.parametrize("side", [-1, 1])
def test_recovered_tokens_flip_at_the_boundaries_of_the_residual(draft_is_given: bool, side: int) -> None:
    edges = _edges(draft_is_given, batch=3000, vocab=100)
    wanted = torch.randint(0, 99, (3000, 1), generator=torch.Generator().manual_seed(0))
    uniforms = torch.full((3000, 2, 2), 1 - 2.0**-53, dtype=torch.float64)
    uniforms[:, 0, 1] = (edges.boundaries.gather(-1, wanted).squeeze(-1) + side * 2e-6).clamp(0.0, 1 - 1e-6)
    result = specker.verify(edges.tokens, edges.target, edges.draft, uniforms=uniforms)
    judged = (edges.boundaries - uniforms[:, 0, 1:]).abs().amin(-1) > 1e-6
    judged &= result.num_accepted == 0
    assert int(judged.sum()) > 1000
    expected = (edges.boundaries <= uniforms[:, 0, 1:]).sum(-1)
    assert torch.equal(result.token_ids[judged, 0], expected[judged])


def _filter_rows(kind: str, vocab: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(4, vocab, generator=generator) * 3
    if kind == "tied":
        return logits.to(torch.bfloat16)
    if kind == "flat":
        return logits * 1e-3
    if kind == "geometric":
        return -0.05 * torch.randperm(vocab, generator=generator).float().expand(4, -1)
    if kind == "one above 40 %":
        logits[:, 7] = (logits.exp().sum(dim=-1) * 0.8).log()
    elif kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
        logits[:, 0] = 0.0
    elif kind in ("clustered", "hidden"):
        # The sample that guesses a floor sees every large value, or none.
        sampled = torch.arange(vocab) // 128 % max(1, -(-vocab // 128) // 16 + 1) == 0
        logits = logits + 6.0 * (sampled if kind == "clustered" else ~sampled)
    elif kind == "narrow":
        # Thousands of distinct neighbours in float32 beside far outliers: the histogram has to narrow its range.
        logits = 1.0 + torch.arange(vocab, dtype=torch.float32).expand(4, -1) * 2.0**-23
        logits = torch.cat([logits, torch.tensor([[-1e30, 1.01]]).expand(4, -1)], dim=1)
    return logits


@pytest.mark.parametrize("vocab", [40, 3000, 20000])
@pytest.mark.parametrize(
    "kind", ["random", "tied", "flat", "geometric", "one above 40 %", "masked", "clustered", "hidden", "narrow"]
)
def test_filters_find_the_thresholds_of_a_sort(kind: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = _filter_rows(kind, vocab, generator)
    seed, position = torch.arange(4), torch.zeros(1, dtype=torch.int64)
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.1], dtype=torch.float64)
    for top_k in (None, 1, 50, 2500, 9000):
        for top_p in (None, 1e-9, 0.5, 0.95, 1 - 1e-12):
            arguments = (
                logits, temperature, None if top_k is None else torch.tensor([top_k]),
                None if top_p is None else torch.tensor([top_p], dtype=torch.float64), None, *[None] * 4,
                seed, position,
            )  # fmt: skip
            cpp, reference = torch.ops.specker.sample(*arguments), torch.ops.specker_reference.sample(*arguments)
            names = dict(zip(RECEIPT_FIELDS, cpp[2].unbind(-1), strict=True))
            expected = dict(zip(RECEIPT_FIELDS, reference[2].unbind(-1), strict=True))
            assert torch.equal(names["threshold"], expected["threshold"]), (top_k, top_p)
            torch.testing.assert_close(names["weight_sum"], expected["weight_sum"], rtol=5e-7, atol=0.0)
            assert torch.equal(cpp[1], reference[1])


def test_sample_agrees_with_the_reference() -> None:
    maker = CallMaker(5)
    straddling = 0
    for _ in range(300):
        batch, vocab = maker.pick((0, 1, 4)), maker.pick((1, 5, 257, 4097, 9000))
        logits = maker.strided(maker.rows((batch,), vocab, is_probs=False))
        parameters = maker.parameters(batch)
        seed, position = maker.integers(-(2**62), 2**62, batch), maker.integers(-5, 2**40, maker.pick((1, batch)))
        adjustments = maker.adjustments(batch, 1, False, vocab, prefix="")
        arguments = (logits, *parameters.values(), *adjustments.values(), seed, position)
        cpp, reference = torch.ops.specker.sample(*arguments), torch.ops.specker_reference.sample(*arguments)
        assert torch.equal(cpp[1], reference[1])
        same = cpp[0] == reference[0]
        straddling += int((~same).sum())
        torch.testing.assert_close(cpp[2][same], reference[2][same], rtol=5e-7, atol=0.0, equal_nan=True)
    assert straddling <= 1


def test_status_bits_are_those_of_python() -> None:
    header = (ROOT / "csrc" / "contract.h").read_text()
    body = header[header.index("enum Status") : header.index("};", header.index("enum Status"))]
    assert {name: int(value) for name, value in re.findall(r"(\w+) = (\d+),", body)} == {
        bit.name: bit.value for bit in Status
    }


def test_identical_rows_leave_no_residual() -> None:
    logits = torch.randn(1, 2, 9000, generator=torch.Generator().manual_seed(0))
    logits[0, 0, 5] = -torch.inf
    uniforms = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    result = specker.verify(torch.tensor([[5]]), logits, logits[:, :1], uniforms=uniforms)
    assert result.status.tolist() == [Status.DRAFT_TOKEN_IMPOSSIBLE | Status.RESIDUAL_EMPTY]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("target", torch.zeros(1, 1, 4, dtype=torch.float64), "target: expected dtype float32, bfloat16 or float16"),
        ("temperature", torch.ones(1, dtype=torch.int64), "temperature: expected dtype float64 or float32"),
        ("seed", torch.ones(1), "seed: expected dtype int64 or int32"),
        ("uniforms", torch.zeros(1, 1, 2), "uniforms: expected dtype float64"),
        ("target", torch.zeros(1, 1, 8)[..., ::2], "target: expected a contiguous last axis"),
        ("seed", None, "seed and position: expected tensors where uniforms is None"),
    ],
)  # fmt: skip
def test_the_operator_refuses_what_it_would_misread(name: str, value: Any, message: str) -> None:
    call = CallMaker(0).verify_call()
    one = torch.ones(1, dtype=torch.float64)
    plain = dict.fromkeys(call, None) | {
        "draft_token_ids": torch.zeros(1, 0, dtype=torch.int64), "target": torch.zeros(1, 1, 4), "temperature": one,
        "draft_temperature": one, "seed": torch.zeros(1, dtype=torch.int64),
        "position": torch.zeros(1, dtype=torch.int64), "max_num_draft_tokens": 0, "target_is_probs": False,
        "draft_is_probs": False, "return_logprobs": False, "return_accept_probs": False,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        run("cpp", plain | {name: value})


def test_a_proven_acceptance_does_not_lose_the_largest_value() -> None:
    # The first shard proves acceptance; beside the second its mass is 0 in float64.
    draft = torch.zeros(1, 1, 4097)
    draft[0, 0, 4096] = 9.0
    cold = specker.Sampling(temperature=1e-4)
    uniforms = torch.full((1, 2, 2), 0.5, dtype=torch.float64)
    result = specker.verify(
        torch.tensor([[0]]), torch.zeros(1, 2, 4097), draft, draft_sampling=cold, uniforms=uniforms
    )  # fmt: skip
    assert result.num_accepted.tolist() == [1]
    assert result.status.tolist() == [Status.DRAFT_TOKEN_IMPOSSIBLE]
