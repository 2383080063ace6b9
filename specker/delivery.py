"""The meaning of the operator `verify_into`: a round, written into tensors of another engine's."""

from __future__ import annotations

import math

import torch

from specker import random, reference
from specker.sampling import GREEDY_TEMPERATURE
from specker.status import INVALID_ARGUMENT, Status


def verify_into(
    draft_token_ids: torch.Tensor,
    target: torch.Tensor,
    draft: torch.Tensor | None,
    next_tokens: torch.Tensor | None,
    next_siblings: torch.Tensor | None,
    cu_num_draft_tokens: torch.Tensor | None,
    cu_num_rows: torch.Tensor | None,
    slots: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    position: torch.Tensor | None,
    accept_uniforms: torch.Tensor | None,
    emission_uniforms: torch.Tensor | None,
    max_num_draft_tokens: int,
    target_is_probs: bool,
    draft_is_probs: bool,
    bonus_token_ids: torch.Tensor | None,
    places: torch.Tensor | None,
    padding: int,
    output_token_ids: torch.Tensor,
    output_places: torch.Tensor | None,
    passed_total: torch.Tensor | None,
    accepted_total: torch.Tensor | None,
    emitted_total: torch.Tensor | None,
    status_total: torch.Tensor | None,
) -> torch.Tensor:
    """Verify a round without filters, write it into tensors of the caller's, and return its status.

    Args:
        draft_token_ids, target, draft, cu_num_draft_tokens, position, max_num_draft_tokens, target_is_probs,
            draft_is_probs: as `specker.reference.verify`.
        next_tokens, next_siblings: `(batch, gamma + 1)` links of each sequence as those of `chain_lengths`.
        cu_num_rows: `(batch + 1,)` prefix sums of the target rows, in place of cu_num_draft_tokens. draft_token_ids and
            position then have one element a target row; the first of a sequence is the token before its drafts, and
            the position of the first draft. Sums that decrease mix sequences up, but reach no memory of others.
        slots: `(batch,)` integers: which leading element of draft, temperature and seed belongs to each sequence; needs
            temperature. None: they have one a sequence, or one for all.
        temperature: below 1e-5 is greedy. Target rows are tempered already and draft probabilities are final, so it
            applies to draft logits alone. None is 1.
        seed: one a sequence or slot.
        accept_uniforms, emission_uniforms: `(batch, >= gamma)` and `(batch,)` float32 or float64 in place of seed and
            position: a uniform an acceptance, and one a sequence for the token that ends its round. Padded form only.
        bonus_token_ids: `(batch,)` tokens for the sequences that kept all their draft tokens and emitted nothing more.
        places: `(batch, >= gamma + 1)` distinct indices into output_token_ids, where each token goes; one that lies
            outside is left out. None: output_token_ids is `(batch, gamma + 1)`.
        padding: what is written behind the last token.
        output_token_ids: written.
        output_places: `(batch, columns)`, written: the places up to that of the last token, then -1.
        passed_total: `(batch,)`, to which the number of draft tokens is added that pass their own test, also behind the
            first rejection; needs seed and position.
        accepted_total, emitted_total: `(batch,)`, to which the draft tokens kept and all tokens emitted are added.
        status_total: `(batch,)` int32, into which the status is or-ed.
    """
    if passed_total is not None and (seed is None or position is None):
        raise ValueError("passed_total: expected seed and position with it, got None")
    if slots is not None and temperature is None:
        raise ValueError("slots: expected temperature with it, got None")
    uniforms = None
    if accept_uniforms is not None and emission_uniforms is not None:
        # The bonus row has no acceptance.
        accept = torch.nn.functional.pad(accept_uniforms[:, :max_num_draft_tokens].double(), (0, 1))
        uniforms = torch.stack((accept, emission_uniforms.double().unsqueeze(1).expand_as(accept)), dim=2)
    if cu_num_rows is not None:
        draft_token_ids, cu_num_draft_tokens, position = _without_roots(draft_token_ids, cu_num_rows, position)
    batch = draft_token_ids.shape[0] if cu_num_draft_tokens is None else cu_num_draft_tokens.shape[0] - 1
    num_draft_tokens = None
    if next_tokens is not None or next_siblings is not None:
        num_draft_tokens = chain_lengths(next_tokens, next_siblings)
    if temperature is None:
        left = tempered = torch.ones(1, dtype=torch.float64, device=target.device)
    else:
        temperature, seed = _of_sequences(temperature.double(), seed, slots)
        valid = (temperature >= 0) & torch.isfinite(temperature)
        left = torch.where(valid, (temperature >= GREEDY_TEMPERATURE).double(), temperature).expand(batch)
        tempered = torch.ones_like(left) if draft_is_probs else temperature
    nothing = (None,) * 10
    token_ids, num_accepted, num_emitted, status, _, accept_probs, _ = reference.verify(
        draft_token_ids, target, draft, None, num_draft_tokens, cu_num_draft_tokens, None if draft is None else slots,
        left, None, None, None, tempered, None, None, None, *nothing, seed, position, uniforms, max_num_draft_tokens,
        target_is_probs, draft_is_probs, False, passed_total is not None,
    )  # fmt: skip
    if bonus_token_ids is not None:
        token_ids = _with_bonus_tokens(token_ids, num_accepted, num_emitted, status, bonus_token_ids)
    write_tokens(token_ids, num_accepted, places, padding, output_token_ids, output_places)
    if passed_total is not None and seed is not None and position is not None:
        steps = torch.arange(max_num_draft_tokens, device=seed.device)
        drawn = random.uniforms(seed.unsqueeze(-1), position.unsqueeze(-1) + steps, random.VERIFY_PURPOSE)[0]
        # Accept probabilities are float32: rounding must not take back a token that was kept.
        passed_total += torch.maximum((drawn < accept_probs).sum(-1), num_accepted).to(passed_total.dtype)
    for total, count in ((accepted_total, num_accepted), (emitted_total, num_emitted)):
        if total is not None:
            total += count.to(total.dtype)
    if status_total is not None:
        status_total |= status
    return status


def chain_lengths(next_tokens: torch.Tensor | None, next_siblings: torch.Tensor | None) -> torch.Tensor:
    """Return the draft tokens of each chain, -1 where a slot has two children or the chain leaves one out.

    Args:
        next_tokens: `(batch, slots)` the child of each slot, -1 for none; slot 0 is the root. None: a full chain.
        next_siblings: `(batch, slots)` the next child of the same parent, -1 for none. None: there are none.

    Raises:
        ValueError: both are None.
    """
    links = next_siblings if next_tokens is None else next_tokens
    if links is None:
        raise ValueError("next_tokens, next_siblings: expected at least one of them, got None for both")
    batch, slots = links.shape
    indices = torch.arange(slots, device=links.device)
    length = torch.full((batch,), slots - 1, device=links.device)
    if next_tokens is not None:
        length = (next_tokens == indices + 1).long().cumprod(1).sum(1)
        # Behind its last link a chain ends.
        last = next_tokens.gather(1, length.clamp(max=slots - 1).unsqueeze(1)).squeeze(1)
        length = torch.where((last == -1) & (length < slots), length, -1)
    if next_siblings is not None:
        alone = ((next_siblings == -1) | (indices > length.unsqueeze(1))).all(1)
        length = torch.where(alone, length, -1)
    return length


def _without_roots(
    token_ids: torch.Tensor, cu_num_rows: torch.Tensor, position: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return draft tokens, prefix sums of their numbers and a position a sequence, from one element a target row."""
    rows, bounds = token_ids.shape[0], cu_num_rows.long()
    batch = bounds.shape[0] - 1
    bounds = bounds - torch.arange(batch + 1, device=bounds.device)
    drafts = torch.arange(max(rows - batch, 0), device=bounds.device)
    # One row of each sequence before this one, and the first of its own, hold no draft.
    ends = bounds[1:].cummax(0).values if batch else bounds[1:]
    row = drafts + torch.searchsorted(ends, drafts, right=True) + 1
    if position is not None:
        first = cu_num_rows[:-1].long().clamp(0, max(rows - 1, 0))
        position = position[first] if rows else torch.zeros_like(first)
    return token_ids[row.clamp(max=rows - 1)], bounds, position


def _of_sequences(
    temperature: torch.Tensor, seed: torch.Tensor | None, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return temperature and seed of every sequence; a slot that does not exist has a temperature of NaN."""
    if slots is None:
        return temperature, seed
    count = temperature.shape[0] if seed is None else min(temperature.shape[0], seed.shape[0])
    inside = (slots >= 0) & (slots < count)
    # One element more serves the slots that do not exist.
    index = torch.where(inside, slots.long(), count)
    nan = temperature.new_full((1,), math.nan)
    seeds = None if seed is None else torch.cat((seed[:count], seed.new_zeros(1)))[index]
    return torch.cat((temperature[:count], nan))[index], seeds


def write_tokens(
    token_ids: torch.Tensor,
    num_accepted: torch.Tensor,
    places: torch.Tensor | None,
    padding: int,
    output_token_ids: torch.Tensor,
    output_places: torch.Tensor | None,
) -> None:
    """Write the tokens of a round where an engine expects them; arguments as those of `verify_into`."""
    width = token_ids.shape[1]
    shown = torch.arange(width, device=token_ids.device) <= num_accepted.unsqueeze(-1)
    tokens = torch.where(shown, token_ids, padding)
    if places is None:
        output_token_ids.copy_(tokens)
        return
    size, index = output_token_ids.shape[0], places[:, :width].long()
    # What lies outside goes into an element that is thrown away.
    index = torch.where((index >= 0) & (index < size), index, size)
    written = torch.nn.functional.pad(output_token_ids, (0, 1))
    written[index.reshape(-1)] = tokens.reshape(-1).to(written.dtype)
    output_token_ids.copy_(written[:size])
    if output_places is not None:
        columns = min(width, output_places.shape[1])
        output_places.fill_(-1)
        output_places[:, :columns] = torch.where(shown, places[:, :width], -1)[:, :columns]


def _with_bonus_tokens(
    token_ids: torch.Tensor,
    num_accepted: torch.Tensor,
    num_emitted: torch.Tensor,
    status: torch.Tensor,
    bonus_token_ids: torch.Tensor,
) -> torch.Tensor:
    """Return the tokens with those of healthy sequences that emitted nothing behind their draft tokens."""
    healthy = (status & (int(INVALID_ARGUMENT) | int(Status.TARGET_INVALID))) == 0
    last = torch.arange(token_ids.shape[1], device=token_ids.device) == num_accepted.unsqueeze(-1)
    missing = last & (healthy & (num_emitted == num_accepted)).unsqueeze(-1)
    return torch.where(missing, bonus_token_ids.unsqueeze(-1), token_ids)
