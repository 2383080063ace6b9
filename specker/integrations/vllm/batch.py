"""`rejection_sample` of vLLM's first runner: rows of all requests behind one another, bonus tokens drawn elsewhere.

The target rows come without bonus rows: a flat round, behind which the bonus tokens given are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from specker import checks
from specker.integrations.rounds import verify_into
from specker.integrations.vllm.arguments import bonus_tokens, check_lengths, refuse_other_rules

PLACEHOLDER_TOKEN_ID = -1
"""vLLM's name for what stands behind the tokens of a request."""
_REALS = (torch.float32, torch.float64)
_SEEDS = (-(1 << 63), (1 << 63) - 1)


class SamplingMetadata(Protocol):
    """The fields of vLLM's `SamplingMetadata` that the adapter reads."""

    temperature: torch.Tensor | None
    all_greedy: bool
    all_random: bool
    generators: Mapping[int, torch.Generator]


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: Sequence[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,  # noqa: ARG001 (every draw here has 53 bits)
    fly_window_size: int | None = None,
    fly_entropy_threshold: float | None = None,  # noqa: ARG001 (refused with fly_window_size)
    fly_entropy_top_k: int = 3,  # noqa: ARG001 (likewise)
    *,
    output_status: torch.Tensor | None = None,
) -> torch.Tensor:
    """Verify a batch as `vllm.v1.sample.rejection_sampler.rejection_sample` does.

    Equivalent to, for the rows of one request that samples::

        result = specker.verify(drafts, rows_and_bonus_row, draft_probs=draft_rows, temperature=1.0)

    with the token in `bonus_token_ids` in place of the bonus token.

    Args:
        draft_token_ids: `(total,)` int32 or int64; -1 is a placeholder that is always rejected.
        num_draft_tokens: the length of every request, 0..max_spec_len, on the host.
        max_spec_len: fixes the width of the result.
        cu_num_draft_tokens: `(batch,)` int32 or int64 running totals of the lengths, without a leading 0.
        draft_probs: `(total, vocab)` probabilities that the draft tokens were drawn from; None: n-gram lookup and
            arg-max drafts.
        target_logits: `(total, vocab)` float32, bfloat16 or float16, processed: vLLM has applied temperature and
            filters to them.
        bonus_token_ids: `(batch, 1)` or `(batch,)`, for the requests that keep all their drafts.
        sampling_metadata: vLLM's; read are temperature (below 1e-5 is greedy), all_greedy, all_random and generators.
            A request with a generator and drafts takes one 64-bit seed from it; the others get seeds from torch's
            default generator.
        synthetic_mode, synthetic_conditional_rates, fly_window_size, fly_entropy_threshold, fly_entropy_top_k: other
            acceptance rules, refused.
        use_fp64_gumbel: of no effect: every draw has 53 bits.
        output_status: `(batch,)` int32, into which the bits of `specker.Status` are or-ed. vLLM has no such argument.

    Returns:
        `(batch, max_spec_len + 1)` int32: kept drafts, a recovered or bonus token, -1 behind it. A target row that
        holds NaN emits nothing: -1 stands there and behind it.

    Raises:
        TypeError, ValueError: an argument has the wrong rank, shape, dtype or device.
        NotImplementedError: a rule that gives up the target's distribution was asked for.

    Guarantees: a request's tokens depend on its own rows and its own generator alone, wherever it stands in the batch;
        no vocabulary-sized tensor is copied or allocated; rows behind a rejection decide nothing, and a CPU does not
        read them.

    Source: Leviathan et al. 2023, algorithm 1; `vllm/v1/sample/rejection_sampler.py` of vLLM 0.33.0.

    Example:
        >>> from types import SimpleNamespace
        >>> greedy = SimpleNamespace(temperature=None, all_greedy=True, all_random=False, generators={})
        >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
        >>> rejection_sample(
        ...     torch.tensor([1, 1]), [1, 1], 1, torch.tensor([1, 2]), None, logits, torch.tensor([[7], [8]]), greedy
        ... )
        tensor([[ 1,  7],
                [ 0, -1]], dtype=torch.int32)
    """
    refuse_other_rules(
        synthetic_mode=synthetic_mode,
        synthetic_conditional_rates=synthetic_conditional_rates,
        fly_window_size=fly_window_size,
    )
    target = checks.check_rows("target_logits", target_logits, (None, None), None)
    device, total, batch = target.device, target.shape[0], len(num_draft_tokens)
    checks.check_index("draft_token_ids", draft_token_ids, (total,), device)
    checks.check_index("cu_num_draft_tokens", cu_num_draft_tokens, (batch,), device)
    check_lengths(num_draft_tokens, cu_num_draft_tokens, max_spec_len, total)
    bonus = bonus_tokens(bonus_token_ids, batch, device)
    if draft_probs is not None:
        checks.check_rows("draft_probs", draft_probs, target.shape, device)
    if output_status is not None:
        checks.check_tensor("output_status", output_status, (batch,), (torch.int32,), device)
    temperature, seeds = _law(sampling_metadata, num_draft_tokens, batch, device)
    zero = checks.scalar_tensor(0, cu_num_draft_tokens.dtype, device)
    token_ids = torch.empty((batch, max_spec_len + 1), dtype=torch.int32, device=device)
    verify_into(
        token_ids, draft_token_ids, target, draft_probs, max_spec_len,
        cu_num_draft_tokens=torch.cat((zero, cu_num_draft_tokens)), temperature=temperature, seed=seeds,
        draft_is_probs=True, bonus_token_ids=bonus, padding=PLACEHOLDER_TOKEN_ID, status_total=output_status,
    )  # fmt: skip
    return token_ids


def _law(
    metadata: SamplingMetadata, num_draft_tokens: Sequence[int], batch: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return temperatures, None where all requests sample, and seeds."""
    if metadata.all_greedy:
        return checks.scalar_tensor(0.0, torch.float64, device), checks.scalar_tensor(0, torch.int64, device)
    temperature = None
    if not metadata.all_random:
        name = "sampling_metadata.temperature"
        temperature = checks.check_tensor(name, metadata.temperature, (batch,), _REALS, device)
    seeds = torch.randint(*_SEEDS, (batch,), device=device)
    for request, generator in metadata.generators.items():
        if num_draft_tokens[request]:
            seeds[request].random_(*_SEEDS, generator=generator)
    return temperature, seeds
