"""Compiling the GPU kernels of a round ahead of the first one."""

from __future__ import annotations

from typing import Any

import torch

from specker.operators import backend
from specker.sample import DraftReceipt, sample
from specker.verify import verify

# Row statistics and emission; the residual where there are draft rows; candidates and thresholds of filters.
_PLAIN, _RESIDUAL, _FILTERED = 2, 1, 5


def num_variants(*, draft_rows: bool = True, filtered: bool = False) -> int:
    """Return how many kernels `warmup` compiles for one dtype and one set of flags, `sample` of draft tokens included.

    Batch, gamma, lengths and the values of all parameters change none of them.

    Example:
        >>> num_variants(), num_variants(filtered=True), num_variants(draft_rows=False)
        (5, 10, 2)
    """
    if not draft_rows:
        return _FILTERED if filtered else _PLAIN
    return 2 * _FILTERED if filtered else _PLAIN + _RESIDUAL + _PLAIN


def warmup(
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: torch.device | str = "cuda",
    draft_rows: bool = True,
    receipt: bool = False,
    filtered: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
    row_stride: int | None = None,
) -> int:
    """Compile what rounds of these rows and flags launch, so that the first of them does not wait for the compiler.

    Equivalent to one small `sample` and `verify` with them. A variant is compiled for dtypes and for which inputs
    exist; batch, gamma, lengths, strides below 2**31 and parameter values are data, so no later round compiles again.

    Args:
        vocab: vocabulary of the rows.
        dtype: dtype of target and draft rows.
        device: where they will lie; a CPU serves Triton's interpreter only.
        draft_rows: drafts come with rows; False is point masses.
        receipt: verify takes the receipts of `sample`.
        filtered: top-k, top-p or min-p is given as a tensor or as a number that is no identity. All three are warmed
            together; a call that gives fewer of them is a variant of its own.
        return_logprobs, return_accept_probs: the outputs that verify will be asked for.
        row_stride: distance of two rows in memory where it is not the vocabulary, as for padded ones. Whether rows
            start at multiples of 16 bytes is what counts.

    Returns:
        The number of compiled variants, `num_variants(...)`.

    Raises:
        ValueError: row_stride is below the vocabulary.
        BackendUnavailableError: there is neither a GPU nor the interpreter.

    Guarantees: allocates a few rows and frees them; draws no random number from torch's generators.

    Example:
        >>> num_variants(filtered=True)  # warmup(128_256, filtered=True) compiles as many on a GPU
        10
    """
    stride = vocab if row_stride is None else row_stride
    if stride < vocab:
        raise ValueError(f"row_stride: expected at least the vocabulary of {vocab}, got {row_stride}")
    with backend("triton"):
        rows = torch.zeros((1, 2, stride), dtype=dtype, device=device)[..., :vocab]
        filters: dict[str, Any] = {"top_k": 1, "top_p": 0.5, "min_p": 0.5} if filtered and vocab > 1 else {}
        seed = torch.zeros(1, dtype=torch.int64, device=device)
        draft = rows[:, :1] if draft_rows else None
        receipts = None
        if draft is not None:
            drawn = sample(rows[:, 0], seed=seed, **filters)
            receipts = DraftReceipt.stack([drawn.receipt]) if receipt else None
        verify(
            torch.zeros((1, 1), dtype=torch.int64, device=device),
            rows,
            draft,
            draft_receipt=receipts,
            seed=seed,
            return_logprobs=return_logprobs,
            return_accept_probs=return_accept_probs,
            **filters,
        )
    return num_variants(draft_rows=draft_rows, filtered=filtered)
