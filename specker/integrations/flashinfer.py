"""FlashInfer's chain verify function, under its signature; nothing of FlashInfer is imported."""

from __future__ import annotations

from typing import cast

import torch

from specker import checks
from specker.verify import verify_from_probs

_COUNTER_DTYPES = (torch.int32, torch.int64)
_SEED_DTYPES = (torch.int64, torch.uint64)
Numbers = int | torch.Tensor | None


def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,  # noqa: ARG001 (every result is)
    generator: torch.Generator | None = None,
    seed: Numbers = None,
    offset: Numbers = None,
    *,
    output_status: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify chains of draft tokens as `flashinfer.sampling.chain_speculative_sampling` does.

    Equivalent to::

        result = specker.verify_from_probs(draft_token_ids, target_probs, draft_probs)
        result.token_ids.int(), (uniforms[..., 0] < accept_probs).sum(-1), result.num_accepted

    Args:
        draft_probs: `(batch, gamma, vocab)` float32, bfloat16 or float16, read where it lies (any strides with a
            contiguous last axis); FlashInfer copies all but contiguous float32.
        draft_token_ids: `(batch, gamma)` int32 or int64.
        target_probs: `(batch, gamma + 1, vocab)`, as draft_probs.
        maybe_output_accepted_token_num: `(batch,)` int32 or int64, to which the number of tokens is added that would
            be accepted if each were judged by itself, also behind the first rejection.
        maybe_output_emitted_draft_token_num: `(batch,)` int32 or int64, to which the number of draft tokens kept is
            added.
        deterministic: of no effect, every result is.
        generator: the generator that uniforms are drawn from when seed and offset are None; None is torch's default.
        seed: with offset, the random stream: an int or `(1,)` tensor s stands for s + row (the one place where a row
            number matters), a `(batch,)` int64 or uint64 tensor for one stream a sequence, wherever it stands.
        offset: the index in the stream of the first draft token, likewise (the same for all from an int or `(1,)`
            tensor). A call uses gamma + 1 indices: advance it by at least that much.
        output_status: `(batch,)` int32, into which the bits of `specker.Status` are or-ed. FlashInfer has no such
            argument.

    Returns:
        token ids `(batch, gamma + 1)` int32 padded with -1 behind the recovered or bonus token, and the two counters:
        those given, or new int32 ones.

    Raises:
        TypeError, ValueError: as `specker.verify_from_probs`; and as FlashInfer documents, seed and offset that do not
            go together, or tensors of them with another device, dtype or shape.

    Guarantees: those of `specker.verify_from_probs`: no -1 before the end, nothing vocabulary-sized allocated, nothing
        emitted from a target row that holds NaN.

    Source: Chen et al. 2023, algorithm 2; `flashinfer/sampling.py` of FlashInfer 0.7.4.

    Example:
        >>> draft_probs = torch.tensor([[[0.0, 1.0]]])
        >>> target_probs = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> chain_speculative_sampling(draft_probs, torch.tensor([[1]]), target_probs)[0]
        tensor([[1, 0]], dtype=torch.int32)
    """
    target = target_probs
    if not isinstance(target, torch.Tensor) or target.dim() != 3:
        checks.check_rows("target_probs", target, (None, None, None), None)
    batch, rows, _ = target.shape
    device = target.device
    for name, counter in (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    ):
        if counter is not None:
            checks.check_tensor(name, counter, (batch,), _COUNTER_DTYPES, device)
    if output_status is not None:
        checks.check_tensor("output_status", output_status, (batch,), (torch.int32,), device)
    if seed is None and offset is None:
        uniforms = torch.rand((batch, rows, 2), dtype=torch.float64, device=device, generator=generator)
        result = verify_from_probs(draft_token_ids, target, draft_probs, uniforms=uniforms, return_accept_probs=True)
        passed = uniforms.select(2, 0).narrow(1, 0, rows - 1).lt(cast(torch.Tensor, result.accept_probs))
    else:
        seeds, positions = _streams(seed, offset, batch, device)
        result = verify_from_probs(
            draft_token_ids, target, draft_probs, seed=seeds, position=positions, return_accept_probs=True
        )
        passed = _passed(cast(torch.Tensor, result.accept_probs), seeds, positions)
    kept = result.num_accepted.int()
    # Accept probabilities are float32: rounding must not take back a token that was kept.
    accepted = torch.maximum(passed.sum(1, dtype=torch.int32), kept)
    if output_status is not None:
        output_status |= result.status
    return (
        result.token_ids.int(),
        accepted if maybe_output_accepted_token_num is None else maybe_output_accepted_token_num.add_(accepted),
        kept if maybe_output_emitted_draft_token_num is None else maybe_output_emitted_draft_token_num.add_(kept),
    )


def _streams(seed: Numbers, offset: Numbers, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a seed and a position for every sequence."""
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor):
        seeds, positions = _per_sequence("seed", seed, batch, device), _per_sequence("offset", offset, batch, device)
        if seeds.shape[0] != batch:
            seeds = seeds + torch.arange(batch, device=device)
        return seeds, positions.expand(batch)
    if seed is None or offset is None or isinstance(seed, torch.Tensor) or isinstance(offset, torch.Tensor):
        raise ValueError(
            "seed and offset: expected both as tensors, both as ints or neither, "
            f"got {type(seed).__name__} and {type(offset).__name__}"
        )
    return checks.seed_tensor(seed, batch, device), checks.position_tensor(offset, batch, device).expand(batch)


def _per_sequence(name: str, value: torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    if value.dtype not in _SEED_DTYPES:
        raise ValueError(f"{name}: expected dtype int64 or uint64, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() != 1 or value.shape[0] not in (1, batch):
        raise ValueError(f"{name}: expected shape (1) or ({batch}), got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, that of the target, got {value.device}")
    return value.view(torch.int64)


def _passed(accept_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return whether each draft token passes its own test, `(batch, gamma)`, under the round's random numbers.

    One two-token round a position stands for the test: its target gives token 0 the accept probability.
    """
    batch, gamma = accept_probs.shape
    chances = accept_probs.nan_to_num(nan=0.0).reshape(-1)
    rows = torch.stack((chances, 1 - chances), dim=-1).unsqueeze(1).expand(-1, 2, 2)
    indices = torch.arange(gamma, device=seeds.device)
    tests = verify_from_probs(
        torch.zeros((batch * gamma, 1), dtype=torch.int32, device=seeds.device),
        rows,
        seed=seeds.unsqueeze(1).expand(batch, gamma).reshape(-1),
        position=(positions.unsqueeze(1) + indices).reshape(-1),
    )
    return tests.num_accepted.reshape(batch, gamma) > 0
