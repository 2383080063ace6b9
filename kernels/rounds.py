"""The launches of one round, shared by `verify` and `sample`.

Launches: row statistics; filter candidates and thresholds where a filter is given; residual masses where there are
draft rows or filters; emission. So 2 for point-mass drafts and `sample`, 3 with draft rows, 5 with filters, whatever
the batch, gamma and the parameters mixed in it. Nothing waits for the device, and every allocation
is a plain `torch.empty` of a size known to the host, so a CUDA graph can capture a round.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch

from . import contract
from .blocks import constant_names
from .candidates import filter_candidates
from .emit import emit_tokens
from .filters import filter_thresholds
from .residual import residual_mass
from .statistics import row_statistics

# Stated for every launch: the compiler's default differs between releases, and answers must not.
LAUNCH = {"num_warps": contract.NUM_WARPS, "enable_fp_fusion": False}
WIDE_LAUNCH = LAUNCH | {"num_warps": contract.WIDE_WARPS}
KERNELS = (row_statistics, filter_candidates, filter_thresholds, residual_mass, emit_tokens)
CONSTANTS = {kernel.__name__: constant_names(kernel) for kernel in KERNELS}
OPTIONS = dict.fromkeys(CONSTANTS, LAUNCH) | dict.fromkeys(("filter_thresholds", "emit_tokens"), WIDE_LAUNCH)


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
    adjustment: tuple[torch.Tensor | None, ...]
    draft_adjustment: tuple[torch.Tensor | None, ...]
    columns: tuple[torch.Tensor | None, torch.Tensor | None]
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


class Buffers(NamedTuple):
    """What the kernels of a round hand on to one another; nothing grows with the vocabulary but by its shards."""

    residual_mass: torch.Tensor | None
    kept_mass: torch.Tensor | None
    shard_max: torch.Tensor
    shard_sum: torch.Tensor
    shard_argmax: torch.Tensor
    row_threshold: torch.Tensor | None
    row_sum: torch.Tensor | None
    candidate_counts: torch.Tensor | None
    candidates: torch.Tensor | None
    row_limits: torch.Tensor | None
    records: torch.Tensor
    integers: torch.Tensor
    temperatures: torch.Tensor


def run_round(inputs: Inputs, outputs: Outputs) -> None:
    """Launch the kernels of one round on the device of the target rows."""
    if inputs.batch == 0:
        return
    target, draft, gamma = inputs.target, inputs.draft, inputs.gamma
    vocab = target.shape[-1]
    shards = contract.num_shards(_widest(inputs), vocab)
    streams_draft = draft is not None and inputs.receipt is None
    filtered = inputs.parameters.filtered or (streams_draft and inputs.draft_parameters.filtered)
    reduced = filtered or (draft is not None and gamma > 0)
    rows = gamma + 1 + (gamma if streams_draft else 0)
    buffers = _allocate(inputs, rows, shards, filtered, reduced)
    streams = (target, _row_strides(target, inputs.flat)[1], draft, _draft_strides(inputs)[1])
    sizes = (gamma, vocab, shards, rows)
    constants = _constants(inputs, filtered)
    adjustments = _adjustments(inputs)
    masses = (buffers.residual_mass, buffers.kept_mass)
    statistics = (buffers.shard_max, buffers.shard_sum, buffers.shard_argmax)
    limits = (buffers.row_threshold, buffers.row_sum)
    sequences = (buffers.integers, buffers.temperatures)
    with _on_device(target):
        turns = contract.shards_per_program(inputs.batch * rows, shards)
        _launch(
            row_statistics, (inputs.batch * rows, -(-shards // turns)), constants,
            *statistics, buffers.candidate_counts, *sequences, buffers.records, *_arguments(inputs), *adjustments,
            gamma, inputs.draft_token_ids.numel(), vocab, shards, rows, 0 if draft is None else draft.shape[0],
            _bonus_rows(inputs), turns,
        )  # fmt: skip
        if filtered:
            lists = (buffers.candidate_counts, buffers.candidates, buffers.row_limits)
            filters = (*_spread(*inputs.parameters[1:]), *_spread(*inputs.draft_parameters[1:]))
            _launch(
                filter_candidates, (inputs.batch * rows, -(-shards // turns)), constants,
                *lists, buffers.shard_max, *sequences, *streams, *filters, *adjustments, *sizes, turns,
            )  # fmt: skip
            _launch(
                filter_thresholds, (inputs.batch * rows,), constants, *limits, *lists, *statistics[:2],
                buffers.integers, *streams, *adjustments, *sizes,
            )  # fmt: skip
        if reduced:
            turns = contract.shards_per_program(inputs.batch, shards)
            _launch(
                residual_mass, (inputs.batch, -(-shards // turns)), constants, *masses, *statistics, *limits,
                buffers.records, *sequences, *streams, *adjustments, *inputs.columns, *sizes, turns,
            )  # fmt: skip
        _launch(
            emit_tokens, (inputs.batch,), constants, *outputs, *masses, *statistics, *limits,
            buffers.records, *sequences, *streams, *adjustments, *inputs.columns, *sizes,
        )  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, ...], constants: dict[str, int | bool], *arguments: Any) -> None:
    name = kernel.__name__
    kernel[grid](*arguments, **{constant: constants[constant] for constant in CONSTANTS[name]}, **OPTIONS[name])


def _allocate(inputs: Inputs, rows: int, shards: int, filtered: bool, reduced: bool) -> Buffers:
    batch, device = inputs.batch, inputs.target.device

    def scratch(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Buffers(
        residual_mass=scratch(batch, shards) if reduced else None,
        kept_mass=scratch(batch, shards) if filtered else None,
        shard_max=scratch(batch, rows, shards, dtype=torch.float32),
        shard_sum=scratch(batch, rows, shards),
        shard_argmax=scratch(batch, rows, shards, dtype=torch.int32),
        row_threshold=scratch(batch, rows) if filtered else None,
        row_sum=scratch(batch, rows) if filtered else None,
        candidate_counts=scratch(batch, rows, dtype=torch.int32) if filtered else None,
        candidates=scratch(batch, rows, contract.MAX_CANDIDATES, dtype=torch.float32) if filtered else None,
        row_limits=scratch(batch, rows, contract.LIMIT_FIELDS.value) if filtered else None,
        records=scratch(batch, inputs.gamma + 1, contract.POSITION_FIELDS.value),
        integers=scratch(batch, contract.SEQUENCE_FIELDS.value, dtype=torch.int64),
        temperatures=scratch(batch, 2),
    )


def _constants(inputs: Inputs, filtered: bool) -> dict[str, int | bool]:
    target, draft = inputs.target, inputs.draft
    same_dtype = draft is not None and draft.dtype == target.dtype
    # What is filtered by the same code has to be loaded by the same code.
    adjusted = any(tensor is not None for tensor in (*inputs.adjustment, *inputs.draft_adjustment, *inputs.columns))
    return contract.constants(
        target.shape[-1],
        _widest(inputs),
        flat=inputs.flat,
        aligned=_aligned(target, draft),
        has_receipt=inputs.receipt is not None,
        target_is_probs=inputs.target_is_probs,
        draft_is_probs=inputs.draft_is_probs,
        same_rows=not adjusted and same_dtype and inputs.draft_is_probs == inputs.target_is_probs,
        excludes=draft is None and inputs.gamma > 0 and not filtered,
        purpose=inputs.purpose,
    )


def _arguments(inputs: Inputs) -> tuple[Any, ...]:
    """Return the inputs of the first kernel, each followed by its strides."""
    target, draft = inputs.parameters, inputs.draft_parameters
    return (
        inputs.draft_token_ids, *_row_strides(inputs.draft_token_ids, inputs.flat),
        inputs.target, *_row_strides(inputs.target, inputs.flat),
        inputs.draft, *_draft_strides(inputs),
        inputs.receipt, *_row_strides(inputs.receipt, inputs.flat), _stride(inputs.receipt, -1),
        inputs.lengths, _stride(inputs.lengths, 0),
        inputs.draft_index, _stride(inputs.draft_index, 0),
        *_spread(target.temperature, target.top_p, target.min_p),
        *_spread(draft.temperature, draft.top_p, draft.min_p),
        *_spread(inputs.seed, inputs.position),
        inputs.uniforms, *_row_strides(inputs.uniforms, inputs.flat), _stride(inputs.uniforms, -1),
    )  # fmt: skip


def _widest(inputs: Inputs) -> int:
    return max(inputs.target.shape[-1], 0 if inputs.draft is None else inputs.draft.shape[-1])


def _adjustments(inputs: Inputs) -> tuple[Any, ...]:
    """Return bias, mask and its strides of target and draft rows, and the draft's vocabulary."""
    operands: list[Any] = []
    for *bias, allowed in (inputs.adjustment, inputs.draft_adjustment):
        operands += [*bias, allowed, *_row_strides(allowed, flat=False)]
    return (*operands, 0 if inputs.draft is None else inputs.draft.shape[-1])


def _stride(tensor: torch.Tensor | None, axis: int) -> int:
    """Return a stride; 0 along an axis of one element, where any value is right and 0 keeps the alignment."""
    return 0 if tensor is None or tensor.shape[axis] == 1 else tensor.stride(axis)


def _row_strides(tensor: torch.Tensor | None, flat: bool) -> tuple[int, int]:
    """Return the strides between sequences and between rows; in the flat form rows alone count."""
    if tensor is None:
        return 0, 0
    return (0, _stride(tensor, 0)) if flat else (_stride(tensor, 0), _stride(tensor, 1))


def _draft_strides(inputs: Inputs) -> tuple[int, int]:
    """Return the strides of the draft rows; with an index they lie in slots, whatever the form."""
    return _row_strides(inputs.draft, inputs.flat and inputs.draft_index is None)


def _bonus_rows(inputs: Inputs) -> int:
    """Return the target rows behind the drafts of a sequence; a flat target may have one row a draft token."""
    return 0 if inputs.flat and inputs.target.shape[0] == inputs.draft_token_ids.shape[0] else 1


def _spread(*parameters: torch.Tensor | None) -> tuple[Any, ...]:
    """Return parameters, each followed by its stride; one element serves the whole batch by stride 0."""
    return tuple(value for parameter in parameters for value in (parameter, _stride(parameter, 0)))


def _aligned(*tensors: torch.Tensor | None) -> bool:
    """Return whether every row starts at a multiple of 16 bytes, so that it can be read by 128 bits as it lies.

    The stride of an axis of one element counts as well: a batch of one is to launch what a batch of two does.
    """
    return all(
        tensor.data_ptr() % 16 == 0
        and all(tensor.stride(axis) * tensor.element_size() % 16 == 0 for axis in range(tensor.dim() - 1))
        for tensor in tensors
        if tensor is not None
    )


def _on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    # Triton launches on the current device, which need not be the one that holds the tensors.
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
