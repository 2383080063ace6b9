"""The examples run, and their loops have the law of the target."""

from __future__ import annotations

import importlib.util
import itertools
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from . import laws, tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parent.parent / "examples"
ERROR_RATE = 1e-6
PROMPT = [1, 2, 1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OWN_LOOP, GPT_FAST = load("own_loop"), load("gpt_fast_loop")


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("ended", [False, True])
def test_the_own_loop_is_greedy_where_the_temperature_is_zero(gamma: int, ended: bool) -> None:
    eos = tiny_models.greedy(tiny_models.tiny_llama(seed=1), torch.tensor([PROMPT]), 11)[-1] if ended else None
    target, draft = tiny_models.tiny_llama(seed=1, eos=eos), tiny_models.tiny_llama(seed=2, layers=1)
    tokens = OWN_LOOP.generate(target, draft, torch.tensor([PROMPT]), gamma=gamma, max_new_tokens=23, temperature=0.0)
    expected = tiny_models.greedy(target, torch.tensor([PROMPT]), 23, eos=eos)
    assert tokens[0].tolist() == PROMPT + expected
    assert (len(expected) < 23) == ended


def own_loop_p_value(runs: int) -> float:
    target, draft = (tiny_models.tiny_llama(seed=seed, vocab=5, eos=4, layers=2) for seed in (11, 12))
    law = tiny_models.continuation_law(target, PROMPT, length=3, eos=4)
    counts: Counter[str] = Counter()
    for seed in range(runs):
        tokens = OWN_LOOP.generate(
            target, draft, torch.tensor([PROMPT]), gamma=2, max_new_tokens=3, temperature=1.0, top_p=1.0, seed=seed
        )
        counts[",".join(map(str, tokens[0, len(PROMPT) :].tolist()))] += 1
    return laws.p_value(counts, law)


@pytest.mark.law
def test_the_own_loop_has_the_law_of_the_target() -> None:
    assert own_loop_p_value(1000) > ERROR_RATE


@pytest.mark.law
def test_the_law_test_sees_a_cache_that_keeps_what_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    class CroppedAtTheFront(OWN_LOOP.DynamicCache):  # type: ignore[name-defined, misc]
        def crop(self, surplus: int) -> None:
            for layer in self.layers:
                layer.keys, layer.values = layer.keys[..., -surplus:, :], layer.values[..., -surplus:, :]

    monkeypatch.setattr(OWN_LOOP, "DynamicCache", CroppedAtTheFront)
    assert own_loop_p_value(1000) < ERROR_RATE


def test_the_own_loop_runs_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        str(tiny_models.save_folder(tiny_models.tiny_llama(seed, vocab=tiny_models.BYTE_VOCAB), tmp_path / str(seed)))
        for seed in (1, 2)
    ]
    monkeypatch.setattr(sys, "argv", ["own_loop.py", *folders, "rain"])
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("rain")
    monkeypatch.setattr(sys, "argv", ["own_loop.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    assert "required: target, draft, prompt" in capsys.readouterr().err


def transformers_of(batch: int, vocab: int = 32) -> tuple[Any, Any]:
    models = []
    for seed, layers in ((1, 2), (2, 1)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = GPT_FAST.Transformer(vocab=vocab, width=16, layers=layers, heads=2, batch=batch, max_length=48)
        with torch.no_grad():
            model.head.weight.mul_(3)
        models.append(model)
    return models[0], models[1]


def plain_greedy(model: Any, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    token_ids = prompts
    for _ in range(new_tokens):
        positions = torch.arange(token_ids.shape[1]).expand(len(token_ids), -1)
        with torch.no_grad():
            token_ids = torch.cat([token_ids, model(token_ids, positions)[:, -1:].argmax(dim=-1)], dim=1)
    return token_ids


@pytest.mark.parametrize("gamma", [1, 4])
def test_the_plain_loop_is_greedy_where_the_temperature_is_zero(gamma: int) -> None:
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    options = {"new_tokens": 21, "gamma": gamma, "temperature": 0.0, "seed": torch.zeros(3, dtype=torch.int64)}
    tokens = GPT_FAST.generate(*transformers_of(3), prompts, **options)
    assert tokens.tolist() == plain_greedy(transformers_of(3)[0], prompts, 21).tolist()
    assert len({tuple(row) for row in tokens.tolist()}) == 3


def test_a_sequence_of_the_plain_loop_does_not_depend_on_its_neighbours() -> None:
    prompts, seeds = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), torch.tensor([5, 6, 7])
    together = GPT_FAST.generate(*transformers_of(3), prompts, new_tokens=21, seed=seeds)
    for row in range(3):
        alone = GPT_FAST.generate(*transformers_of(1), prompts[row : row + 1], new_tokens=21, seed=seeds[row : row + 1])
        assert alone[0].tolist() == together[row].tolist()


def plain_loop_p_value(runs: int, length: int = 3, vocab: int = 5) -> float:
    target, draft = transformers_of(runs, vocab)
    prompts = torch.tensor([PROMPT]).expand(runs, -1)
    tokens = GPT_FAST.generate(
        target, draft, prompts, new_tokens=length, gamma=2, temperature=1.0, top_k=0, seed=torch.arange(runs)
    )
    texts = torch.tensor([[*PROMPT, *text] for text in itertools.product(range(vocab), repeat=length)])
    enumerator, _ = transformers_of(len(texts), vocab)
    with torch.no_grad():
        logits = enumerator(texts, torch.arange(texts.shape[1]).expand(len(texts), -1))[:, len(PROMPT) - 1 : -1]
    probs = logits.double().softmax(dim=-1).gather(-1, texts[:, len(PROMPT) :, None]).prod(dim=1)[:, 0]
    law = {str(text[len(PROMPT) :]): prob for text, prob in zip(texts.tolist(), probs.tolist(), strict=True)}
    return laws.p_value(Counter(str(row[len(PROMPT) :]) for row in tokens.tolist()), law)


@pytest.mark.law
def test_the_plain_loop_has_the_law_of_the_target() -> None:
    assert plain_loop_p_value(4000) > ERROR_RATE


@pytest.mark.law
def test_the_law_test_sees_random_numbers_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = GPT_FAST.specker.verify
    fixed = staticmethod(lambda *arguments, **options: verify(*arguments, **{**options, "position": 0}))
    monkeypatch.setattr(GPT_FAST.specker, "verify", fixed)
    assert plain_loop_p_value(4000) < ERROR_RATE


def test_the_plain_loop_runs_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "gpt_fast_loop.py"), run_name="__main__")
    assert capsys.readouterr().out.startswith("tensor([[")
