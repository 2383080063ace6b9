"""Faults seen in other systems: loops round the verifier."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
import torch

import specker
from specker.accounting import cut_at_eos
from specker.generation import generate

from . import cases
from .cases import interpreted
from .faults import fault

PROMPT = torch.tensor([[5, 9, 3, 3, 7]])
GREEDY: dict[str, Any] = {"temperature": 0.0, "eos_token_id": ()}


def tiny_model(noise: float = 0.0) -> Any:
    """Return a random Llama of two small layers, always the same but for the noise added to its weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.6,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def target() -> Any:
    """Return the target model."""
    return tiny_model()


@pytest.fixture(scope="module")
def draft() -> Any:
    """Return a draft that is right often but not always."""
    return tiny_model(noise=0.05)


@pytest.fixture(scope="module")
def plain_tokens(target: Any) -> list[int]:
    """Return what plain greedy decoding gives, every row computed from the start."""
    tokens: list[int] = PROMPT[0].tolist()
    with torch.no_grad():
        for _ in range(24):
            tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[PROMPT.shape[1] :]


@fault("B98")
def test_text_is_cut_behind_the_first_end_of_sequence() -> None:
    assert cut_at_eos([4, 2, 9, 2, 7], {2}) == [4, 2]
    assert cut_at_eos([4, 2, 9], {9, 2}) == [4, 2]
    assert cut_at_eos([4, 5], {2}) == [4, 5]
    assert cut_at_eos([4, 5], ()) == [4, 5]


@fault("B98")
@pytest.mark.parametrize("index", range(6))
def test_an_end_of_sequence_inside_an_accepted_block_ends_the_text(
    index: int, target: Any, plain_tokens: list[int]
) -> None:
    # The target drafts for itself, so that whole blocks are accepted.
    eos = plain_tokens[index]
    result = generate(target, target, PROMPT, gamma=4, max_new_tokens=24, temperature=0.0, eos_token_id=eos)
    wanted = plain_tokens[: plain_tokens.index(eos) + 1]
    assert result.token_ids[0].tolist() == wanted
    assert result.stats.emitted == len(wanted)


@fault("B99")
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_no_more_tokens_come_than_were_asked_for(
    max_new_tokens: int, gamma: int, target: Any, plain_tokens: list[int]
) -> None:
    result = generate(target, target, PROMPT, gamma=gamma, max_new_tokens=max_new_tokens, **GREEDY)
    assert result.token_ids[0].tolist() == plain_tokens[:max_new_tokens]


def unlike_the_text(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Lower what the text holds, by twice as much for each time that it holds it."""
    return scores - 2.0 * token_ids[0].bincount(minlength=scores.shape[1])


@fault("B101")
def test_a_draft_that_equals_its_target_is_accepted_under_any_processor(target: Any) -> None:
    # A draft drawn or verified without the processor would be another distribution.
    result = generate(
        target, target, PROMPT, gamma=4, max_new_tokens=40, eos_token_id=(), seed=3, logits_processor=unlike_the_text
    )
    assert result.stats.accepted == result.stats.drafted > 20


@fault("B104")
@pytest.mark.parametrize("gamma", [1, 4])
def test_a_processor_is_handed_the_text_before_its_row(gamma: int, target: Any) -> None:
    def check(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.testing.assert_close(scores[0], target(token_ids).logits[0, -1], rtol=1e-3, atol=1e-3)
        return unlike_the_text(token_ids, scores)

    def plain() -> list[int]:
        tokens: list[int] = PROMPT[0].tolist()
        for _ in range(24):
            token_ids = torch.tensor([tokens])
            tokens.append(int(unlike_the_text(token_ids, target(token_ids).logits[:, -1]).argmax()))
        return tokens[PROMPT.shape[1] :]

    result = generate(target, target, PROMPT, gamma=gamma, max_new_tokens=24, logits_processor=check, **GREEDY)
    assert result.token_ids[0].tolist() == plain()


@fault("B102")
def test_rejected_tokens_leave_no_trace_in_the_caches(target: Any, draft: Any, plain_tokens: list[int]) -> None:
    result = generate(target, draft, PROMPT, gamma=3, max_new_tokens=24, **GREEDY)
    assert 0 < result.stats.accepted < result.stats.drafted
    assert result.token_ids[0].tolist() == plain_tokens


@fault("B103")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 4}], ids=str)
def test_log_probabilities_are_those_of_the_emitted_tokens(sampling: dict[str, Any], device: torch.device) -> None:
    rows, draft_rows = cases.random_rows(3, 9).to(device), cases.random_rows(2, 9).to(device)
    best = rows.argmax(-1)[:2]
    result = specker.verify(
        best.expand(4, 2), rows.expand(4, 3, 9), draft_rows.expand(4, 2, 9), seed=0, return_logprobs=True, **sampling
    )
    assert result.logprobs is not None
    for sequence in range(4):
        for position in range(int(result.num_emitted[sequence])):
            token = int(result.token_ids[sequence, position])
            wanted = cases.token_probs(rows[position], [token], **sampling).log()
            assert float(result.logprobs[sequence, position]) == pytest.approx(float(wanted), abs=1e-6)


@fault("B106")
@pytest.mark.usefixtures("on_backend")
def test_acceptance_rate_is_the_overlap_of_the_rows(backend: str, device: torch.device) -> None:
    rounds = 12 if interpreted(backend) else 50_000
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    draft_rows = draft.log().to(device).expand(rounds, 3)
    seed = torch.arange(rounds, device=device)
    drawn = specker.sample(draft_rows, seed=seed).token_ids
    result = specker.verify(
        drawn.unsqueeze(-1), target.log().to(device).expand(rounds, 2, 3), draft_rows.unsqueeze(1), seed=seed
    )
    overlap = float(torch.minimum(target, draft).sum())
    rate = float(result.num_accepted.double().mean())
    assert abs(rate - overlap) <= 5 * (overlap * (1 - overlap) / rounds) ** 0.5


@fault("B107")
@pytest.mark.parametrize("name", ["verify", "sample", "random", "sampling", "operators"])
def test_examples_of_the_documentation_run(name: str) -> None:
    module = importlib.import_module(f"specker.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
