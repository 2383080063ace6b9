"""`rejection_sample` of vLLM's second runner: draft logits, temperature and seed in the slots of persistent requests.

A flat round of any lengths, whose draft rows lie in slots; no row is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specker import checks
from specker.integrations.rounds import verify_into
from specker.integrations.vllm.arguments import refuse_other_rules
from specker.status import InvalidInputError

_REALS = (torch.float32, torch.float64)
_SEED_DTYPES = (torch.int64,)


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
        expanded_idx_mapping, expanded_local_pos: `(num_logits,)` slot and index in the request of each row; not read,
            cu_num_logits and idx_mapping say the same.
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
        no vocabulary-sized tensor is copied or allocated; no host synchronisation on a GPU; rows behind a rejection
        decide nothing, and a CPU does not read them.

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
    inputs = _checked(
        _Inputs(target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, temperature, seed),
        num_speculative_steps,
    )
    for name, expanded in (
        ("expanded_idx_mapping", expanded_idx_mapping),
        ("expanded_local_pos", expanded_local_pos),
    ):
        checks.check_index(name, expanded, draft_sampled.shape, inputs.target.device)
    if output_status is not None:
        checks.check_tensor("output_status", output_status, inputs.slot.shape, (torch.int32,), inputs.target.device)
    num_reqs, device = idx_mapping.shape[0], inputs.target.device
    sampled = torch.empty((num_reqs, num_speculative_steps + 1), dtype=torch.int64, device=device)
    num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    try:
        verify_into(
            sampled, draft_sampled, inputs.target, draft_logits, num_speculative_steps, cu_num_rows=cu_num_logits,
            slots=idx_mapping, temperature=temperature, seed=seed, position=pos, emitted_total=num_sampled,
            status_total=output_status,
        )  # fmt: skip
    except InvalidInputError as error:
        _explain(inputs, num_speculative_steps, error)
        raise
    return sampled, num_sampled


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


def _checked(inputs: _Inputs, steps: int) -> _Inputs:
    target = checks.check_rows("target_logits", inputs.target, (None, None), None)
    device, (num_logits, vocab) = target.device, target.shape
    checks.check_index("idx_mapping", inputs.slot, (None,), device)
    checks.check_index("cu_num_logits", inputs.bounds, (inputs.slot.shape[0] + 1,), device)
    checks.check_index("draft_sampled", inputs.draft_sampled, (num_logits,), device)
    checks.check_index("pos", inputs.position, (num_logits,), device)
    checks.check_tensor("temperature", inputs.temperature, (None,), _REALS, device)
    checks.check_tensor("seed", inputs.seed, (None,), _SEED_DTYPES, device)
    if inputs.draft is None:
        return inputs
    draft_vocab = checks.check_rows("draft_logits", inputs.draft, (None, steps, None), device).shape[2]
    if draft_vocab > vocab:
        raise ValueError(f"draft_logits: expected at most the target's {vocab} columns, got {draft_vocab}")
    return inputs._replace(target=target[:, :draft_vocab]) if draft_vocab < vocab else inputs


def _explain(inputs: _Inputs, steps: int, error: InvalidInputError) -> None:
    """Raise a ValueError in the engine's terms if rows or slots are what a CPU found out of range."""
    rows, num_logits = inputs.bounds.diff(), inputs.target.shape[0]
    outside = int(inputs.bounds[0]) != 0 or int(inputs.bounds[-1]) > num_logits
    if outside or bool(((rows < 1) | (rows > steps + 1)).any()):
        raise ValueError(
            f"cu_num_logits: expected 1..{steps + 1} rows a request, from 0 to at most {num_logits}, got "
            f"{inputs.bounds.tolist()}"
        ) from error
    slots = min(tensor.shape[0] for tensor in (inputs.temperature, inputs.seed, inputs.draft) if tensor is not None)
    if bool(((inputs.slot < 0) | (inputs.slot >= slots)).any()):
        raise ValueError(f"idx_mapping: expected slots in 0..{slots - 1}, got {inputs.slot.tolist()}") from error
