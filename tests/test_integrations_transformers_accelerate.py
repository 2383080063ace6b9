"""transformers' assisted generation with its acceptance step replaced: its law, and what it is called with."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specker import InvalidInputError
from specker.integrations.transformers import accelerate, speculative_sampling

from . import acceptance_step, laws, tiny_models
from .acceptance_step import DRAFT_LOGITS, GAMMA, PROMPT, TARGET_LOGITS, UTILS, call_step

pytestmark = pytest.mark.usefixtures("one_thread")
seeded_and_clean = acceptance_step.seeded_and_clean

ERROR_RATE = 1e-6
VOCAB, EOS, LENGTH = 5, 4, 3
TARGET = tiny_models.tiny_llama(seed=11, vocab=VOCAB)
DRAFT = tiny_models.tiny_llama(seed=12, vocab=VOCAB, layers=1)
DRAFT.generation_config.num_assistant_tokens = 2
DRAFT.generation_config.assistant_confidence_threshold = 0.0
JOINT_LAW = laws.joint_law(TARGET_LOGITS.double().softmax(-1).numpy(), DRAFT_LOGITS.double().softmax(-1).numpy(), GAMMA)


def step_p_value(runs: int) -> float:
    draws = torch.multinomial(DRAFT_LOGITS.softmax(dim=-1), runs, replacement=True).T
    counts: Counter[str] = Counter()
    with accelerate() as seen:
        for draft_token_ids in draws:
            tokens, num_matches = call_step(draft_token_ids)
            assert len(tokens) == num_matches + 1
            counts[f"{num_matches}|{','.join(map(str, tokens))}"] += 1
    assert (seen.rounds, seen.drafted) == (runs, runs * GAMMA)
    assert seen.accepted == sum(int(key[0]) * count for key, count in counts.items())
    return laws.p_value(counts, JOINT_LAW)


@pytest.mark.law
def test_the_step_has_the_law_of_speculative_sampling() -> None:
    assert step_p_value(5000) > ERROR_RATE


@pytest.mark.law
def test_the_law_test_sees_a_step_that_mistakes_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("specker.integrations.transformers.acceptance")
    verify = module.verify
    monkeypatch.setattr(module, "verify", lambda tokens, target, draft: verify(tokens, target, 0.5 * draft))
    assert step_p_value(5000) < ERROR_RATE


def assisted(max_new_tokens: int = LENGTH, **options: Any) -> Any:
    return TARGET.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **{"assistant_model": DRAFT, "do_sample": True, **options},
    )


@pytest.mark.law
def test_assisted_generation_has_the_law_of_the_target() -> None:
    law = tiny_models.continuation_law(TARGET, PROMPT[0].tolist(), LENGTH, EOS)
    counts: Counter[str] = Counter()
    with accelerate() as seen:
        for _ in range(300):
            counts[",".join(map(str, assisted(eos_token_id=EOS)[0, PROMPT.shape[1] :].tolist()))] += 1
    assert seen.rounds > 300
    assert 0 < seen.accepted < seen.drafted
    assert laws.p_value(counts, law) > ERROR_RATE


def test_a_run_repeats_under_the_seed_of_torch_and_scores_have_a_row_for_each_token() -> None:
    runs = []
    with accelerate():
        for _ in range(2):
            torch.manual_seed(5)
            runs.append(assisted(20, return_dict_in_generate=True, output_scores=True))
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert len(runs[0].scores) == runs[0].sequences.shape[1] - PROMPT.shape[1] == 20


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"assistant_model": None, "prompt_lookup_num_tokens": 2, "eos_token_id": EOS}]
)
def test_paths_without_the_step_stay_those_of_transformers(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = assisted(12, **options)
    torch.manual_seed(3)
    with accelerate() as seen:
        assert assisted(12, **options).tolist() == expected.tolist()
    assert seen.rounds == 0


def test_a_finished_candidate_gets_no_bonus_token_where_the_caller_asks_for_that() -> None:
    drafts = torch.tensor([0, 1])
    matching = TARGET_LOGITS[None].clone()
    matching[0, torch.arange(2), drafts] = 50.0
    arguments = (torch.cat([PROMPT, drafts[None]], dim=1), DRAFT_LOGITS[None], GAMMA, matching)
    with accelerate():
        for done in (True, torch.tensor([True])):
            tokens, num_matches = UTILS._speculative_sampling(*arguments, done)
            assert (tokens.tolist(), num_matches) == ([[0, 1]], 1)
        for going_on in (False, torch.tensor([False]), None):
            tokens, num_matches = UTILS._speculative_sampling(*arguments, going_on)
            assert (tokens[0, :2].tolist(), tokens.shape[1], num_matches) == ([0, 1], 3, 2)
        matching[0, 1, 1] = -torch.inf
        tokens, num_matches = UTILS._speculative_sampling(*arguments, True)
        assert (tokens[0, 0].item(), tokens.shape[1], num_matches) == (0, 2, 1)


def test_the_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(TorchDispatchMode):
        """Counts what waits for a device: values read one at a time, and shapes that depend on values."""

        count = 0

        def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            self.count += operator.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
            return operator(*arguments, **(options or {}))

    lists = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.numel()) or tolist(tensor))
    candidate_input_ids = torch.tensor([[1, 2, 0, 1]])
    arguments = (candidate_input_ids, DRAFT_LOGITS[None], GAMMA, TARGET_LOGITS[None])
    done = torch.tensor([False])
    original = UTILS._speculative_sampling
    in_its_signature = "is_done_candidate" in inspect.signature(original).parameters
    with Reads() as theirs:
        original(*arguments, **({"is_done_candidate": done} if in_its_signature else {}))
    with Reads() as ours:
        speculative_sampling(*arguments, done)
    assert theirs.count >= 4
    assert (ours.count, lists) == (0, [3])


def test_a_round_without_drafts_draws_from_the_target() -> None:
    with accelerate():
        tokens, num_matches = call_step(torch.tensor([], dtype=torch.int64))
    assert num_matches == 0
    assert tokens[0] in (0, 1, 3)


def test_ensemble_weights_are_refused() -> None:
    with accelerate(), pytest.raises(ValueError, match=r"assistant_ensemble_weight: expected None .* got 0\.5"):
        call_step(torch.tensor([0, 1]), assistant_ensemble_weight=0.5)


def test_logits_that_are_not_numbers_are_told() -> None:
    logits = torch.full((1, 2, 4), torch.nan)
    with accelerate(), pytest.raises(InvalidInputError, match="a target row holds NaN"):
        UTILS._speculative_sampling(torch.tensor([[1, 2]]), torch.zeros(1, 1, 4), 1, logits)
