"""`rejection_sample` of vLLM's second runner: draft logits, temperature and seed in the slots of persistent requests.

Three layouts, none of which copies a row: equal lengths are a padded round; drafts without logits a flat one; what
is left is verified row by row, since a flat round cannot address draft rows by slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specker import checks
from specker.integrations.vllm.arguments import refuse_other_rules
from specker.sampling import GREEDY_TEMPERATURE, Sampling
from specker.status import Status
from specker.verify import verify, verify_flat

_REALS = (torch.float32, torch.float64)
_INDICES = (torch.int32, torch.int64)


def rejection_sample_by_slot(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,  # noqa: ARG001 (every draw here has 53 bits)
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: torch.Tensor | None = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
    fly_window_size: int = 0,
    fly_entropy_threshold: float = 0.3,  # noqa: ARG001 (refused with fly_window_size)
    fly_entropy_top_k: int = 3,  # noqa: ARG001 (likewise)
    *,
    output_status: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a batch as `rejection_sample` of `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils` does.

    Equivalent to, for the rows of one request in slot s::

        specker.verify(
            draft_sampled[1:], target_logits, draft_logits[s], temperature=1.0,
            draft_sampling=specker.Sampling(temperature=temperature[s]), seed=seed[s], position=pos[0],
        )

    Args:
        target_logits: `(num_logits, vocab)` float32, bfloat16 or float16, processed: vLLM has applied temperature and
            filters. Each request's bonus row stands behind its other rows.
        draft_logits: `(slots, num_speculative_steps, draft_vocab)` before temperature; None: arg-max or n-gram
            drafts. Columns that the target has beyond draft_vocab are padding, as in vLLM.
        draft_sampled: `(num_logits,)` int32 or int64; row 0 of a request is the token before its drafts. -1 is a
            placeholder that is always rejected.
        cu_num_logits: `(num_reqs + 1,)` prefix sums of the rows, starting with 0.
        pos: `(num_logits,)` int32 or int64 positions in the sequence, consecutive within a request.
        idx_mapping: `(num_reqs,)` slot of each request.
        expanded_idx_mapping, expanded_local_pos: `(num_logits,)` slot and index in the request of each row.
        temperature: `(slots,)` float32 or float64; below 1e-5 is greedy.
        seed: `(slots,)` int64.
        num_speculative_steps: fixes the width of the result.
        synthetic_conditional_rates, use_block_verification, fly_window_size, fly_entropy_threshold,
            fly_entropy_top_k, contexts, watermarking, watermarking_skip_mask, watermark_key: other rules, refused.
        use_fp64: of no effect: every draw has 53 bits.
        output_status: `(num_reqs,)` int32, into which the bits of `specker.Status` are or-ed. vLLM has no such
            argument.

    Returns:
        sampled `(num_reqs, num_speculative_steps + 1)` int64, -1 behind the last token (vLLM leaves what was in
        memory), and num_sampled `(num_reqs,)` int32.

    Raises:
        TypeError, ValueError: an argument has the wrong rank, shape, dtype or device.
        NotImplementedError: another rule was asked for.

    Guarantees: a request's tokens depend on its rows, seed and position alone, not on its slot or place in the batch;
        no vocabulary-sized tensor is copied or allocated; no host synchronisation on a GPU. Rows behind a rejection
        are read only where lengths differ and there are draft logits.

    Source: Leviathan et al. 2023, algorithm 1; `rejection_sampler_utils.py` of vLLM 0.33.0.

    Example:
        >>> slots = torch.tensor([2])
        >>> rejection_sample_by_slot(
        ...     torch.tensor([[0.0, 9.0], [9.0, 0.0]]), None, torch.tensor([5, 1]), torch.tensor([0, 2]),
        ...     torch.tensor([10, 11]), slots, slots.repeat(2), torch.tensor([0, 1]),
        ...     temperature=torch.zeros(3), seed=torch.zeros(3, dtype=torch.int64), num_speculative_steps=1,
        ... )
        (tensor([[1, 0]]), tensor([2], dtype=torch.int32))
    """  # fmt: skip
    refuse_other_rules(
        synthetic_conditional_rates=synthetic_conditional_rates,
        use_block_verification=use_block_verification,
        contexts=contexts,
        watermarking=watermarking,
        watermarking_skip_mask=watermarking_skip_mask,
        watermark_key=watermark_key,
        fly_window_size=fly_window_size or None,
    )
    inputs = _Inputs(target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed)
    if not _is_padded_round(inputs, num_speculative_steps):
        inputs = _checked(inputs, num_speculative_steps)
    try:
        if inputs.target.shape[0] == inputs.slot.shape[0] * (num_speculative_steps + 1):
            emitted = _equal_lengths(inputs, num_speculative_steps)
        elif inputs.draft is None:
            emitted = _flat(inputs, num_speculative_steps)
        else:
            emitted = _row_by_row(inputs, expanded_idx_mapping, expanded_local_pos, inputs.draft)
    except IndexError as error:
        raise ValueError(
            f"idx_mapping, expanded_idx_mapping: expected slots of temperature and seed, below {temperature.shape[0]} "
            f"and {seed.shape[0]}, got {idx_mapping.tolist()} and {expanded_idx_mapping.tolist()}"
        ) from error
    if output_status is not None:
        checks.check_tensor("output_status", output_status, inputs.slot.shape, (torch.int32,), inputs.target.device)
        output_status |= emitted.status
    return emitted.token_ids, emitted.num_emitted.int()


class _Inputs(NamedTuple):
    """The arguments, checked; `bounds` are the prefix sums of the rows."""

    target: torch.Tensor
    draft: torch.Tensor | None
    draft_sampled: torch.Tensor
    bounds: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor


class _Emitted(NamedTuple):
    """What a layout returns, of every request."""

    token_ids: torch.Tensor
    num_emitted: torch.Tensor
    status: torch.Tensor


def _is_padded_round(inputs: _Inputs, steps: int) -> bool:
    """Return whether the shapes are those of equal lengths, for which verify checks what is left."""
    tensors: tuple[object, ...] = inputs[:1] + inputs[2:]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    target, slot = inputs.target, inputs.slot
    if target.dim() != 2 or slot.dim() != 1 or slot.dtype not in _INDICES or target.stride(1) != 1:
        return False
    rows = (slot.shape[0] * (steps + 1),)
    draft_vocab = inputs.draft.shape[-1] if isinstance(inputs.draft, torch.Tensor) else target.shape[1]
    return (
        target.shape == (*rows, draft_vocab)
        and inputs.draft_sampled.shape == inputs.position.shape == rows
        and inputs.temperature.dim() == inputs.seed.dim() == 1
    )


def _checked(inputs: _Inputs, steps: int) -> _Inputs:
    target = checks.check_rows("target_logits", inputs.target, (None, None), None)
    device, num_logits = target.device, target.shape[0]
    checks.check_index("idx_mapping", inputs.slot, (None,), device)
    checks.check_index("cu_num_logits", inputs.bounds, (inputs.slot.shape[0] + 1,), device)
    checks.check_index("draft_sampled", inputs.draft_sampled, (num_logits,), device)
    checks.check_index("pos", inputs.position, (num_logits,), device)
    checks.check_tensor("temperature", inputs.temperature, (None,), _REALS, device)
    checks.check_tensor("seed", inputs.seed, (None,), (torch.int64,), device)
    if inputs.draft is None:
        return inputs
    checks.check_rows("draft_logits", inputs.draft, (None, steps, None), device)
    vocab, draft_vocab = target.shape[1], inputs.draft.shape[2]
    if draft_vocab > vocab:
        raise ValueError(f"draft_logits: expected at most the target's {vocab} columns, got {draft_vocab}")
    return inputs._replace(target=target[:, :draft_vocab]) if draft_vocab < vocab else inputs


def _sampled(temperature: torch.Tensor) -> torch.Tensor:
    """Return the temperature left to apply to target rows: 0 (greedy) or 1, for they are tempered already."""
    return temperature.ge(GREEDY_TEMPERATURE).float()


def _equal_lengths(inputs: _Inputs, steps: int) -> _Emitted:
    """Verify a padded round: as many rows as fit leave no room for a shorter request."""
    temperature = inputs.temperature.index_select(0, inputs.slot)
    has_draft = inputs.draft is not None
    result = verify(
        inputs.draft_sampled.view(-1, steps + 1).narrow(1, 1, steps),
        inputs.target.as_strided(
            (inputs.slot.shape[0], steps + 1, inputs.target.shape[1]),
            (inputs.target.stride(0) * (steps + 1), inputs.target.stride(0), 1),
        ),
        inputs.draft,
        temperature=_sampled(temperature),
        draft_sampling=Sampling(temperature) if has_draft else None,
        draft_index=inputs.slot if has_draft else None,
        seed=inputs.seed.index_select(0, inputs.slot),
        position=inputs.position[:: steps + 1].long(),
    )
    return _Emitted(result.token_ids, result.num_emitted, result.status)


def _flat(inputs: _Inputs, steps: int) -> _Emitted:
    """Verify a flat round of point-mass drafts."""
    num_logits, num_reqs = inputs.target.shape[0], inputs.slot.shape[0]
    device = inputs.target.device
    bounds = inputs.bounds - torch.arange(num_reqs + 1, device=device, dtype=inputs.bounds.dtype)
    drafts = torch.arange(num_logits - num_reqs, device=device, dtype=inputs.bounds.dtype)
    # One row of each request before this one, and the first of its own, hold no draft.
    request = torch.searchsorted(bounds[1:], drafts, right=True)
    row = (drafts + request + 1).clamp(max=num_logits - 1)
    result = verify_flat(
        inputs.draft_sampled[row],
        inputs.target,
        cu_num_draft_tokens=bounds,
        max_num_draft_tokens=steps,
        temperature=_sampled(inputs.temperature[inputs.slot]),
        seed=inputs.seed[inputs.slot],
        position=inputs.position[inputs.bounds[:-1].clamp(0, max(num_logits - 1, 0))].long(),
    )
    return _Emitted(result.token_ids, result.num_emitted, result.status)


def _row_by_row(inputs: _Inputs, slot: torch.Tensor, step: torch.Tensor, draft: torch.Tensor) -> _Emitted:
    """Verify every row as a round of at most one draft token, and string the rounds of each request together."""
    num_logits, steps = inputs.target.shape[0], draft.shape[1]
    device = inputs.target.device
    checks.check_index("expanded_idx_mapping", slot, (num_logits,), device)
    checks.check_index("expanded_local_pos", step, (num_logits,), device)
    length = inputs.bounds.diff() - 1
    fits = (length >= 0) & (length <= steps)
    if checks.host_readable(device) and not bool(fits.all()):
        raise ValueError(f"cu_num_logits: expected 1..{steps + 1} rows a request, got {(length + 1).tolist()}")
    by_step, slot_rows = _steps_as_slots(draft)
    drafted = torch.ones(num_logits, dtype=torch.int64, device=device)
    drafted.index_fill_(0, (inputs.bounds[1:].long() - 1).clamp(0, num_logits - 1), 0)
    temperature = inputs.temperature[slot]
    rounds = verify(
        inputs.draft_sampled.roll(-1).unsqueeze(1),
        inputs.target.unsqueeze(1).expand(-1, 2, -1),
        by_step,
        num_draft_tokens=drafted,
        temperature=_sampled(temperature),
        draft_sampling=Sampling(temperature),
        draft_index=slot.long() * slot_rows + step.clamp(0, steps - 1),
        seed=inputs.seed[slot],
        position=inputs.position.long(),
    )
    index = (inputs.bounds[:-1].unsqueeze(1) + torch.arange(steps + 1, device=device)).clamp(max=num_logits - 1)
    kept = rounds.num_accepted[index].cumprod(1)
    reached = torch.nn.functional.pad(kept[:, :-1], (1, 0), value=1) * fits.unsqueeze(1)
    token_ids = rounds.token_ids[:, 0][index].masked_fill_(reached == 0, -1)
    status = torch.where(fits, 0, int(Status.INVALID_NUM_DRAFT_TOKENS)).int()
    for column in (rounds.status[index] * reached).unbind(1):
        status |= column.int()
    return _Emitted(token_ids, token_ids.ge(0).sum(1), status)


def _steps_as_slots(draft: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a view of one row a slot, and how many of those a slot of `draft` spans."""
    slots, steps, vocab = draft.shape
    stride_slot, stride_step, _ = draft.stride()
    if steps == 1:
        return draft, 1
    # The stride of a single slot means nothing.
    span = steps if slots == 1 else stride_slot // max(stride_step, 1)
    if stride_step == 0 or (slots > 1 and stride_slot % stride_step):
        raise ValueError(
            "draft_logits: expected the stride of slots to be a multiple of the stride of steps where lengths differ, "
            f"got strides {draft.stride()}"
        )
    return draft.as_strided(((slots - 1) * span + steps, 1, vocab), (stride_step, stride_step, 1)), span
