"""Batches as vLLM's first runner prepares them, and what `specker.verify` makes of each request alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import specker

VOCAB = 13
LENGTHS = {"equal": [3, 3, 3, 3], "ragged": [2, 0, 3, 1], "one": [4], "none": [0, 0]}
LENGTHS = {"equal": [3, 3, 3, 3], "ragged": [2, 0, 3, 1], "one": [4], "none": [0, 0]}


def metadata(
    temperature: list[float] | None = None, generators: dict[int, torch.Generator] | None = None
) -> SimpleNamespace:
    """Return the fields of vLLM's SamplingMetadata; no temperature is an all-greedy batch."""
    greedy = [value < 1e-5 for value in temperature or [0.0]]
    return SimpleNamespace(
        temperature=None if temperature is None else torch.tensor(temperature),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        generators=generators or {},
    )


def batch(lengths: list[int], has_draft: bool = True, vocab: int = VOCAB, seed: int = 0) -> dict[str, Any]:
    """Return the tensors of a batch, with draft tokens that are often kept."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    target_logits = torch.randn(total, vocab, generator=generator) * 2
    draft_probs = (target_logits + torch.randn(total, vocab, generator=generator)).softmax(-1)
    ids = torch.multinomial(draft_probs, 1, generator=generator) if total else torch.zeros(0, 1)
    return {
        "draft_token_ids": ids.squeeze(1).int(),
        "num_draft_tokens": lengths,
        "max_spec_len": max(lengths),
        "cu_num_draft_tokens": torch.tensor(lengths).cumsum(0).int(),
        "draft_probs": draft_probs if has_draft else None,
        "target_logits": target_logits,
        "bonus_token_ids": 100 + torch.arange(len(lengths)).unsqueeze(1),
    }


def generators(count: int, first: int = 50) -> dict[int, torch.Generator]:
    """Return one seeded generator a request."""
    return {request: torch.Generator().manual_seed(first + request) for request in range(count)}


def one_by_one(inputs: dict[str, Any], temperature: list[float], seeds: dict[int, torch.Generator]) -> list[list[int]]:
    """Return what `specker.verify` makes of each request alone, with vLLM's bonus token in place of its own."""
    outputs, start = [], 0
    for request, length in enumerate(inputs["num_draft_tokens"]):
        rows = slice(start, start + length)
        start += length
        tokens = [int(inputs["bonus_token_ids"][request])]
        if length:
            seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=seeds[request])
            target = inputs["target_logits"][rows]
            result = specker.verify(
                inputs["draft_token_ids"][rows].unsqueeze(0),
                torch.cat([target, target[:1]]).unsqueeze(0),
                draft_probs=None if inputs["draft_probs"] is None else inputs["draft_probs"][rows].unsqueeze(0),
                temperature=float(temperature[request] >= 1e-5),
                seed=seed,
            )
            kept = int(result.num_accepted)
            tokens = (
                result.token_ids[0, : kept + 1].tolist()
                if kept < length
                else [*result.token_ids[0, :kept].tolist(), *tokens]
            )
        outputs.append(tokens + [-1] * (inputs["max_spec_len"] + 1 - len(tokens)))
    return outputs
