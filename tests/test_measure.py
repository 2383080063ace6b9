"""`specker measure`: overlap against plain enumeration, costs, prediction against measurement, the command."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from specker import measure as measuring
from specker.cli_theory import PROMPTS, register
from specker.generation import PromptLookup, SkipLayers
from specker.measure import Costs, Speed, measure, measure_costs, measure_overlap, measure_speeds
from specker.models import LoadedModel
from specker.sampling import Sampling
from specker.theory import expected_tokens

transformers = pytest.importorskip("transformers")

VOCAB = 64


def tiny_model(seed: int, layers: int = 3, vocab: int = VOCAB) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model(0)


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (1, length), generator=generator) for length in (5, 9, 7)]


@torch.no_grad()
def enumerated_acceptance(target: Any, draft: Any, prompt: torch.Tensor, temperature: float) -> list[float]:
    """Acceptance of two positions behind a prompt, summed over all pairs of draft tokens."""
    vocab = target.config.vocab_size
    pairs = torch.tensor(list(itertools.product(range(vocab), repeat=2)))
    texts = torch.cat([prompt.expand(len(pairs), -1), pairs[:, :1]], dim=1)
    target_law, draft_law = (
        torch.softmax(model(input_ids=texts).logits[:, -2:].double() / temperature, dim=-1) for model in (target, draft)
    )
    shared = torch.minimum(target_law, draft_law)
    first = shared[0, 0].sum()
    # One row for each first token: the pairs with second token 0.
    arrives, overlaps = shared[::vocab, 0].gather(1, pairs[::vocab, :1])[:, 0], shared[::vocab, 1].sum(-1)
    return [float(first), float((arrives * overlaps).sum() / arrives.sum())]


def test_overlap_matches_enumeration() -> None:
    small, draft = tiny_model(2, vocab=8), tiny_model(3, vocab=8)
    prompt = torch.tensor([[1, 5, 2]])
    expected = enumerated_acceptance(small, draft, prompt, 0.8)
    # One round a call, from one context: the average over seeds is the enumerated expectation.
    one_round = [measure_overlap(small, draft, [prompt], 1, 1, Sampling(0.8), seed)[0] for seed in range(3)]
    assert one_round == pytest.approx([expected[0]] * 3, abs=1e-5)
    averaged = measure_overlap(small, draft, [prompt] * 250, 2, 1, Sampling(0.8), 0)
    assert averaged[0] == pytest.approx(expected[0], abs=1e-5)
    assert averaged[1] == pytest.approx(expected[1], abs=0.06)


def test_overlap_with_itself_is_one(target: Any, prompts: list[torch.Tensor]) -> None:
    for temperature in (0.0, 1.0):
        alphas = measure_overlap(target, target, prompts, 3, 12, Sampling(temperature), 0)
        assert alphas == pytest.approx([1.0] * 3, abs=1e-4)


def test_overlap_respects_filters(target: Any, prompts: list[torch.Tensor]) -> None:
    draft = SkipLayers((1,))
    free, filtered, greedy = (
        measure_overlap(target, draft, prompts, 2, 12, sampling, 0)
        for sampling in (Sampling(), Sampling(1.0, top_k=1), Sampling(0.0))
    )
    assert filtered == pytest.approx(greedy, abs=1e-5)
    assert free != pytest.approx(greedy, abs=1e-3)


def test_overlap_of_prompt_lookup_is_the_targets_probability(target: Any) -> None:
    repeating = torch.tensor([[3, 9, 3, 9, 3]])
    alphas = measure_overlap(target, PromptLookup(), [repeating], 1, 1, Sampling(), 0)
    with torch.no_grad():
        law = torch.softmax(target(input_ids=repeating).logits[0, -1].double(), dim=-1)
    assert alphas == pytest.approx([float(law[9])], abs=1e-5)
    # Nothing to copy: no draft token, so nothing is accepted.
    assert measure_overlap(target, PromptLookup(), [torch.tensor([[1, 2]])], 2, 1, Sampling(), 0) == [0.0, 0.0]


def test_predicted_tokens_match_the_decode_loop(target: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    many = [torch.randint(0, VOCAB, (1, 6), generator=generator) for _ in range(4)]
    draft = SkipLayers((1,))
    alphas = measure_overlap(target, draft, many, 3, 60, Sampling(), 0)
    speeds = measure_speeds(target, draft, many, [3], 60, Sampling(), 100)
    assert speeds[3].tokens_per_pass == pytest.approx(float(expected_tokens(alphas, 3)), rel=0.15)
    assert 1.2 < speeds[3].tokens_per_pass < 3.8


def test_end_of_text_ends_the_walk(target: Any, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(target.generation_config, "eos_token_id", list(range(VOCAB)))
    original = measuring._round_acceptance

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(measuring, "_round_acceptance", counted)
    measure_overlap(target, target, prompts, 2, 50, Sampling(), 0)
    assert len(calls) == len(prompts)


def test_costs_are_medians_of_timed_parts(target: Any, prompts: list[torch.Tensor]) -> None:
    costs = measure_costs(target, SkipLayers((0, 1)), prompts[0], 3, Sampling(), 0)
    assert len(costs.target_seconds) == 4
    assert min(costs.target_seconds) > 0.0
    assert 0.0 < costs.draft_seconds < 10 * costs.target_seconds[0]
    lookup = measure_costs(target, PromptLookup(), prompts[0], 3, Sampling(), 0)
    assert lookup.draft_cost < costs.draft_cost


def test_costs_are_relative_to_a_plain_step() -> None:
    costs = Costs([0.05, 0.06, 0.08], 0.01)
    assert costs.draft_cost == pytest.approx(0.2)
    assert costs.target_cost == pytest.approx([1.0, 1.2, 1.6])


def test_measure_puts_the_model_beside_the_measurement(
    target: Any, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_overlap", lambda *_: [0.7] * 6)
    monkeypatch.setattr(measuring, "measure_costs", lambda *_: Costs([0.05] * 7, 0.005))
    speeds = {0: Speed(20.0, 1.0), 2: Speed(36.0, 2.2), 6: Speed(30.0, 3.0)}
    monkeypatch.setattr(measuring, "measure_speeds", lambda *_: speeds)
    found = measure(target, target, prompts, gammas=(2, 6))
    assert (found.best.gamma, round(found.best.speedup, 2)) == (4, 1.98)
    assert found.break_even == pytest.approx(0.1)
    assert [point.gamma for point in found.points] == [2, 6]
    assert found.points[0].predicted_speedup == pytest.approx(1.825)
    assert found.points[0].measured_speedup == pytest.approx(1.8)
    assert found.points[1].measured_tokens == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts: expected at least one"),
        ({"gammas": ()}, "gammas: expected numbers of at least 1"),
        ({"gammas": (0, 2)}, "gammas: expected numbers of at least 1"),
        ({"max_new_tokens": 1}, "max_new_tokens: expected at least 2"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
    ],
)
def test_arguments_are_checked(
    target: Any, prompts: list[torch.Tensor], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(target, target, **{"prompts": prompts, **arguments})


class Tokenizer:
    """Characters as tokens, with or without a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) % VOCAB for letter in text]])}

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, return_tensors: str, return_dict: bool
    ) -> dict[str, torch.Tensor]:
        return self(f"<{messages[0]['content']}>", return_tensors)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, target: Any) -> Any:
    monkeypatch.setenv("COLUMNS", "140")
    loaded = LoadedModel(target, Tokenizer("chat"), "tiny")
    monkeypatch.setattr("specker.models.load_embedded", lambda **_: loaded)
    monkeypatch.setattr("specker.models.load", lambda name, **_: LoadedModel(tiny_model(7), Tokenizer(), name))
    application = typer.Typer()
    application.callback()(lambda: None)
    register(application)
    quick = ("--gammas", "1,2", "--max-new-tokens", "8", "--dtype", "float32")
    return lambda *arguments: CliRunner().invoke(application, ["measure", *arguments, *quick])


def test_command_runs_on_the_embedded_pair(run: Any) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert "target tiny, draft the target without its layers 1" in result.output
    assert f"{len(PROMPTS)} prompts, 8 new tokens each" in result.output
    for words in ("overlap α", "tokens a pass", "break-even α", "predicted best", "measured best:  gamma", "c = "):
        assert words in result.output


def test_command_takes_models_and_prompts(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("abc\n\ndef\n")
    result = run("big", "small", str(file))
    assert result.exit_code == 0, result.output
    assert "target big, draft small" in result.output
    assert "2 prompts" in result.output
    result = run("embedded", "lookup", str(file))
    assert "draft prompt lookup" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("embedded", "layers", "no-such-file"), "No such file"),
        (("--gammas", "1,x"), "--gammas: expected numbers such as 1,2,4, got 1,x"),
        (("--dtype", "int8"), "--dtype: expected one of bfloat16, float16, float32, got int8"),
    ],
)
def test_command_says_what_is_wrong(run: Any, arguments: tuple[str, ...], message: str) -> None:
    application = typer.Typer()
    application.callback()(lambda: None)
    register(application)
    result = CliRunner().invoke(application, ["measure", *arguments])
    assert result.exit_code == 1
    assert message in result.output
