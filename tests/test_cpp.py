"""The C++ kernels against the reference, operator to operator, and against themselves on other instruction sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import specker
from specker import random as specker_random
from specker.reference import RECEIPT_FIELDS
from specker.status import Status

from .cpp_cases import DTYPES, CallMaker

pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["cpp"]), reason=specker.available_backends()["cpp"] or "never"
)
ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = ("token_ids", "num_accepted", "num_emitted", "status", "logprobs", "accept_probs", "expected_accepted")
TOLERANCE = 1e-6
Outputs = dict[str, torch.Tensor]


def run_cpp(call: dict[str, Any]) -> Outputs:
    return dict(zip(OUTPUTS, torch.ops.specker.verify(*call.values()), strict=True))


def run_reference(call: dict[str, Any], **changes: Any) -> Outputs:
    return dict(zip(OUTPUTS, torch.ops.specker_reference.verify(*{**call, **changes}.values()), strict=True))


def injected(call: dict[str, Any], accept_shift: float, emission_shift: float) -> dict[str, Any]:
    """Return what replaces a call's random numbers by the same ones, shifted."""
    uniforms = call["uniforms"]
    if uniforms is None:
        batch, gamma = call["seed"].shape[0], call["max_num_draft_tokens"]
        positions = call["position"].unsqueeze(-1) + torch.arange(gamma + 1)
        pair = specker_random.uniforms(call["seed"].unsqueeze(-1), positions, specker_random.VERIFY_PURPOSE)
        uniforms = torch.stack(pair, dim=-1)
        if call["cu_num_draft_tokens"] is not None:
            lengths = call["cu_num_draft_tokens"].long().diff()
            uniforms = uniforms[torch.arange(gamma + 1) <= lengths.unsqueeze(-1)]
        elif uniforms.shape[0] != batch:
            uniforms = uniforms.expand(batch, -1, -1)
    shifted = uniforms + torch.tensor([accept_shift, emission_shift], dtype=torch.float64)
    return {"seed": None, "position": None, "uniforms": shifted.clamp(0.0, 1 - 2.0**-53)}


def explained(call: dict[str, Any], sequence: int, cpp: Outputs, reference: Outputs) -> bool:
    """Return whether a uniform within the tolerance of the one used makes the reference decide as C++ did."""
    accepted = int(cpp["num_accepted"][sequence])
    if accepted != int(reference["num_accepted"][sequence]):
        fewer = run_reference(call, **injected(call, TOLERANCE, 0.0))["num_accepted"][sequence]
        more = run_reference(call, **injected(call, -TOLERANCE, 0.0))["num_accepted"][sequence]
        return bool(fewer <= accepted <= more)
    # The inverse CDF runs through ascending ids: a smaller uniform never gives a larger id.
    lower = run_reference(call, **injected(call, 0.0, -TOLERANCE))["token_ids"][sequence, accepted]
    upper = run_reference(call, **injected(call, 0.0, TOLERANCE))["token_ids"][sequence, accepted]
    return bool(lower <= cpp["token_ids"][sequence, accepted] <= upper)


def differing_sequences(cpp: Outputs, reference: Outputs) -> Iterator[int]:
    for sequence in range(cpp["status"].shape[0]):
        same = torch.equal(cpp["token_ids"][sequence], reference["token_ids"][sequence])
        if not (same and cpp["num_accepted"][sequence] == reference["num_accepted"][sequence]):
            yield sequence


def assert_agrees(call: dict[str, Any]) -> int:
    """Compare every output of one call; return how many sequences were decided differently at a threshold."""
    cpp, reference = run_cpp(call), run_reference(call)
    for name in OUTPUTS:
        assert cpp[name].shape == reference[name].shape, name
        assert cpp[name].dtype == reference[name].dtype, name
    straddling = list(differing_sequences(cpp, reference))
    assert all(explained(call, sequence, cpp, reference) for sequence in straddling)
    agreeing = torch.ones(cpp["status"].shape[0], dtype=torch.bool)
    agreeing[straddling] = False
    for name in ("num_emitted", "status"):
        assert torch.equal(cpp[name][agreeing], reference[name][agreeing]), name
    for name in ("logprobs", "accept_probs", "expected_accepted"):
        if cpp[name].numel():
            torch.testing.assert_close(
                cpp[name][agreeing], reference[name][agreeing], rtol=1e-5, atol=2e-6, equal_nan=True
            )
    return len(straddling)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_agree_with_the_reference(seed: int) -> None:
    maker = CallMaker(seed)
    straddling, sequences = 0, 0
    for _ in range(250):
        call = maker.verify_call()
        straddling += assert_agrees(call)
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
        assert_agrees(plain | filters)


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
                None if top_p is None else torch.tensor([top_p], dtype=torch.float64), None, seed, position,
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
        cpp = torch.ops.specker.sample(logits, *parameters.values(), seed, position)
        reference = torch.ops.specker_reference.sample(logits, *parameters.values(), seed, position)
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
        run_cpp(plain | {name: value})
