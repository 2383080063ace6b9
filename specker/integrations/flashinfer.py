"""FlashInfer's chain verify function, under its signature; nothing of FlashInfer is imported."""

from __future__ import annotations

import torch

from specker import checks
from specker.integrations.rounds import verify_into

_SEEDS = (-(1 << 63), (1 << 63) - 1)
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
        result.token_ids.int(), (accept_uniforms < result.accept_probs).sum(-1), result.num_accepted

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
        generator: the generator that a seed a sequence is drawn from when seed and offset are None; None is torch's
            default.
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
    target = checks.check_rows("target_probs", target_probs, (None, None, None), None)
    batch, rows, vocab = target.shape
    if rows == 0:
        raise ValueError(f"target_probs: expected gamma + 1 >= 1 rows a sequence, got shape {tuple(target.shape)}")
    device = target.device
    checks.check_rows("draft_probs", draft_probs, (batch, rows - 1, vocab), device)
    checks.check_index("draft_token_ids", draft_token_ids, (batch, rows - 1), device)
    accepted, emitted = maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num
    if accepted is not None:
        checks.check_index("maybe_output_accepted_token_num", accepted, (batch,), device)
    if emitted is not None:
        checks.check_index("maybe_output_emitted_draft_token_num", emitted, (batch,), device)
    if output_status is not None:
        checks.check_tensor("output_status", output_status, (batch,), (torch.int32,), device)
    if seed is None and offset is None:
        seeds = torch.randint(*_SEEDS, (batch,), device=device, generator=generator)
        positions = None
    else:
        seeds, positions = _streams(seed, offset, batch, device)
    token_ids = torch.empty((batch, rows), dtype=torch.int32, device=device)
    accepted = torch.zeros(batch, dtype=torch.int32, device=device) if accepted is None else accepted
    emitted = torch.zeros(batch, dtype=torch.int32, device=device) if emitted is None else emitted
    verify_into(
        token_ids, draft_token_ids, target, draft_probs, rows - 1, seed=seeds, position=positions,
        target_is_probs=True, draft_is_probs=True, passed_total=accepted, accepted_total=emitted,
        status_total=output_status,
    )  # fmt: skip
    return token_ids, accepted, emitted


def _streams(seed: Numbers, offset: Numbers, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a seed for every sequence, and a position for every one or for all."""
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor):
        seeds, positions = _per_sequence("seed", seed, batch, device), _per_sequence("offset", offset, batch, device)
        if seeds.shape[0] != batch:
            seeds = seeds + torch.arange(batch, device=device)
        return seeds, positions
    if seed is None or offset is None or isinstance(seed, torch.Tensor) or isinstance(offset, torch.Tensor):
        raise ValueError(
            "seed and offset: expected both as tensors, both as ints or neither, "
            f"got {type(seed).__name__} and {type(offset).__name__}"
        )
    return checks.seed_tensor(seed, batch, device), checks.position_tensor(offset, batch, device)


def _per_sequence(name: str, value: torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    if value.dtype not in _SEED_DTYPES:
        raise ValueError(f"{name}: expected dtype int64 or uint64, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() != 1 or value.shape[0] not in (1, batch):
        raise ValueError(f"{name}: expected shape (1,) or ({batch},), got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected device {device}, that of the target, got {value.device}")
    return value if value.dtype == torch.int64 else value.view(torch.int64)
