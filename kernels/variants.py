"""What a round is compiled for, told without a GPU: signatures and compile-time arguments of the kernels.

No size, stride, length or pointer alignment is specialised, so one variant of a kernel serves every batch, gamma and
vocabulary of a size class; what differs is dtypes, which inputs exist, and the flags in `contract.constants`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from . import contract
from .rounds import CONSTANTS, KERNELS, OPTIONS

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# What changes rows as they are loaded.
ADJUSTMENTS = frozenset({
    "bias_offsets_ptr", "bias_ids_ptr", "bias_values_ptr", "allowed_ptr", "draft_bias_offsets_ptr",
    "draft_bias_ids_ptr", "draft_bias_values_ptr", "draft_allowed_ptr", "columns_ptr", "column_targets_ptr",
})  # fmt: skip
# What filters bring along.
FILTER_INPUTS = frozenset({
    "top_k_ptr", "top_p_ptr", "min_p_ptr", "draft_top_k_ptr", "draft_top_p_ptr", "draft_min_p_ptr", "kept_mass_ptr",
    "row_threshold_ptr", "row_sum_ptr", "candidate_counts_ptr",
})  # fmt: skip
# Inputs that a plain round does not have, under the names of the kernels' arguments.
PLAIN_ABSENT = ADJUSTMENTS | FILTER_INPUTS | frozenset({
    "receipt_ptr", "lengths_ptr", "draft_index_ptr", "uniforms_ptr", "logprobs_ptr", "accept_probs_ptr", "expected_ptr",
})  # fmt: skip
NOTHING_ABSENT: frozenset[str] = frozenset()
_POINTER_TYPES = {
    "i32": ("shard_argmax_ptr", "status_ptr", "candidate_counts_ptr", "allowed_ptr", "draft_allowed_ptr"),
    "i64": (
        "integers_ptr", "token_ids_ptr", "lengths_ptr", "draft_index_ptr", "top_k_ptr", "draft_top_k_ptr", "seed_ptr",
        "position_ptr", "num_accepted_ptr", "num_emitted_ptr", "bias_offsets_ptr", "bias_ids_ptr",
        "draft_bias_offsets_ptr", "draft_bias_ids_ptr", "columns_ptr", "column_targets_ptr",
    ),
    "fp32": ("shard_max_ptr", "candidates_ptr", "logprobs_ptr", "accept_probs_ptr", "expected_ptr", "bias_values_ptr",
        "draft_bias_values_ptr"),
    "fp64": (
        "temperatures_ptr", "records_ptr", "shard_sum_ptr", "limits_ptr", "row_threshold_ptr", "row_sum_ptr",
        "receipt_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "draft_temperature_ptr", "draft_top_p_ptr",
        "draft_min_p_ptr", "uniforms_ptr", "residual_mass_ptr", "kept_mass_ptr",
    ),
}  # fmt: skip
_TYPE_OF = {name: f"*{kind}" for kind, names in _POINTER_TYPES.items() for name in names}


class Variant(NamedTuple):
    """One kernel as it is launched for some inputs."""

    name: str
    function: Any
    signature: dict[str, str]
    """Argument -> Triton type, in the kernel's order."""
    constexprs: dict[str, Any]
    """Compile-time arguments; None is an input that does not exist."""
    options: dict[str, Any]


def variant(
    kernel: Any,
    vocab: int,
    target_dtype: torch.dtype,
    draft_dtype: torch.dtype | None,
    absent: Collection[str] = PLAIN_ABSENT,
    **flags: Any,
) -> Variant:
    """Return how a kernel is compiled for rows of these dtypes.

    Args:
        kernel: one of `rounds.KERNELS`.
        vocab: vocabulary; only its size class counts.
        target_dtype, draft_dtype: dtypes of the rows; draft None is a point mass.
        absent: arguments that are None.
        flags: arguments of `contract.constants` that differ from a plain round with 16-byte aligned rows.

    Example:
        >>> variant(KERNELS[3], 32000, torch.bfloat16, None).signature["target_logits_ptr"]
        '*bf16'
    """
    plain = {
        "flat": False, "aligned": True, "has_receipt": False, "target_is_probs": False, "draft_is_probs": False,
        "same_rows": draft_dtype == target_dtype, "purpose": contract.VERIFY_PURPOSE, "excludes": False,
    }  # fmt: skip
    values = contract.constants(vocab, vocab, **(plain | flags))
    types = _TYPE_OF | {"target_logits_ptr": f"*{DTYPE_NAMES[target_dtype]}"}
    missing = set(absent)
    if draft_dtype is None:
        missing.add("draft_logits_ptr")
    else:
        types["draft_logits_ptr"] = f"*{DTYPE_NAMES[draft_dtype]}"
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in missing or name in CONSTANTS[kernel.__name__]:
            signature[name] = "constexpr"
            constexprs[name] = None if name in missing else values[name]
        else:
            signature[name] = types.get(name, "i32")
    name = f"{kernel.__name__}_{DTYPE_NAMES[target_dtype]}"
    return Variant(name, kernel, signature, constexprs, dict(OPTIONS[kernel.__name__]))


def adjusted_variants(vocab: int, dtype: torch.dtype) -> list[Variant]:
    """Return the variants of a round with filters, all outputs, and biases, masks and a reduced draft vocabulary."""
    absent = frozenset({"receipt_ptr", "lengths_ptr", "draft_index_ptr", "uniforms_ptr"})
    told = [variant(kernel, vocab, dtype, dtype, absent, same_rows=False) for kernel in KERNELS]
    return [each._replace(name=f"{each.name}_{vocab}_adjusted") for each in told]
