"""Batches: every sequence decodes as if it were alone, whatever its neighbours accept and whenever they end.

A pass over several rows may round a model's float32 logits otherwise than a pass over one: for the models here by
2e-6 in the mean and 1.3e-5 at most. The verifier reads the same law to within that, so a token could differ where a
uniform lies so near a boundary: in about one of 1,000 runs of a test on another machine, for other seeds than these.
With float64 models the logits are equal bit for bit once they are rounded to float32 (counted on 641 rows), so there
the tests hold by construction.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from specker import Sampling, cached_model
from specker.cached_model import CachedModel
from specker.generation import Continuations, EarlyExit, ModelDraft, PromptLookup, SkipLayers, generate
from specker.slot_cache import SlotLayer

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 3, 6, 9, 2, 12, 5, 7)
NEW_TOKENS = 26
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(32, (length,), generator=GENERATOR).tolist() for length in LENGTHS]
GAMMAS = [4, 0, 3, 5, 1, 4, 2, 7]
EOS = 3
PARAMETERS = {
    "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 1.0, 1.0, 0.5]),
    "top_k": torch.tensor([0, 0, 5, 0, 0, 10, 0, 0]),
    "top_p": torch.tensor([1.0, 0.9, 1.0, 0.8, 1.0, 1.0, 0.95, 1.0]),
    "min_p": torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.1, 0.0]),
    "seed": torch.tensor([5, -1, 5, 9, 2, 2**62, 0, 77]),
}
TARGETS = {dtype: tiny_models.tiny_llama(seed=1).to(dtype) for dtype in (torch.float32, torch.float64)}


def drafts(target: Any) -> dict[str, Any]:
    model = tiny_models.tiny_llama(seed=2, layers=1).to(target.dtype)
    return {
        "model": model,
        "close model": tiny_models.noisy(target, 0.1),
        "greedy model": ModelDraft(tiny_models.noisy(target, 0.1), greedy=True),
        "layers": SkipLayers((1,)),
        "exit": EarlyExit(1),
        "lookup": PromptLookup(),
        "continuations": Continuations([tiny_models.greedy(target, torch.tensor([PROMPTS[0]]), 9), [1, 2]]),
    }


def alone(target: Any, draft: Any, row: int, **options: Any) -> torch.Tensor:
    own = {name: value[row : row + 1] if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    own["gamma"] = options["gamma"][row] if isinstance(options["gamma"], list) else options["gamma"]
    return generate(target, draft, torch.tensor([PROMPTS[row]]), **own).token_ids[0]


def check_equal_to_single_runs(target: Any, draft: Any, **options: Any) -> Any:
    result = generate(target, draft, **tiny_models.left_padded(PROMPTS), **options)
    for row, token_ids in enumerate(result.token_ids):
        assert torch.equal(alone(target, draft, row, **options), token_ids), row
    return result


@pytest.mark.parametrize("dtype", TARGETS, ids=str)
@pytest.mark.parametrize("draft", drafts(TARGETS[torch.float32]))
def test_a_batch_of_eight_equals_eight_single_runs(draft: str, dtype: torch.dtype) -> None:
    target = TARGETS[dtype]
    result = check_equal_to_single_runs(
        target, drafts(target)[draft], gamma=GAMMAS, max_new_tokens=NEW_TOKENS, eos_token_id=EOS, **PARAMETERS
    )
    # Sequences that end at different rounds, by a token and by length, or the test would say little.
    assert len({stats.rounds for stats in result.stats.sequences}) >= 4
    ends = [int(token_ids[-1]) == EOS for token_ids in result.token_ids]
    assert 0 < sum(ends) < len(ends)


@pytest.mark.parametrize("draft", drafts(TARGETS[torch.float32]))
def test_a_greedy_batch_equals_transformers_prompt_by_prompt(draft: str) -> None:
    target = TARGETS[torch.float32]
    result = generate(
        target,
        drafts(target)[draft],
        **tiny_models.left_padded(PROMPTS),
        gamma=GAMMAS,
        max_new_tokens=NEW_TOKENS,
        temperature=0.0,
        eos_token_id=EOS,
    )
    plain = [tiny_models.greedy(target, torch.tensor([prompt]), NEW_TOKENS, eos=EOS) for prompt in PROMPTS]
    assert [token_ids.tolist() for token_ids in result.token_ids] == plain


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "qwen2", "qwen3", "gpt2", "opt"])
def test_windows_positions_and_masks_are_right_in_other_families(family: str) -> None:
    target = tiny_models.tiny_family(family)
    plain = [tiny_models.greedy(target, torch.tensor([prompt]), 25) for prompt in PROMPTS[:4]]
    options: dict[str, Any] = {"temperature": 0.0, "gamma": [3, 1, 5, 0], "max_new_tokens": 25}
    for draft in (PromptLookup(), tiny_models.noisy(target, 0.05)):
        result = generate(target, draft, **tiny_models.left_padded(PROMPTS[:4]), **options)
        assert [token_ids.tolist() for token_ids in result.token_ids] == plain
    assert 0 < result.stats.accepted < result.stats.drafted


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_model, "_CHUNK", 4)
    widths: list[int] = []
    right = CachedModel._ragged

    def recording(self: CachedModel, pending: Any, block: Any, width: int, device: torch.device) -> dict[str, Any]:
        widths.append(width)
        return right(self, pending, block, width, device)

    monkeypatch.setattr(CachedModel, "_ragged", recording)
    for target in (TARGETS[torch.float32], tiny_models.tiny_gpt2()):
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 10, "gamma": 3}
        result = generate(target, PromptLookup(), **tiny_models.left_padded(PROMPTS), **options)
        plain = [tiny_models.greedy(target, torch.tensor([prompt]), 10) for prompt in PROMPTS]
        assert [token_ids.tolist() for token_ids in result.token_ids] == plain
    assert max(widths) <= 4 + 3


def test_a_static_cache_in_the_generation_config_changes_nothing() -> None:
    target = tiny_models.tiny_llama(seed=1)
    target.generation_config.cache_implementation = "static"
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    result = generate(target, PromptLookup(), **tiny_models.left_padded(PROMPTS), **options)
    expected = generate(TARGETS[torch.float32], PromptLookup(), **tiny_models.left_padded(PROMPTS), **options)
    assert all(map(torch.equal, result.token_ids, expected.token_ids))


def test_equal_sequences_with_equal_seeds_give_equal_text_wherever_they_stand() -> None:
    batch = tiny_models.left_padded([PROMPTS[2], PROMPTS[5], PROMPTS[2], PROMPTS[5]])
    options: dict[str, Any] = {"max_new_tokens": 30, "seed": torch.tensor([4, 8, 4, 9])}
    first, other, second, another = generate(
        TARGETS[torch.float32], drafts(TARGETS[torch.float32])["model"], **batch, **options
    ).token_ids
    assert torch.equal(first, second)
    assert not torch.equal(other, another)


def test_the_counters_of_a_batch_are_the_sums_of_single_runs() -> None:
    target = TARGETS[torch.float64]
    draft = tiny_models.noisy(target, 0.1)
    options: dict[str, Any] = {"gamma": 3, "max_new_tokens": 20, "seed": torch.arange(8), "temperature": 0.8}
    stats = generate(target, draft, **tiny_models.left_padded(PROMPTS), **options).stats
    for row, counted in enumerate(stats.sequences):
        single = generate(target, draft, torch.tensor([PROMPTS[row]]), **{**options, "seed": torch.tensor([row])}).stats
        assert (counted.rounds, counted.drafted, counted.accepted, counted.emitted) == (
            single.rounds, single.drafted, single.accepted, single.emitted,
        )  # fmt: skip
        assert counted.expected_accepted == pytest.approx(single.expected_accepted, abs=1e-5)
    assert stats.target_passes == max(counted.rounds for counted in stats.sequences)
    assert stats.emitted == 8 * 20


@pytest.mark.parametrize("fault", ["mask", "positions", "slots", "selection"])
def test_a_cache_that_mixes_up_sequences_would_be_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CachedModel._ragged

    def wrong(self: CachedModel, *arguments: Any) -> dict[str, Any]:
        given = right(self, *arguments)
        if fault == "mask":
            given["attention_mask"] = torch.zeros_like(given["attention_mask"])
        if fault == "positions":
            given["position_ids"] = given["position_ids"] + 1
            given["position_ids"][0] -= 1
        if fault == "slots" and self._plan.slots is not None:
            self._plan.slots = self._plan.slots.roll(1, dims=0)
        return given

    monkeypatch.setattr(CachedModel, "_ragged", wrong)
    if fault == "selection":
        monkeypatch.setattr(SlotLayer, "select", lambda self, rows: None)
    target = TARGETS[torch.float32]
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_equal_to_single_runs(
            target, drafts(target)["close model"], gamma=GAMMAS, max_new_tokens=30, eos_token_id=EOS, **PARAMETERS
        )


def test_a_draft_may_draw_with_its_own_parameters() -> None:
    target = TARGETS[torch.float64]
    own = Sampling(temperature=torch.tensor([0.5, 1.5, 0.0, 1.0, 1.0, 0.9, 2.0, 1.0]), top_k=20)
    draft = tiny_models.noisy(target, 0.1)
    options: dict[str, Any] = {"gamma": 4, "max_new_tokens": 25, **PARAMETERS}
    result = generate(target, draft, **tiny_models.left_padded(PROMPTS), draft_sampling=own, **options)
    for row, token_ids in enumerate(result.token_ids):
        single = own._replace(temperature=own.temperature[row : row + 1])  # type: ignore[index]
        assert torch.equal(alone(target, draft, row, draft_sampling=single, **options), token_ids)


def test_allowed_tokens_bind_each_sequence_by_itself() -> None:
    target = TARGETS[torch.float32]
    allowed = torch.tensor([[0x0F0F0F0F], [0x55555555]], dtype=torch.int32)
    batch = tiny_models.left_padded(PROMPTS[:2])
    for draft in drafts(target).values():
        result = generate(target, draft, **batch, allowed_tokens=allowed, max_new_tokens=30, seed=1)
        for row, mask in enumerate([0x0F0F0F0F, 0x55555555]):
            assert all(mask >> token & 1 for token in result.token_ids[row].tolist())
        assert len(set(itertools.chain(*(token_ids.tolist() for token_ids in result.token_ids)))) > 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"_attn_implementation": "flash_attention_2"},
            "attention implementation sdpa or eager for a batch, got flash",
        ),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "full or sliding-window attention for a batch"),
    ],
    ids=str,
)
def test_attention_that_cannot_read_ragged_sequences_is_refused(change: dict[str, Any], words: str) -> None:
    target = tiny_models.tiny_llama(seed=1)
    for name, value in change.items():
        object.__setattr__(target.config, name, value)
    with pytest.raises(ValueError, match=f"target: expected {words}"):
        generate(target, PromptLookup(), **tiny_models.left_padded(PROMPTS[:2]))


def test_a_model_without_position_ids_is_refused_for_a_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_models.tiny_llama(seed=1)
    forward = target.forward

    def without_positions(input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        return forward(input_ids=input_ids, attention_mask=attention_mask, **options)

    monkeypatch.setattr(target, "forward", without_positions)
    with pytest.raises(ValueError, match="target: expected a model that takes position_ids for a batch, got Llama"):
        generate(target, PromptLookup(), **tiny_models.left_padded(PROMPTS[:2]))


def test_the_eager_attention_reads_ragged_sequences_too() -> None:
    target = tiny_models.tiny_llama(seed=1, attn_implementation="eager")
    assert target.config._attn_implementation == "eager"
    result = generate(target, PromptLookup(), **tiny_models.left_padded(PROMPTS), temperature=0.0, max_new_tokens=15)
    plain = [tiny_models.greedy(target, torch.tensor([prompt]), 15) for prompt in PROMPTS]
    assert [token_ids.tolist() for token_ids in result.token_ids] == plain


def test_no_tensor_of_inference_mode_outlives_a_run() -> None:
    from specker import checks

    generate(TARGETS[torch.float32], drafts(TARGETS[torch.float32])["greedy model"], torch.tensor([PROMPTS[3]]))
    checks.check_parameters(Sampling(), 1, 32, torch.device("cpu"))
    assert not checks.scalar_tensor(0.0, torch.float64, torch.device("cpu")).is_inference()


def test_kinds_of_layers_are_read_from_the_configuration() -> None:
    families = {
        "mistral": {"sliding_attention"},
        "gemma3": {"sliding_attention", "full_attention"},
        "gpt2": {"full_attention"},
    }
    for family, kinds in families.items():
        assert cached_model._attention_kinds(tiny_models.tiny_family(family).config) == kinds
