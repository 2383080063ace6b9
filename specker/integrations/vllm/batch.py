"""`rejection_sample` of vLLM's first runner: rows of all requests behind one another, bonus tokens drawn elsewhere.

The target rows come without bonus rows, so no view of them has the shape of a round. Each position is verified as a
round of its own, one draft token whose bonus row is the row it has (a view with stride 0, its token is thrown away),
and the rounds of a request are strung together: the random numbers and the tokens are those of one long round.

Where all lengths are equal and rows are long, all requests but the last are one padded round in which the first row of
the next request stands for the bonus row, so that nothing behind a rejection is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from specker import checks
from specker.integrations.vllm.arguments import bonus_column, check_lengths, refuse_other_rules
from specker.sampling import GREEDY_TEMPERATURE
from specker.status import Status
from specker.verify import verify

PLACEHOLDER_TOKEN_ID = -1
"""vLLM's name for what stands behind the tokens of a request."""
_REALS = (torch.float32, torch.float64)
_SEEDS = (-(1 << 63), (1 << 63) - 1)
_WORTH_A_CALL = 1 << 20
"""Entries of the target rows from which a second call costs less than rows behind a rejection (on a CPU)."""


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
        no vocabulary-sized tensor is copied or allocated. Rows behind a rejection are read too where lengths differ.

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
    bonus = bonus_column(bonus_token_ids, batch, device)
    if draft_probs is not None:
        checks.check_rows("draft_probs", draft_probs, target.shape, device)
    if output_status is not None:
        checks.check_tensor("output_status", output_status, (batch,), (torch.int32,), device)
    if total == 0:
        return torch.nn.functional.pad(bonus.int(), (0, max_spec_len), value=-1)
    rows, law = _Rows(draft_token_ids, target, draft_probs), _law(sampling_metadata, num_draft_tokens, batch, device)
    places = _places(cu_num_draft_tokens, batch, max_spec_len, total)
    if places.length is None and batch > 1 and target.numel() >= _WORTH_A_CALL:
        emitted = _overlapping(rows, places, law, bonus, output_status is not None)
    else:
        emitted = _one_by_one(rows, places, law, bonus, output_status is not None)
    if output_status is not None and emitted.status is not None:
        output_status |= emitted.status
    return emitted.token_ids.int()


class _Rows(NamedTuple):
    """The rows of all requests."""

    draft_token_ids: torch.Tensor
    target: torch.Tensor
    draft_probs: torch.Tensor | None

    def part(self, start: int, stop: int) -> _Rows:
        """Return some of the rows."""
        draft = None if self.draft_probs is None else self.draft_probs[start:stop]
        return _Rows(self.draft_token_ids[start:stop], self.target[start:stop], draft)


class _Law(NamedTuple):
    """Temperature (0 or 1: the rows are tempered already) and seed of every request, or of all."""

    temperature: float | torch.Tensor
    seed: int | torch.Tensor | None

    def part(self, start: int, stop: int) -> _Law:
        """Return those of some of the requests."""
        temperature, seed = self
        return _Law(
            temperature[start:stop] if isinstance(temperature, torch.Tensor) else temperature,
            seed[start:stop] if isinstance(seed, torch.Tensor) else seed,
        )


class _Emitted(NamedTuple):
    """Tokens, and the status where it was asked for, of every request."""

    token_ids: torch.Tensor
    status: torch.Tensor | None


class _Places(NamedTuple):
    """Where each row stands in its request; the tensors are None where all lengths are `width`."""

    batch: int
    width: int
    device: torch.device
    sequence: torch.Tensor | None = None
    step: torch.Tensor | None = None
    length: torch.Tensor | None = None

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return `(total,)` values from one a request."""
        if self.sequence is None:
            return values.unsqueeze(1).expand(self.batch, self.width).reshape(-1)
        return values[self.sequence]

    def steps(self) -> torch.Tensor:
        """Return the index of every row in its request."""
        if self.step is None:
            return torch.arange(self.width, device=self.device).repeat(self.batch)
        return self.step

    def table(self, values: torch.Tensor, padding: int) -> torch.Tensor:
        """Return `(batch, width)` values from one a row."""
        if self.sequence is None or self.step is None:
            return values.view(self.batch, self.width)
        padded = values.new_full((self.batch, self.width), padding)
        padded[self.sequence, self.step] = values
        return padded


def _places(cu_num_draft_tokens: torch.Tensor, batch: int, width: int, total: int) -> _Places:
    device = cu_num_draft_tokens.device
    # No length exceeds the width, so this many rows leave no room for a shorter one.
    if total == batch * width:
        return _Places(batch, width, device)
    rows = torch.arange(total, device=device)
    ends = cu_num_draft_tokens.long()
    # On a device nobody has looked at the totals: wrong ones mix requests up, but reach no memory of others.
    sequence = torch.searchsorted(ends, rows, right=True).clamp_(max=batch - 1)
    length = ends.diff(prepend=ends.new_zeros(1)).clamp_(0, width)
    step = (rows - (ends - length)[sequence]).clamp_(0, width - 1)
    return _Places(batch, width, device, sequence, step, length)


def _law(metadata: SamplingMetadata, num_draft_tokens: Sequence[int], batch: int, device: torch.device) -> _Law:
    if metadata.all_greedy:
        return _Law(0.0, 0)
    temperature: float | torch.Tensor = 1.0
    if not metadata.all_random:
        name = "sampling_metadata.temperature"
        given = checks.check_tensor(name, metadata.temperature, (batch,), _REALS, device)
        temperature = given.ge(GREEDY_TEMPERATURE).float()
    if not metadata.generators:
        return _Law(temperature, None)
    seeds = torch.randint(*_SEEDS, (batch,), device=device)
    for request, generator in metadata.generators.items():
        if num_draft_tokens[request]:
            seeds[request].random_(*_SEEDS, generator=generator)
    return _Law(temperature, seeds)


def _one_by_one(rows: _Rows, places: _Places, law: _Law, bonus: torch.Tensor, wants_status: bool) -> _Emitted:
    """Verify every row as a round of one draft token, and string the rounds of each request together."""
    temperature, seed = law
    result = verify(
        rows.draft_token_ids.unsqueeze(1),
        rows.target.unsqueeze(1).expand(-1, 2, -1),
        draft_probs=None if rows.draft_probs is None else rows.draft_probs.unsqueeze(1),
        temperature=places.spread(temperature) if isinstance(temperature, torch.Tensor) else temperature,
        seed=places.spread(seed) if isinstance(seed, torch.Tensor) else seed,
        position=places.steps() if isinstance(seed, torch.Tensor) else None,
    )
    kept = places.table(result.num_accepted, 0).cumprod(1)
    reached = torch.constant_pad_nd(kept, (1, 0), 1)
    tokens = torch.cat((places.table(result.token_ids.select(1, 0), PLACEHOLDER_TOKEN_ID), bonus), dim=1)
    if places.length is not None:
        tokens.scatter_(1, places.length.unsqueeze(1), bonus.to(tokens.dtype))
    status = None
    if wants_status:
        status = torch.zeros(places.batch, dtype=torch.int32, device=places.device)
        for column in (places.table(result.status, 0) * reached[:, :-1]).unbind(1):
            status |= column.int()
    return _Emitted(tokens.masked_fill_(reached == 0, PLACEHOLDER_TOKEN_ID), status)


def _overlapping(rows: _Rows, places: _Places, law: _Law, bonus: torch.Tensor, wants_status: bool) -> _Emitted:
    """Verify all requests but the last as one round, whose sequences share rows, and the last row by row."""
    head, width = places.batch - 1, places.width
    first = rows.part(0, head * width)
    temperature, seed = law.part(0, head)
    vocab, stride = rows.target.shape[1], rows.target.stride(0)
    result = verify(
        first.draft_token_ids.reshape(head, width),
        rows.target.as_strided((head, width + 1, vocab), (width * stride, stride, 1)),
        draft_probs=None if first.draft_probs is None else first.draft_probs.unflatten(0, (head, width)),
        temperature=temperature,
        seed=seed,
    )
    # What the next request's row says is no bonus token of this one, and no fault of it.
    complete = result.num_accepted == width
    result.token_ids[:, -1] = torch.where(complete, bonus[:-1, 0], result.token_ids[:, -1])
    status = torch.where(complete, result.status & ~int(Status.TARGET_INVALID), result.status)
    last = rows.part(head * width, places.batch * width)
    places = _Places(1, width, places.device)
    emitted = _one_by_one(last, places, law.part(head, head + 1), bonus[-1:], wants_status)
    return _Emitted(
        torch.cat((result.token_ids, emitted.token_ids)),
        None if emitted.status is None else torch.cat((status, emitted.status)),
    )
