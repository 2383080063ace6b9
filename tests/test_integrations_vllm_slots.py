"""The rejection sampler of vLLM's second runner: slots of persistent requests, positions, per-slot seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import specker
from specker import Sampling, Status
from specker.integrations.vllm import rejection_sample_by_slot

from .copies import large_results

VOCAB, SLOTS, STEPS = 11, 9, 3
LENGTHS = {"equal": [3, 3, 3], "ragged": [2, 0, 3, 1], "short": [1, 1], "one": [3], "none": [0, 0, 0]}


def batch(lengths: list[int], has_draft: bool = True, vocab: int = VOCAB, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a batch whose requests stand in scattered slots."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs, rows = len(lengths), torch.tensor(lengths) + 1
    num_logits = int(rows.sum())
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    slots = torch.randperm(SLOTS, generator=generator)[:num_reqs]
    request = torch.repeat_interleave(torch.arange(num_reqs), rows)
    step = torch.arange(num_logits) - bounds[request]
    temperature = torch.rand(SLOTS, generator=generator) + 0.5
    temperature[slots[::3]] = 0.0
    draft_logits = torch.randn(SLOTS, STEPS, vocab, generator=generator) * 2
    target_logits = torch.randn(num_logits, vocab, generator=generator)
    drafted = step < rows[request] - 1
    owner = slots[request]
    tempered = draft_logits[owner, step.clamp(max=STEPS - 1)] / temperature[owner].clamp(min=0.1).unsqueeze(1)
    target_logits[drafted] += tempered[drafted]
    drafts = torch.multinomial(tempered.softmax(-1), 1, generator=generator).squeeze(1)
    drafts = torch.where(temperature[owner] > 0, drafts, target_logits.argmax(-1))
    return {
        "target_logits": target_logits,
        "draft_logits": draft_logits if has_draft else None,
        "draft_sampled": torch.where(step > 0, drafts.roll(1), 999).int(),
        "cu_num_logits": bounds.int(),
        "pos": 1000 * request + step,
        "idx_mapping": slots.int(),
        "expanded_idx_mapping": owner.int(),
        "expanded_local_pos": step.int(),
        "temperature": temperature,
        "seed": torch.randint(-(1 << 62), 1 << 62, (SLOTS,), generator=generator),
        "num_speculative_steps": STEPS,
    }


def one_by_one(inputs: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Return what `specker.verify` makes of each request alone."""
    sampled, num_sampled = [], []
    bounds = inputs["cu_num_logits"].tolist()
    for request, slot in enumerate(inputs["idx_mapping"].tolist()):
        rows = slice(bounds[request], bounds[request + 1])
        length = rows.stop - rows.start - 1
        temperature = float(inputs["temperature"][slot])
        draft = None if inputs["draft_logits"] is None else inputs["draft_logits"][slot : slot + 1, :length]
        result = specker.verify(
            inputs["draft_sampled"][rows][1:].unsqueeze(0),
            inputs["target_logits"][rows].unsqueeze(0),
            draft,
            temperature=float(temperature >= 1e-5),
            draft_sampling=None if draft is None else Sampling(temperature),
            seed=inputs["seed"][slot : slot + 1],
            position=inputs["pos"][rows][:1],
        )
        sampled.append(result.token_ids[0].tolist() + [-1] * (STEPS - length))
        num_sampled.append(int(result.num_emitted))
    return sampled, num_sampled


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
@pytest.mark.parametrize("layout", LENGTHS)
def test_each_request_is_one_round_of_verify(on_backend: str, layout: str, has_draft: bool) -> None:
    inputs = batch(LENGTHS[layout], has_draft)
    sampled, num_sampled = rejection_sample_by_slot(**inputs)
    assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)
    assert (sampled.tolist(), num_sampled.tolist()) == one_by_one(inputs)


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
@pytest.mark.parametrize("layout", ["equal", "ragged"])
def test_many_batches_agree_with_one_round_each(layout: str, has_draft: bool) -> None:
    """Every number of tokens occurs for every length: what lies behind them is -1, never what was in memory."""
    seen = set()
    for trial in range(60):
        lengths = [(trial + request * request) % (STEPS + 1) for request in range(trial % 5 + 1)]
        lengths = [STEPS] * len(lengths) if layout == "equal" else lengths
        inputs = batch(lengths, has_draft, seed=trial)
        sampled, num_sampled = rejection_sample_by_slot(**inputs)
        assert (sampled.tolist(), num_sampled.tolist()) == one_by_one(inputs)
        seen |= set(zip(lengths, num_sampled.tolist(), strict=True))
    expected = range(STEPS + 1) if layout == "ragged" else [STEPS]
    assert seen >= {(length, count) for length in expected for count in range(1, length + 2)}


@pytest.mark.parametrize("layout", ["equal", "ragged"])
def test_a_request_does_not_depend_on_its_slot(layout: str) -> None:
    inputs = batch(LENGTHS[layout], seed=5)
    wanted = rejection_sample_by_slot(**inputs)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    moved = dict(inputs)
    for name in ("draft_logits", "temperature", "seed"):
        moved[name] = torch.empty_like(inputs[name])
        moved[name][order] = inputs[name]
    for name in ("idx_mapping", "expanded_idx_mapping"):
        moved[name] = order[inputs[name].long()]
    got = rejection_sample_by_slot(**moved)
    assert [part.tolist() for part in got] == [part.tolist() for part in wanted]


@pytest.mark.parametrize("layout", ["equal", "ragged"])
def test_other_slots_and_padded_columns_are_not_read(layout: str) -> None:
    """The target's vocabulary is padded; slots without a request hold NaN; drafts lie in a wider buffer."""
    for trial in range(10):
        inputs = batch(LENGTHS[layout], seed=trial)
        wanted = rejection_sample_by_slot(**inputs)
        buffer = torch.full((SLOTS, STEPS + 2, VOCAB + 4), math.nan)
        slots = inputs["idx_mapping"].long()
        buffer[slots, :STEPS, :VOCAB] = inputs["draft_logits"][slots]
        target = torch.full((len(inputs["pos"]), VOCAB + 3), math.nan)
        target[:, :VOCAB] = inputs["target_logits"]
        changed = {"draft_logits": buffer[:, :STEPS, :VOCAB], "target_logits": target}
        got = rejection_sample_by_slot(**{**inputs, **changed})
        assert [part.tolist() for part in got] == [part.tolist() for part in wanted]


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
@pytest.mark.parametrize("layout", ["equal", "ragged"])
def test_no_row_is_copied(layout: str, has_draft: bool) -> None:
    inputs = batch(LENGTHS[layout], has_draft, vocab=5000)
    assert large_results(lambda: rejection_sample_by_slot(**inputs), 5000) == []


def test_one_slot_and_one_step_will_do() -> None:
    for slots, steps in ((1, 3), (9, 1)):
        inputs = batch([0, 1])
        inputs["num_speculative_steps"] = steps
        inputs["draft_logits"] = inputs["draft_logits"][:slots, :steps]
        for name in ("idx_mapping", "expanded_idx_mapping"):
            inputs[name] = inputs[name] % slots
        sampled, num_sampled = rejection_sample_by_slot(**inputs)
        wanted = one_by_one(inputs)
        assert [row[: steps + 1] for row in wanted[0]] == sampled.tolist()
        assert num_sampled.tolist() == wanted[1]


@pytest.mark.parametrize(("layout", "has_draft"), [("equal", True), ("ragged", True), ("ragged", False)])
def test_placeholders_and_invalid_rows_concern_their_request_only(layout: str, has_draft: bool) -> None:
    inputs = batch(LENGTHS[layout], has_draft, seed=4)
    inputs["temperature"][:] = 1.0
    healthy, _ = rejection_sample_by_slot(**inputs)
    last = len(LENGTHS[layout]) - 1
    start = int(inputs["cu_num_logits"][last])
    inputs["draft_sampled"][1] = -1
    inputs["target_logits"][start] = math.nan
    status = torch.zeros(last + 1, dtype=torch.int32)
    sampled, num_sampled = rejection_sample_by_slot(**inputs, output_status=status)
    assert num_sampled[[0, last]].tolist() == [1, 0]
    assert int(sampled[0, 0]) >= 0
    assert sampled[last].tolist() == [-1] * (STEPS + 1)
    assert status[0] == Status.DRAFT_TOKEN_PLACEHOLDER
    assert status[last] == Status.TARGET_INVALID
    assert sampled[1:last].tolist() == healthy[1:last].tolist()


def test_drafts_without_logits_are_point_masses() -> None:
    """Each request drafts token 0, which the target likes with probability 0.7."""
    count = 4000
    logits = torch.tensor([0.7, 0.3]).log().expand(2 * count + 1, 2)
    requests = torch.arange(count + 1)
    sampled, num_sampled = rejection_sample_by_slot(
        logits,
        None,
        torch.zeros(2 * count + 1, dtype=torch.int32),
        torch.cat([torch.arange(0, 2 * count + 1, 2), torch.tensor([2 * count + 1])]),
        torch.zeros(2 * count + 1, dtype=torch.int64),
        requests,
        torch.zeros(2 * count + 1, dtype=torch.int64),
        torch.zeros(2 * count + 1, dtype=torch.int64),
        temperature=torch.ones(count + 1),
        seed=requests,
        num_speculative_steps=1,
    )
    rejected = num_sampled[:-1] == 1
    assert sampled[:-1][rejected].unique(dim=0).tolist() == [[1, -1]]
    assert abs(float(rejected.float().mean()) - 0.3) < 5 * math.sqrt(0.21 / count)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_block_verification": True}, NotImplementedError, "use_block_verification: expected it unset"),
        ({"synthetic_conditional_rates": torch.ones(3)}, NotImplementedError, "synthetic_conditional_rates: "),
        ({"fly_window_size": 3}, NotImplementedError, "fly_window_size: "),
        ({"contexts": torch.zeros(10, 1).int()}, NotImplementedError, "contexts: "),
        ({"watermark_key": 0}, NotImplementedError, "watermark_key: "),
        ({"draft_logits": torch.zeros(SLOTS, STEPS, VOCAB + 1)}, ValueError, "draft_logits: expected at most the"),
        ({"draft_logits": torch.zeros(SLOTS, STEPS + 1, VOCAB)}, ValueError, r"draft_logits: expected shape \(\*, 3, "),
        ({"num_speculative_steps": 2, "draft_logits": torch.zeros(SLOTS, 2, VOCAB)}, ValueError,
         r"cu_num_logits: expected 1\.\.3 rows a request, .* got \[0, 3, 4, 8, 10\]"),
        ({"num_speculative_steps": 2, "draft_logits": None}, ValueError, r"cu_num_logits: expected 1\.\.3 rows"),
        ({"cu_num_logits": torch.tensor([1, 3, 4, 8, 10])}, ValueError, "cu_num_logits: .* from 0 to at most 10, got"),
        ({"cu_num_logits": torch.tensor([0, 3, 4, 8, 12])}, ValueError, "from 0 to at most 10, got"),
        ({"temperature": torch.full((SLOTS,), -1.0)}, ValueError, "sequence 0: temperature: expected a finite value"),
        ({"cu_num_logits": torch.zeros(4).int()}, ValueError, r"cu_num_logits: expected shape \(5,\)"),
        ({"draft_sampled": torch.zeros(9).int()}, ValueError, r"draft_sampled: expected shape \(10,\)"),
        ({"pos": torch.zeros(10)}, TypeError, "pos: expected dtype int64 or int32"),
        ({"idx_mapping": torch.full((4,), SLOTS), "draft_logits": None}, ValueError, r"expected slots in 0\.\.8, got"),
        ({"idx_mapping": torch.tensor([0, 1, -1, 2])}, ValueError, r"expected slots in 0\.\.8, got \[0, 1, -1, 2\]"),
        ({"idx_mapping": torch.zeros(4)}, TypeError, "idx_mapping: expected dtype"),
        ({"expanded_idx_mapping": torch.zeros(9).int()}, ValueError, r"expanded_idx_mapping: expected shape \(10,\)"),
        ({"expanded_local_pos": torch.zeros(9).int()}, ValueError, r"expanded_local_pos: expected shape \(10,\)"),
        ({"temperature": torch.ones(SLOTS).half()}, TypeError, "temperature: expected dtype float32 or float64"),
        ({"seed": torch.ones(SLOTS)}, TypeError, "seed: expected dtype int64"),
        ({"target_logits": torch.ones(10, VOCAB).double()}, TypeError, "target_logits: expected dtype"),
        ({"output_status": torch.zeros(4)}, TypeError, "output_status: expected dtype int32"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rejection_sample_by_slot(**{**batch(LENGTHS["ragged"]), **change})
