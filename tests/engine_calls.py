"""Random calls of the operator `verify_into`: the forms in which engines hand a round over."""

from __future__ import annotations

from typing import Any

import torch

from . import random_calls
from .random_calls import CallMaker

FORMS = ("padded", "coins", "flat", "rooted")
WRITTEN = ("output_token_ids", "output_places", "passed_total", "accepted_total", "emitted_total", "status_total")
_INTEGERS = (torch.int32, torch.int64)
_TEMPERATURES = (0.0, 1e-6, 0.5, 1.0, 1.5, 1.0, -1.0, float("nan"))


def engine_call(maker: CallMaker, form: str | None = None, *, wild: bool = False) -> dict[str, Any]:
    """Return the arguments of one call by name; in wild ones prefix sums may decrease, which mixes sequences up."""
    form = maker.pick(FORMS) if form is None else form
    batch, gamma, vocab = maker.pick((0, 1, 2, 5)), maker.pick((0, 1, 3)), maker.pick(random_calls.VOCABS)
    lengths = maker.integers(0, gamma + 1, batch)
    total, is_flat = int(lengths.sum()), form in ("flat", "rooted")
    leading = (total,) if is_flat else (batch, gamma)
    has_bonus_rows = form != "flat"
    target_leading = (total + batch * has_bonus_rows,) if is_flat else (batch, gamma + 1)
    is_probs = not is_flat or maker.chance(0.2)
    target = maker.rows(target_leading, vocab, is_probs)
    # The reference cannot index a draft tensor without rows.
    draft = maker.rows(leading, vocab, is_probs or form == "flat") if total and gamma and maker.chance(0.7) else None
    call: dict[str, Any] = {
        "draft_token_ids": maker.tokens(draft, leading, vocab), "target": target, "draft": draft,
        "next_tokens": None, "next_siblings": None, "cu_num_draft_tokens": None, "cu_num_rows": None, "slots": None,
        "temperature": None,
        "seed": maker.integers(-(2**60), 2**60, batch), "position": maker.integers(0, 2**40, maker.pick((1, batch))),
        "accept_uniforms": None, "emission_uniforms": None, "max_num_draft_tokens": gamma, "target_is_probs": is_probs,
        "draft_is_probs": is_probs or form == "flat", "bonus_token_ids": None, "places": None,
        "padding": maker.pick((-1, 0)), **written(maker, batch, gamma),
    }  # fmt: skip
    if form == "coins":
        add_coins(maker, call, batch, gamma, lengths)
    elif form == "flat":
        call["cu_num_draft_tokens"] = prefix_sums(lengths).to(maker.pick(_INTEGERS))
        call["temperature"] = temperatures(maker, batch)
        call["bonus_token_ids"] = 9000 + torch.arange(2 * batch, dtype=maker.pick(_INTEGERS))[::2]
    elif form == "rooted":
        add_roots_and_slots(maker, call, lengths, gamma, wild)
    return call


def written(maker: CallMaker, batch: int, gamma: int) -> dict[str, Any]:
    """Return the tensors that are written, some of them None, some strided, with something in them."""
    outputs: dict[str, Any] = {"output_token_ids": torch.full((batch, gamma + 1), 77, dtype=maker.pick(_INTEGERS))}
    if maker.chance(0.3):
        outputs["output_token_ids"] = torch.full((gamma + 1, batch), 77, dtype=maker.pick(_INTEGERS)).t()
    outputs["output_places"] = None
    for name in WRITTEN[2:]:
        dtype = torch.int32 if name == "status_total" else maker.pick(_INTEGERS)
        totals = maker.integers(0, 9, 2 * batch).to(dtype)[::2]
        outputs[name] = totals if maker.chance(0.7) else None
    return outputs


def add_coins(maker: CallMaker, call: dict[str, Any], batch: int, gamma: int, lengths: torch.Tensor) -> None:
    """Inject uniforms, and have the tokens written to places of a flat output."""
    reals = (torch.float32, torch.float64)
    accept = torch.rand(batch, gamma + maker.pick((0, 2)), generator=maker.generator, dtype=maker.pick(reals))
    emission = torch.rand(batch, generator=maker.generator, dtype=maker.pick(reals))
    if batch and maker.chance(0.1):
        emission[0] = maker.pick((1.0, -0.5, float("nan")))
    size = 2 * batch * (gamma + 1) + 1
    places = torch.randperm(size, generator=maker.generator)[: batch * (gamma + 2)].view(batch, gamma + 2)
    if batch and maker.chance(0.2):
        places[0, 0] = maker.pick((-1, size, size + 5))
    columns = maker.pick((max(gamma, 1), gamma + 1, gamma + 3))
    call |= {
        "seed": None, "position": None, "accept_uniforms": accept, "emission_uniforms": emission, "passed_total": None,
        "places": places.to(maker.pick(_INTEGERS)),
        "output_token_ids": torch.full((size,), 77, dtype=maker.pick(_INTEGERS)),
        "output_places": torch.full((batch, columns), 55, dtype=maker.pick(_INTEGERS)),
    }  # fmt: skip
    add_links(maker, call, lengths, gamma + 1)


def add_links(maker: CallMaker, call: dict[str, Any], lengths: torch.Tensor, slots: int) -> None:
    """Link the slots of each sequence to a chain as long as its drafts, or once in a while to something else."""
    steps = torch.arange(slots)
    children = torch.where(steps < lengths.unsqueeze(1), steps + 1, maker.integers(-1, slots, len(lengths), slots))
    children[torch.arange(len(lengths)), lengths] = -1
    siblings = torch.where(steps <= lengths.unsqueeze(1), -1, maker.integers(-1, slots, len(lengths), slots))
    for links in (children, siblings):
        if links.numel() and maker.chance(0.15):
            links.view(-1)[maker.choices.randrange(links.numel())] = maker.pick((-1, 0, 1, slots))
    dtype = maker.pick(_INTEGERS)
    call["next_tokens"] = children.to(dtype) if maker.chance(0.7) else None
    call["next_siblings"] = siblings.to(dtype) if maker.chance(0.7) else None


def add_roots_and_slots(maker: CallMaker, call: dict[str, Any], lengths: torch.Tensor, gamma: int, wild: bool) -> None:
    """Put the token before its drafts in front of each sequence, and what a sequence holds into slots."""
    batch, rows, ends = len(lengths), int((lengths + 1).sum()), prefix_sums(lengths)
    bounds = prefix_sums(lengths + 1)
    is_root = torch.zeros(rows, dtype=torch.bool).index_fill(0, bounds[:-1], True)
    tokens = torch.full((rows,), 10**6, dtype=call["draft_token_ids"].dtype)
    tokens[~is_root] = call["draft_token_ids"]
    slots = torch.randperm(batch + 3, generator=maker.generator)[:batch]
    if call["draft"] is not None:
        by_slot = call["draft"].new_full((batch + 3, gamma, call["draft"].shape[-1]), float("nan"))
        for slot, begin, end in zip(slots.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            by_slot[slot, : end - begin] = call["draft"][begin:end]
        call["draft"] = by_slot
    if batch and maker.chance(0.1):
        slots[0] = maker.pick((-1, batch + 3))
    if batch and maker.chance(0.1):
        bounds[maker.choices.randrange(batch + 1) if wild else maker.pick((0, -1))] += maker.pick((-2, -1, 1, 5))
    call |= {
        "draft_token_ids": tokens, "cu_num_rows": bounds.to(maker.pick(_INTEGERS)),
        "slots": slots.to(maker.pick(_INTEGERS)), "temperature": temperatures(maker, batch + 3),
        "seed": maker.integers(-(2**60), 2**60, batch + 3),
        "position": maker.integers(0, 2**30, rows).to(maker.pick(_INTEGERS)),
    }  # fmt: skip


def temperatures(maker: CallMaker, count: int) -> torch.Tensor:
    """Return temperatures, a few of them invalid."""
    values = [maker.pick(_TEMPERATURES[:6] if maker.chance(0.95) else _TEMPERATURES) for _ in range(count)]
    return torch.tensor(values, dtype=maker.pick((torch.float32, torch.float64)))


def prefix_sums(lengths: torch.Tensor) -> torch.Tensor:
    """Return prefix sums starting with 0."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
