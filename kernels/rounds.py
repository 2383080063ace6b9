"""The launches of one round, shared by `verify` and `sample`.

Launches: row statistics; filter thresholds where a filter is given; residual masses where there are draft rows or
filters; emission. So 2 for point-mass drafts and `sample`, 3 with draft rows, one more (and for point masses two) with
filters, whatever the batch, gamma and the parameters mixed in it. Nothing waits for the device, and every allocation
is a plain `torch.empty` of a size known to the host, so a CUDA graph can capture a round.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from . import contract
from .emit import emit_tokens
from .filters import filter_thresholds
from .residual import residual_mass
from .statistics import row_statistics

# Stated for every launch: the compiler's default differs between releases, and answers must not.
LAUNCH = {"num_warps": contract.STREAM_WARPS, "enable_fp_fusion": False}


class Parameters(NamedTuple):
    """Sampling parameters of target or draft rows: tensors of `batch` or one element, or None."""

    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None

    @property
    def filtered(self) -> bool:
        """Whether a filter may be on."""
        return any(filter_parameter is not None for filter_parameter in self[1:])


class Inputs(NamedTuple):
    """What a round reads; None where an input does not exist."""

    draft_token_ids: torch.Tensor
    target: torch.Tensor
    draft: torch.Tensor | None
    receipt: torch.Tensor | None
    lengths: torch.Tensor | None
    draft_index: torch.Tensor | None
    parameters: Parameters
    draft_parameters: Parameters
    seed: torch.Tensor | None
    position: torch.Tensor | None
    uniforms: torch.Tensor | None
    batch: int
    gamma: int
    flat: bool
    purpose: int
    target_is_probs: bool
    draft_is_probs: bool


class Outputs(NamedTuple):
    """What a round writes; None is not wanted."""

    token_ids: torch.Tensor
    num_accepted: torch.Tensor | None
    num_emitted: torch.Tensor | None
    status: torch.Tensor
    logprobs: torch.Tensor | None
    accept_probs: torch.Tensor | None
    expected_accepted: torch.Tensor | None
    receipt: torch.Tensor | None


def run_round(inputs: Inputs, outputs: Outputs) -> None:
    """Launch the kernels of one round on the device of the target rows."""
    if inputs.batch == 0:
        return
    target, draft, gamma = inputs.target, inputs.draft, inputs.gamma
    vocab = target.shape[-1]
    streams_draft = draft is not None and inputs.receipt is None
    rows = gamma + 1 + (gamma if streams_draft else 0)
    shards = contract.num_shards(vocab)
    filtered = inputs.parameters.filtered or (streams_draft and inputs.draft_parameters.filtered)
    reduced = filtered or (draft is not None and gamma > 0)

    def scratch(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=target.device)

    statistics = (
        scratch(inputs.batch, rows, shards, dtype=torch.float32),
        scratch(inputs.batch, rows, shards),
        scratch(inputs.batch, rows, shards, dtype=torch.int32),
    )
    thresholds = (
        (scratch(inputs.batch, rows), scratch(inputs.batch, rows)) if filtered else (None, None)
    )
    masses = (
        scratch(inputs.batch, shards) if reduced else None,
        scratch(inputs.batch, shards) if filtered else None,
    )
    records = scratch(inputs.batch, gamma + 1, contract.POSITION_FIELDS.value)
    integers = scratch(inputs.batch, contract.SEQUENCE_FIELDS.value, dtype=torch.int64)
    temperatures = scratch(inputs.batch, 2)
    rows_read = (target, _row_strides(target, inputs.flat)[1], draft, _row_strides(draft, inputs.flat)[1])
    sizes = (gamma, vocab, shards, rows)
    flags = {"TARGET_IS_PROBS": inputs.target_is_probs, "DRAFT_IS_PROBS": inputs.draft_is_probs}
    blocks = {"SHARD": contract.shard_size(vocab), "ALIGNED": _aligned(target, draft)}
    merge = {"BLOCK_SHARDS": contract.power_of_two(shards), "BLOCK_POSITIONS": contract.BLOCK_POSITIONS}
    bins = {
        "ALIGNED": blocks["ALIGNED"],
        "BLOCK_VOCAB": min(contract.shard_size(vocab), contract.MAX_FILTER_BLOCK),
        "NUM_BINS": contract.NUM_BINS,
        "MAX_CANDIDATES": contract.MAX_CANDIDATES,
        "FITS": vocab <= contract.MAX_CANDIDATES,
        "SHARED": draft is not None
        and draft.dtype == target.dtype
        and inputs.draft_is_probs == inputs.target_is_probs,
    }

    with _on_device(target):
        per_program = contract.shards_per_program(inputs.batch * rows, shards)
        row_statistics[(inputs.batch * rows, -(-shards // per_program))](
            *statistics, integers, temperatures, records, *_arguments(inputs),
            gamma, inputs.draft_token_ids.numel(), vocab, shards, rows, 0 if draft is None else draft.shape[0],
            per_program,
            FLAT=inputs.flat, PURPOSE=inputs.purpose, BLOCK_POSITIONS=contract.BLOCK_POSITIONS,
            **flags, **blocks, **LAUNCH,
        )  # fmt: skip
        if filtered:
            programs = min(inputs.batch * rows, contract.MAX_FILTER_PROGRAMS)
            filter_thresholds[(programs,)](
                *thresholds, scratch(programs, contract.NUM_BINS, dtype=torch.int32),
                scratch(programs, contract.NUM_BINS, dtype=torch.int64),
                scratch(programs, contract.MAX_CANDIDATES, dtype=torch.float32),
                *statistics, integers, temperatures, *rows_read, *_spread(*inputs.parameters[1:]),
                *_spread(*inputs.draft_parameters[1:]), *sizes, inputs.batch * rows,
                **flags, **bins, BLOCK_SHARDS=merge["BLOCK_SHARDS"], **LAUNCH,
            )  # fmt: skip
        has_receipt = inputs.receipt is not None
        if reduced:
            per_program = contract.shards_per_program(inputs.batch, shards)
            residual_mass[(inputs.batch, -(-shards // per_program))](
                *masses, *statistics, *thresholds, records, integers, temperatures, *rows_read, *sizes, per_program,
                HAS_RECEIPT=has_receipt, **flags, **blocks, **merge, **LAUNCH,
            )  # fmt: skip
        emit_tokens[(inputs.batch,)](
            *outputs, *masses, *statistics, *thresholds, records, integers, temperatures, *rows_read, *sizes,
            HAS_RECEIPT=has_receipt, **flags, **blocks, **merge, **LAUNCH,
        )  # fmt: skip


def _arguments(inputs: Inputs) -> tuple[Any, ...]:
    """Return the inputs of the first kernel, each followed by its strides."""
    target, draft = inputs.parameters, inputs.draft_parameters
    return (
        inputs.draft_token_ids, *_row_strides(inputs.draft_token_ids, inputs.flat),
        inputs.target, *_row_strides(inputs.target, inputs.flat),
        inputs.draft, *_row_strides(inputs.draft, inputs.flat),
        inputs.receipt, *_row_strides(inputs.receipt, inputs.flat), _stride(inputs.receipt, -1),
        inputs.lengths, _stride(inputs.lengths, 0),
        inputs.draft_index, _stride(inputs.draft_index, 0),
        *_spread(target.temperature, target.top_p, target.min_p),
        *_spread(draft.temperature, draft.top_p, draft.min_p),
        *_spread(inputs.seed, inputs.position),
        inputs.uniforms, *_row_strides(inputs.uniforms, inputs.flat), _stride(inputs.uniforms, -1),
    )  # fmt: skip


def _stride(tensor: torch.Tensor | None, axis: int) -> int:
    """Return a stride; 0 along an axis of one element, where any value is right and 0 keeps the alignment."""
    return 0 if tensor is None or tensor.shape[axis] == 1 else tensor.stride(axis)


def _row_strides(tensor: torch.Tensor | None, flat: bool) -> tuple[int, int]:
    """Return the strides between sequences and between rows; in the flat form rows alone count."""
    if tensor is None:
        return 0, 0
    return (0, _stride(tensor, 0)) if flat else (_stride(tensor, 0), _stride(tensor, 1))


def _spread(*parameters: torch.Tensor | None) -> tuple[Any, ...]:
    """Return parameters, each followed by its stride; one element serves the whole batch by stride 0."""
    return tuple(value for parameter in parameters for value in (parameter, _stride(parameter, 0)))


def _aligned(*tensors: torch.Tensor | None) -> bool:
    """Return whether every row starts at a multiple of 16 bytes, which 128-bit loads need."""
    return all(
        tensor.data_ptr() % 16 == 0
        and all(_stride(tensor, axis) * tensor.element_size() % 16 == 0 for axis in range(tensor.dim() - 1))
        for tensor in tensors
        if tensor is not None
    )


def _on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    # Triton launches on the current device, which need not be the one that holds the tensors.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
