"""The adapters against vLLM's own Triton kernels, in the interpreter, on random ragged batches.

Equal uniforms decide: which drafts are kept must be the same. Where a token is drawn anew vLLM races exponential or
Gumbel noise, so only its place is compared.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import sources
import stand_ins
import torch

from specker import random
from specker.integrations.vllm import rejection_sample, rejection_sample_by_slot

BATCH = "vllm.v1.sample.rejection_sampler"
SLOTS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
WIDTH = 4
FULL_SEED = (-(1 << 63), (1 << 63) - 1)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    stand_ins.install("vllm", sources.SOURCES["vllm"].folder)


def same_places(ours: torch.Tensor, theirs: torch.Tensor, counts: torch.Tensor, whole: torch.Tensor) -> int:
    """Compare the tokens of a batch, all of them where `whole`, else all but the last; return how many were."""
    compared = 0
    for left, right, count, greedy in zip(ours.tolist(), theirs.tolist(), counts.tolist(), whole.tolist(), strict=True):
        last = count if greedy else count - 1
        assert left[:last] == right[:last]
        compared += count
    return compared


def drafted(lengths: list[int], vocab: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return draft logits and target logits that often agree, one row a draft token, and drafts."""
    total = sum(lengths)
    draft_logits = torch.randn(total, vocab, generator=generator) * 2
    target_logits = draft_logits + torch.randn(total, vocab, generator=generator)
    drafts = torch.multinomial(draft_logits.softmax(-1), 1, generator=generator).squeeze(1) if total else torch.zeros(0)
    return draft_logits, target_logits, drafts.int()


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
def test_first_runner(has_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions of `rejection_sample` on (total, vocab) rows."""
    module = importlib.import_module(BATCH)
    compared, rejected = 0, 0
    for trial in range(40):
        generator = torch.Generator().manual_seed(trial)
        lengths = torch.randint(WIDTH + 1, (6,), generator=generator).tolist()
        vocab = [7, 50, 1000][trial % 3]
        draft_logits, target_logits, drafts = drafted(lengths, vocab, generator)
        drafts[torch.rand(len(drafts), generator=generator) < 0.05] = -1
        temperature = torch.randint(2, (6,), generator=generator).float()
        seeds = {request: torch.Generator().manual_seed(1000 * trial + request) for request in range(6)}
        metadata = SimpleNamespace(
            temperature=temperature, all_greedy=False, all_random=False, generators=dict(seeds), top_k=None, top_p=None
        )
        arguments: list[Any] = [
            drafts, lengths, WIDTH, torch.tensor(lengths).cumsum(0).int(),
            draft_logits.softmax(-1) if has_draft else None, target_logits, 2000 + torch.arange(6).unsqueeze(1),
            metadata,
        ]  # fmt: skip
        accepts = [
            random.uniforms(torch.randint(*FULL_SEED, (1,), generator=generator), torch.arange(length), 1)[0]
            for length, generator in zip(lengths, [seed.clone_state() for seed in seeds.values()], strict=True)
            if length
        ]
        ours = rejection_sample(*arguments)
        uniforms = torch.cat(accepts) if accepts else torch.zeros(0, dtype=torch.float64)
        monkeypatch.setattr(module, "generate_uniform_probs", lambda *_arguments, drawn=uniforms: drawn)
        theirs = module.rejection_sample(*arguments)
        counts = ours.ge(0).sum(1)
        assert counts.tolist() == theirs.ge(0).sum(1).tolist()
        compared += same_places(ours, theirs, counts, temperature == 0)
        bonus = counts == torch.tensor(lengths) + 1
        assert ours[bonus].tolist() == [
            row[: length + 1] + [-1] * (WIDTH - length)
            for row, length, kept in zip(theirs.tolist(), lengths, bonus.tolist(), strict=True) if kept
        ]  # fmt: skip
        rejected += int((~bonus).sum())
    assert rejected > 50
    assert compared > 250


@pytest.mark.parametrize("has_draft", [True, False], ids=["draft", "ngram"])
def test_second_runner(has_draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions of `rejection_sample` on slots; its uniforms are replaced by specker's, inside its kernel."""
    module = importlib.import_module(SLOTS)
    language = importlib.import_module("triton.language")

    def uniform(seed: Any, position: Any, includes_zero: bool) -> Any:
        drawn = random.uniforms(int(seed.handle.data.item()), int(position.handle.data.item()), 1)[0]
        return language.full((), float(drawn), language.float64)

    monkeypatch.setattr(module, "tl_rand32", uniform)
    compared, rejected = 0, 0
    for trial in range(24):
        generator = torch.Generator().manual_seed(trial)
        lengths = torch.randint(WIDTH + 1, (5,), generator=generator).tolist() if trial % 3 else [WIDTH] * 5
        vocab, slots = [7, 50, 1000][trial % 3], torch.randperm(8, generator=generator)[:5]
        draft_rows, target_rows, drafts = drafted(lengths, vocab, generator)
        temperature = torch.tensor([0.0, 1.0, 0.7])[torch.randint(3, (8,), generator=generator)]
        draft_logits = torch.full((8, WIDTH, vocab), float("nan"))
        targets, sampled, start = [], [], 0
        for slot, length in zip(slots.tolist(), lengths, strict=True):
            rows = slice(start, start + length)
            draft_logits[slot, :length] = draft_rows[rows]
            scale = float(temperature[slot]) or 1.0
            targets += [target_rows[rows] / scale, torch.randn(1, vocab, generator=generator)]
            sampled += [torch.tensor([5], dtype=torch.int32), drafts[rows]]
            start += length
        counts = torch.tensor(lengths) + 1
        request = torch.repeat_interleave(torch.arange(5), counts)
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        step = torch.arange(len(request)) - bounds[request]
        arguments: dict[str, Any] = {
            "target_logits": torch.cat(targets),
            "draft_logits": draft_logits if has_draft else None,
            "draft_sampled": torch.cat(sampled),
            "cu_num_logits": bounds.int(),
            "pos": 100 * request + step,
            "idx_mapping": slots.int(),
            "expanded_idx_mapping": slots[request].int(),
            "expanded_local_pos": step.int(),
            "temperature": temperature,
            "seed": torch.randint(*FULL_SEED, (8,), generator=generator),
            "num_speculative_steps": WIDTH,
        }
        ours, num_ours = rejection_sample_by_slot(**arguments)
        theirs, num_theirs = module.rejection_sample(**arguments)
        assert num_ours.tolist() == num_theirs.tolist()
        # A greedy bonus token is the arg-max in both.
        compared += same_places(ours, theirs, num_ours, temperature[slots] == 0)
        rejected += int((num_ours < counts).sum())
    assert rejected > 20
    assert compared > 120
