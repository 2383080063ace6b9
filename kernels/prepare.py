"""The launch in front of a round that an engine hands over: its numbers, as `verify` takes them.

One program a sequence reads a few numbers of it; nothing vocabulary-sized is touched.
"""

# ruff: noqa: ANN001, ANN201 (device functions take and return Triton values, which have no Python types)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import contract
from .blocks import flag, kernel
from .rounds import LAUNCH, _on_device

POSITIONS = 16
"""Positions that the small kernels take at a time."""
SMALL_LAUNCH = LAUNCH | {"num_warps": 1}
Drafts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Draft tokens, prefix sums of the lengths, first positions."""


class Operands(NamedTuple):
    """What `verify` takes, one number a sequence but for tokens and uniforms."""

    token_ids: torch.Tensor
    bounds: torch.Tensor | None
    position: torch.Tensor | None
    temperature: torch.Tensor
    draft_temperature: torch.Tensor
    seed: torch.Tensor | None
    uniforms: torch.Tensor | None
    num_draft_tokens: torch.Tensor | None


@triton.jit
def chain_length(
    children_ptr, stride_children_sequence, stride_children_slot,
    siblings_ptr, stride_siblings_sequence, stride_siblings_slot, sequence, gamma,
):  # fmt: skip
    """Return the draft tokens of a chain of slots, -1 where a slot has two children or the chain leaves one out."""
    length = sequence * 0 + gamma
    good = tl.full((), 1, tl.int32)
    if children_ptr is not None:
        length = sequence * 0
        open_links = tl.full((), 1, tl.int32)
        end = tl.full((), 0, tl.int32)
        for slot in range(gamma + 1):
            wide = sequence * 0 + slot
            child = tl.load(children_ptr + sequence * stride_children_sequence + wide * stride_children_slot)
            end = tl.where((open_links == 1) & (child == -1), 1, end)
            open_links = tl.where((open_links == 1) & (child == slot + 1), 1, 0)
            length += open_links
        good = tl.where(length <= gamma, end, 0)
    if siblings_ptr is not None:
        for slot in range(gamma + 1):
            wide = sequence * 0 + slot
            sibling = tl.load(siblings_ptr + sequence * stride_siblings_sequence + wide * stride_siblings_slot)
            good = tl.where((sibling != -1) & (slot <= length), 0, good)
    return tl.where(good == 1, length, -1)


@kernel
def prepare_sequences(
    temperatures_ptr, draft_temperatures_ptr, seeds_ptr,  # (batch,)
    pairs_ptr,  # (batch, gamma + 1, 2)
    drafts_ptr, bounds_ptr, positions_ptr, lengths_ptr,  # (total,), (batch + 1,), (batch,), (batch,)
    slots_ptr, stride_slots, temperature_ptr, stride_temperature, seed_ptr, stride_seed,  # (batch,); a slot or sequence
    accept_uniforms_ptr, stride_accept_sequence, stride_accept_row, emission_uniforms_ptr, stride_emission,
    token_ids_ptr, stride_token_ids, cu_num_rows_ptr, stride_cu_num_rows, position_ptr, stride_position,  # (rows,) each
    children_ptr, stride_children_sequence, stride_children_slot,  # (batch, gamma + 1)
    siblings_ptr, stride_siblings_sequence, stride_siblings_slot,  # (batch, gamma + 1)
    count, gamma, batch, rows, FINAL: tl.constexpr, BLOCK_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Grid (batch,). A slot that does not exist has the temperature NaN."""
    sequence = tl.program_id(0).to(tl.int64)
    slot = sequence
    inside = flag(sequence >= 0)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + sequence * stride_slots).to(tl.int64)
        inside = flag(slot >= 0) & flag(slot < count)
    if temperature_ptr is not None:
        held = tl.load(temperature_ptr + slot * stride_temperature, mask=inside, other=float("nan")).to(tl.float64)
        # A difference takes the constant in float64; a comparison would round it to float32 first.
        left = tl.where(held - contract.GREEDY_TEMPERATURE < 0.0, 0.0, 1.0)
        valid = flag(held >= 0.0) & flag(held < float("inf"))
        tl.store(temperatures_ptr + sequence, tl.where(valid, left, held))
        tl.store(draft_temperatures_ptr + sequence, 1.0 if FINAL else held)
    if seeds_ptr is not None:
        tl.store(seeds_ptr + sequence, tl.load(seed_ptr + slot * stride_seed, mask=inside, other=0))
    if pairs_ptr is not None:
        emission = tl.load(emission_uniforms_ptr + sequence * stride_emission).to(tl.float64)
        for chunk in range(0, gamma + 1, BLOCK_POSITIONS):
            positions = (chunk + tl.arange(0, BLOCK_POSITIONS)).to(tl.int64)
            # The bonus row has no acceptance.
            pointers = accept_uniforms_ptr + sequence * stride_accept_sequence + positions * stride_accept_row
            accept = tl.load(pointers, mask=positions < gamma, other=0.0).to(tl.float64)
            pairs = pairs_ptr + (sequence * (gamma + 1) + positions) * 2
            tl.store(pairs, accept, mask=positions <= gamma)
            tl.store(pairs + 1, accept * 0.0 + emission, mask=positions <= gamma)
    if lengths_ptr is not None:
        length = chain_length(
            children_ptr, stride_children_sequence, stride_children_slot,
            siblings_ptr, stride_siblings_sequence, stride_siblings_slot, sequence, gamma,
        )  # fmt: skip
        tl.store(lengths_ptr + sequence, length)
    if cu_num_rows_ptr is not None:
        begin = tl.load(cu_num_rows_ptr + sequence * stride_cu_num_rows).to(tl.int64) - sequence
        end = tl.load(cu_num_rows_ptr + (sequence + 1) * stride_cu_num_rows).to(tl.int64) - sequence - 1
        tl.store(bounds_ptr + sequence, begin)
        tl.store(bounds_ptr + batch, end, mask=sequence == batch - 1)
        # Bounds that are wrong are for `verify` to tell.
        total = tl.maximum(rows - batch, 0).to(tl.int64)
        first = tl.minimum(tl.maximum(begin, 0), total)
        last = tl.minimum(tl.maximum(end, 0), total)
        for chunk in range(first, last, BLOCK_POSITIONS):
            indices = chunk + tl.arange(0, BLOCK_POSITIONS).to(tl.int64)
            pointers = token_ids_ptr + (indices + sequence + 1) * stride_token_ids
            tl.store(drafts_ptr + indices, tl.load(pointers, mask=indices < last, other=0).to(tl.int64), indices < last)
        if positions_ptr is not None:
            row = tl.minimum(tl.maximum(begin + sequence, 0), tl.maximum(rows - 1, 0))
            held = tl.load(position_ptr + row * stride_position, mask=row < rows, other=0).to(tl.int64)
            tl.store(positions_ptr + sequence, held)


def prepare(
    drafts: Drafts,
    links: tuple[torch.Tensor | None, torch.Tensor | None],
    cu_num_rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    accept_uniforms: torch.Tensor | None,
    emission_uniforms: torch.Tensor | None,
    gamma: int,
    final: bool,
) -> Operands:
    """Launch the preparation of a round, where there is anything to prepare; `final` draft rows are tempered."""
    token_ids, bounds, position = drafts
    device, rows = token_ids.device, token_ids.shape[0]
    told = bounds if cu_num_rows is None else cu_num_rows
    batch = rows if told is None else told.shape[0] - 1

    def output(wanted: bool, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    temperatures = output(temperature is not None, batch, dtype=torch.float64)
    draft_temperatures = output(temperature is not None, batch, dtype=torch.float64)
    pairs = output(accept_uniforms is not None, batch, gamma + 1, 2, dtype=torch.float64)
    seeds = output(slots is not None and seed is not None, batch)
    rooted = cu_num_rows is not None
    tokens = output(rooted, max(rows - batch, 0))
    new_bounds, positions = output(rooted, batch + 1), output(rooted and position is not None, batch)
    count = min((held.shape[0] for held in (temperature, seed) if held is not None), default=0)
    if rooted and batch == 0 and new_bounds is not None:
        new_bounds.zero_()
    lengths = output(any(link is not None for link in links), batch)
    if batch and any(made is not None for made in (temperatures, pairs, new_bounds, lengths)):
        with _on_device(token_ids):
            prepare_sequences[(batch,)](
                temperatures, draft_temperatures, seeds, pairs, tokens, new_bounds, positions, lengths,
                *spread_strides(slots), *spread_strides(temperature),
                *spread_strides(seed if seeds is not None else None), *spread_strides(accept_uniforms, 2),
                *spread_strides(emission_uniforms),
                *spread_strides(token_ids if rooted else None), *spread_strides(cu_num_rows),
                *spread_strides(position if positions is not None else None), *spread_strides(links[0], 2),
                *spread_strides(links[1], 2), count, gamma, batch, rows,
                FINAL=final, BLOCK_POSITIONS=POSITIONS, **SMALL_LAUNCH,
            )  # fmt: skip
    one = torch.ones((1,), dtype=torch.float64, device=device)
    return Operands(
        token_ids if tokens is None else tokens,
        bounds if new_bounds is None else new_bounds,
        position if positions is None else positions,
        one if temperatures is None else temperatures,
        one if draft_temperatures is None else draft_temperatures,
        seed if seeds is None else seeds,
        pairs,
        lengths,
    )


def spread_strides(tensor: torch.Tensor | None, rank: int = 1) -> tuple[Any, ...]:
    """Return a tensor followed by its strides, 0 where one element stands for the whole batch."""
    if tensor is None:
        return (None, *(0,) * rank)
    return (tensor, *(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
