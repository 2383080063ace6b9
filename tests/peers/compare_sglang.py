"""The adapters against SGLang's own Triton kernels, in the interpreter: every output, under the same coins."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import sources
import stand_ins
import torch

from specker.integrations.sglang import chain_speculative_sampling_triton, verify_tree_greedy

KERNELS = "sglang.kernels.ops.speculative"
OUTPUTS = ("predicts", "accept_index", "accept_token_num")


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    stand_ins.install("sglang", sources.SOURCES["sglang"].folder)


def arguments(batch: int, slots: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return outputs and indices of a batch of full chains."""
    children = torch.arange(1, slots + 1).repeat(batch, 1)
    children[:, -1] = -1
    return {
        "predicts": torch.zeros(batch * slots, dtype=torch.int32),
        "accept_index": torch.full((batch, slots), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(batch, dtype=torch.int32),
        "candidates": torch.randint(3, (batch, slots), generator=generator),
        "retrive_index": torch.arange(batch * slots).reshape(batch, slots),
        "retrive_next_token": children,
        "retrive_next_sibling": torch.full_like(children, -1),
    }


def copies(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with outputs of their own."""
    return {**inputs, **{name: inputs[name].clone() for name in OUTPUTS}}


def test_chains() -> None:
    """Kept drafts, recovered and bonus tokens of `chain_speculative_sampling_triton`."""
    module = importlib.import_module(f"{KERNELS}.reject_sampling")
    kept: list[int] = []
    for trial in range(20):
        generator = torch.Generator().manual_seed(trial)
        batch, slots, vocab = 6, trial % 4 + 2, [7, 50, 5000][trial % 3]
        inputs: dict[str, Any] = arguments(batch, slots, generator)
        target_logits = torch.randn(batch, slots, vocab, generator=generator) * 2
        noise = torch.randn(batch, slots - 1, vocab, generator=generator)
        inputs["target_probs"] = target_logits.softmax(-1)
        inputs["draft_probs"] = (target_logits[:, :-1] + noise).softmax(-1)
        drafts = torch.multinomial(inputs["draft_probs"].flatten(0, 1), 1, generator=generator)
        inputs["candidates"][:, 1:] = drafts.reshape(batch, slots - 1)
        inputs["uniform_samples"] = torch.rand(batch, slots, generator=generator)
        inputs["uniform_samples_for_final_sampling"] = torch.rand(batch, generator=generator)
        inputs |= {"threshold_single": 1.0, "threshold_acc": 1.0, "deterministic": True}
        ours, theirs = copies(inputs), copies(inputs)
        chain_speculative_sampling_triton(**ours)
        module.chain_speculative_sampling_triton(**theirs)
        for name in OUTPUTS:
            assert ours[name].tolist() == theirs[name].tolist()
        kept += (slots - 1 - ours["accept_token_num"]).tolist()
    assert min(kept.count(0), len(kept) - kept.count(0)) > 20


def test_greedy_chains() -> None:
    """Every output of `verify_tree_greedy` on chains that end anywhere."""
    module = importlib.import_module(f"{KERNELS}.spec_tree")
    for trial in range(20):
        generator = torch.Generator().manual_seed(trial)
        batch, slots = 5, trial % 4 + 2
        inputs: dict[str, Any] = arguments(batch, slots, generator)
        length = torch.randint(slots, (batch, 1), generator=generator)
        inputs["retrive_next_token"][torch.arange(slots) >= length] = -1
        inputs["target_predict"] = inputs["candidates"].roll(-1, 1).contiguous()
        wrong = torch.rand(batch, slots, generator=generator) < 0.3
        inputs["target_predict"][wrong] += 1
        ours, theirs = copies(inputs), copies(inputs)
        verify_tree_greedy(**ours)
        module.verify_tree_greedy_triton(**{name.replace("retrive", "retrieve"): theirs[name] for name in theirs})
        for name in OUTPUTS:
            assert ours[name].tolist() == theirs[name].tolist()
