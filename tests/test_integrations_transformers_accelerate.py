"""transformers' assisted generation with its acceptance step replaced: its law, its bounds, its coming and going."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specker import InvalidInputError
from specker.integrations.transformers import accelerate, speculative_sampling

from . import laws, tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

ERROR_RATE = 1e-6
VOCAB, EOS, LENGTH = 5, 4, 3
PROMPT = torch.tensor([[1, 2, 1]])
TARGET = tiny_models.tiny_llama(seed=11, vocab=VOCAB)
DRAFT = tiny_models.tiny_llama(seed=12, vocab=VOCAB, layers=1)
DRAFT.generation_config.num_assistant_tokens = 2
DRAFT.generation_config.assistant_confidence_threshold = 0.0
UTILS = importlib.import_module("transformers.generation.utils")
GENERATORS = importlib.import_module("transformers.generation.candidate_generator")
GAMMA = 2
TARGET_LOGITS = torch.tensor([[0.3, -0.5, -torch.inf, 0.8], [0.0, 1.0, 0.5, -1.0], [1.0, 0.0, -1.0, 0.2]])
DRAFT_LOGITS = torch.tensor([[-0.6, 0.4, 0.3, -torch.inf], [1.0, 0.2, -0.3, 0.1]])
JOINT_LAW = laws.joint_law(TARGET_LOGITS.double().softmax(-1).numpy(), DRAFT_LOGITS.double().softmax(-1).numpy(), GAMMA)


@pytest.fixture(autouse=True)
def _seeded_and_clean() -> Iterator[None]:
    before = UTILS._speculative_sampling
    torch.manual_seed(1)
    yield
    assert UTILS._speculative_sampling is before


def call_step(draft_token_ids: torch.Tensor, **options: Any) -> tuple[list[int], int]:
    """Call the acceptance step that transformers finds in its module, behind a prompt of three tokens."""
    candidate_input_ids = torch.cat([PROMPT, draft_token_ids[None]], dim=1)
    gamma = len(draft_token_ids)
    tokens, num_matches = UTILS._speculative_sampling(
        candidate_input_ids, DRAFT_LOGITS[None, :gamma], gamma, TARGET_LOGITS[None, : gamma + 1], **options
    )
    assert tokens.dtype == torch.int64
    assert len(tokens) == 1
    return tokens[0].tolist(), int(num_matches)


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


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    # transformers exchanges its own entry among the modules once it has loaded a model.
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", version)


@pytest.mark.parametrize("version", ["4.56.2", "5.25.0", "6.0.0.dev0"])
def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    set_version(monkeypatch, version)
    with (
        pytest.raises(ValueError, match=rf"transformers: expected version 4\.57 to 5\.24, got {version}"),
        accelerate(),
    ):
        pass


@pytest.mark.parametrize("step", [None, lambda candidate_input_ids, new_logits: None])
def test_unknown_acceptance_functions_are_refused(monkeypatch: pytest.MonkeyPatch, step: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(UTILS, "_speculative_sampling", step)
        got = "none" if step is None else r"\(candidate_input_ids, new_logits\)"
        with pytest.raises(ValueError, match=rf"_speculative_sampling: expected a function .* got {got}"), accelerate():
            pass
        assert UTILS._speculative_sampling is step


def test_the_original_is_back_after_an_exception_and_blocks_nest() -> None:
    original = UTILS._speculative_sampling
    with pytest.raises(RuntimeError, match="stop"), accelerate():
        raise RuntimeError("stop")
    assert UTILS._speculative_sampling is original
    with accelerate() as outer:
        with accelerate() as inner:
            call_step(torch.tensor([0, 1]))
        call_step(torch.tensor([0, 1]))
        assert UTILS._speculative_sampling is not original
    assert UTILS._speculative_sampling is original
    assert (outer.rounds, inner.rounds) == (2, 1)


@pytest.fixture
def original_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count the calls that reach transformers' own function, by the name of the thread."""
    calls: list[str] = []

    def step(
        candidate_input_ids: Any, candidate_logits: Any, candidate_length: Any, new_logits: Any, is_done_candidate: Any
    ) -> tuple[torch.Tensor, int]:
        calls.append(threading.current_thread().name)
        return torch.tensor([[9]]), 0

    with monkeypatch.context() as patch:
        patch.setattr(UTILS, "_speculative_sampling", step)
        yield calls


def test_a_thread_that_did_not_enter_keeps_transformers_own_function(original_calls: list[str]) -> None:
    with accelerate() as seen:
        outside = threading.Thread(target=call_step, args=[torch.tensor([0, 1])], kwargs={"is_done_candidate": None})
        outside.start()
        outside.join(timeout=60)
        call_step(torch.tensor([0, 1]))
    assert original_calls == [outside.name]
    assert seen.rounds == 1


def test_the_last_of_two_threads_to_leave_restores(original_calls: list[str]) -> None:
    original = UTILS._speculative_sampling
    entered, leave = threading.Event(), threading.Event()
    rounds: list[int] = []

    def long_block() -> None:
        with accelerate() as seen:
            entered.set()
            leave.wait(timeout=60)
            call_step(torch.tensor([0, 1]))
            rounds.append(seen.rounds)

    thread = threading.Thread(target=long_block)
    thread.start()
    assert entered.wait(timeout=60)
    with accelerate():
        pass
    assert UTILS._speculative_sampling is not original
    call_step(torch.tensor([0, 1]), is_done_candidate=None)
    leave.set()
    thread.join(timeout=60)
    assert UTILS._speculative_sampling is original
    assert (rounds, original_calls) == ([1], ["MainThread"])


def test_many_threads_may_enter_and_leave_at_once() -> None:
    original = UTILS._speculative_sampling
    totals: list[int] = []

    def work() -> None:
        for _ in range(20):
            with accelerate() as seen:
                call_step(torch.tensor([0, 1]))
            totals.append(seen.rounds)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert totals == [1] * 80
    assert UTILS._speculative_sampling is original


def test_what_somebody_else_put_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = UTILS._speculative_sampling
    with accelerate():
        ours = UTILS._speculative_sampling

        def theirs(*arguments: Any) -> Any:
            return ours(*arguments)

        UTILS._speculative_sampling = theirs
    assert UTILS._speculative_sampling is theirs
    UTILS._speculative_sampling = original


class ArgMaxGenerator:
    """Drafts the arg-max of its logits, and reports the logits: what one generator of transformers does."""

    def get_candidates(self, input_ids: torch.Tensor, drafts: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not drafts:
            return input_ids, None
        return torch.cat([input_ids, DRAFT_LOGITS.argmax(dim=-1)[None]], dim=1), DRAFT_LOGITS[None]


def argmax_p_value(runs: int) -> float:
    """Return the p-value of the first token of rounds that start with the generator's drafts."""
    counts: Counter[str] = Counter()
    for _ in range(runs):
        candidate_input_ids, logits = ArgMaxGenerator().get_candidates(PROMPT)
        tokens, _ = UTILS._speculative_sampling(candidate_input_ids, logits, GAMMA, TARGET_LOGITS[None])
        counts[str(tokens[0, 0].item())] += 1
    probs = TARGET_LOGITS[0].double().softmax(dim=-1).tolist()
    return laws.p_value(counts, {str(token): value for token, value in enumerate(probs) if value})


@pytest.mark.law
def test_arg_max_drafts_are_verified_as_point_masses(monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerate():
        # The class is not one that the block knows: its logits are taken at their word, and the law is lost.
        assert argmax_p_value(1000) < ERROR_RATE
    monkeypatch.setattr(GENERATORS, "SinglePositionMultiTokenCandidateGenerator", ArgMaxGenerator, raising=False)
    before = ArgMaxGenerator.get_candidates
    with accelerate():
        assert argmax_p_value(1000) > ERROR_RATE
        assert ArgMaxGenerator().get_candidates(PROMPT, drafts=False)[1] is None
    assert ArgMaxGenerator.get_candidates is before


def test_drafts_with_the_wrong_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = type("MTPCandidateGenerator", (ArgMaxGenerator,), {"get_candidates": ArgMaxGenerator.get_candidates})
    monkeypatch.setattr(GENERATORS, "MTPCandidateGenerator", generator, raising=False)
    set_version(monkeypatch, "5.14.1")
    with accelerate(), pytest.raises(ValueError, match=r"use_mtp: expected transformers 5\.16 or later"):
        generator().get_candidates(PROMPT)
    set_version(monkeypatch, "5.16.0")
    with accelerate():
        assert torch.equal(generator().get_candidates(PROMPT)[1], DRAFT_LOGITS[None])
