"""Greedy verification of chains on the host: a few numbers a request, for which Python is quicker than operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Links = Sequence[Sequence[int]] | None


def keep_chains(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    target_predict: torch.Tensor,
    lengths: Sequence[int],
) -> None:
    """Keep the draft tokens that the target's arg-max agrees with, and write them as SGLang expects them.

    Args:
        predicts, accept_index, accept_token_num, candidates, retrive_index, target_predict: as those of
            `specker.integrations.sglang.verify_tree_greedy`, on the CPU.
        lengths: the draft tokens of each chain.
    """
    columns = accept_index.shape[1]
    width = min(columns, candidates.shape[1])
    expected = target_predict.flatten().tolist()
    written: list[int] = []
    tokens: list[int] = []
    kept_places: list[list[int]] = []
    counts: list[int] = []
    for drafted, places, length in zip(candidates.tolist(), retrive_index.tolist(), lengths, strict=True):
        row = [expected[place] for place in places[:width]]
        count = 0
        while count < min(length, width - 1) and drafted[count + 1] == row[count]:
            count += 1
        written += places[:width]
        tokens += row[: count + 1] + [0] * (width - count - 1)
        kept_places.append(places[: count + 1] + [-1] * (columns - count - 1))
        counts.append(count)
    if counts:
        predicts.numpy()[written] = tokens
        accept_index.numpy()[:] = kept_places
        accept_token_num.numpy()[:] = counts


def chain_lengths_of(next_tokens: Links, next_siblings: Links, batch: int, slots: int) -> list[int]:
    """Return the draft tokens of each chain, -1 for a tree: `specker.delivery.chain_lengths` of lists."""
    lengths = []
    for request in range(batch):
        length = slots - 1
        if next_tokens is not None:
            length = _linked(next_tokens[request])
        if next_siblings is not None and any(sibling != -1 for sibling in next_siblings[request][: max(length, 0) + 1]):
            length = -1
        lengths.append(length)
    return lengths


def _linked(links: Sequence[int]) -> int:
    """Return how many slots follow the first one by one, or -1 where the chain does not end behind them."""
    for slot, link in enumerate(links):
        if link != slot + 1:
            return slot if link == -1 else -1
    return -1
