"""Schemas, fake kernels, and which implementation serves which device.

Dependencies point one way: tests, bench -> specker -> kernels, _C. torch's dispatcher is the only switch: the operator
`specker::verify` is C++ on the CPU and Triton on a GPU. The same schema stands a second and a third time as
`specker_reference::verify` and `specker_triton::verify`, which is how `backend(...)` forces one on any tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specker import delivery, reference

_PARAMETERS = "Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p"
_ADJUSTMENT = "Tensor? bias_offsets, Tensor? bias_token_ids, Tensor? bias_values, Tensor? allowed_tokens"
_DRAFT_ADJUSTMENT = _ADJUSTMENT.replace("? ", "? draft_")
_SCHEMAS = {
    "verify": "verify(Tensor draft_token_ids, Tensor target, Tensor? draft, Tensor? draft_receipt, "
    "Tensor? num_draft_tokens, Tensor? cu_num_draft_tokens, Tensor? draft_index, "
    f"{_PARAMETERS}, Tensor draft_temperature, Tensor? draft_top_k, Tensor? draft_top_p, Tensor? draft_min_p, "
    f"{_ADJUSTMENT}, {_DRAFT_ADJUSTMENT}, Tensor? draft_columns, Tensor? draft_column_target_ids, "
    "Tensor? seed, Tensor? position, Tensor? uniforms, int max_num_draft_tokens, bool target_is_probs, "
    "bool draft_is_probs, bool return_logprobs, bool return_accept_probs) "
    "-> (Tensor token_ids, Tensor num_accepted, Tensor num_emitted, Tensor status, Tensor logprobs, "
    "Tensor accept_probs, Tensor expected_accepted)",
    "verify_plain": "verify_plain(Tensor draft_token_ids, Tensor target, Tensor? draft, Tensor? draft_receipt, "
    f"{_PARAMETERS}, Tensor seed, Tensor position) "
    "-> (Tensor token_ids, Tensor num_accepted, Tensor num_emitted, Tensor status)",
    "sample": f"sample(Tensor logits, {_PARAMETERS}, {_ADJUSTMENT}, Tensor seed, Tensor position) "
    "-> (Tensor token_ids, Tensor status, Tensor receipt)",
    "verify_into": "verify_into(Tensor draft_token_ids, Tensor target, Tensor? draft, Tensor? next_tokens, "
    "Tensor? next_siblings, Tensor? cu_num_draft_tokens, Tensor? cu_num_rows, Tensor? slots, Tensor? temperature, "
    "Tensor? seed, Tensor? position, Tensor? accept_uniforms, Tensor? emission_uniforms, int max_num_draft_tokens, "
    "bool target_is_probs, bool draft_is_probs, Tensor? bonus_token_ids, Tensor? places, int padding, "
    "Tensor(a!) output_token_ids, Tensor(b!)? output_places, Tensor(c!)? passed_total, Tensor(d!)? accepted_total, "
    "Tensor(e!)? emitted_total, Tensor(f!)? status_total) -> Tensor status",
}
_NAMESPACES = {"default": "specker", "reference": "specker_reference", "triton": "specker_triton"}


class _Choice(threading.local):
    """The backend forced in this thread; "default" leaves it to the dispatcher."""

    name = "default"


_choice = _Choice()


class BackendUnavailableError(RuntimeError):
    """The implementation asked for cannot serve here, with the reason in words."""


def _load_extension() -> bool:
    """Load specker._C as a plain library: it registers operators and needs neither Python nor its headers."""
    spec = importlib.util.find_spec("specker._C")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise ImportError(
            f"specker._C is installed but does not load with torch {torch.__version__}: {error}. "
            "Reinstall specker, or remove the extension to run on the reference."
        ) from error
    return True


def _triton(name: str) -> Callable[..., Any]:
    """Return the Triton launcher of an operator; importing it late keeps `import specker` free of Triton."""

    def launch(*arguments: Any) -> Any:
        module = importlib.import_module(f"specker.kernels.{name}")
        return getattr(module, name)(*arguments)

    return launch


def _fake_verify(draft_token_ids: torch.Tensor, target: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    cu_num_draft_tokens, (gamma, _, _, return_logprobs, return_accept_probs) = rest[3], rest[-5:]
    batch = draft_token_ids.shape[0] if cu_num_draft_tokens is None else cu_num_draft_tokens.shape[0] - 1
    return (
        target.new_empty((batch, gamma + 1), dtype=torch.int64),
        target.new_empty((batch,), dtype=torch.int64),
        target.new_empty((batch,), dtype=torch.int64),
        target.new_empty((batch,), dtype=torch.int32),
        target.new_empty((batch, gamma + 1) if return_logprobs else (0,), dtype=torch.float32),
        target.new_empty((batch, gamma) if return_accept_probs else (0,), dtype=torch.float32),
        target.new_empty((batch,) if return_accept_probs else (0,), dtype=torch.float32),
    )


def _fake_verify_plain(_: torch.Tensor, target: torch.Tensor, *_rest: Any) -> tuple[torch.Tensor, ...]:
    batch, rows = target.shape[:2]
    return (
        target.new_empty((batch, rows), dtype=torch.int64),
        target.new_empty((batch,), dtype=torch.int64),
        target.new_empty((batch,), dtype=torch.int64),
        target.new_empty((batch,), dtype=torch.int32),
    )


def _fake_sample(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = logits.shape[0]
    return (
        logits.new_empty((batch,), dtype=torch.int64),
        logits.new_empty((batch,), dtype=torch.int32),
        logits.new_empty((batch, len(reference.RECEIPT_FIELDS)), dtype=torch.float64),
    )


def _fake_verify_into(draft_token_ids: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    bounds = rest[3] if rest[4] is None else rest[4]
    batch = draft_token_ids.shape[0] if bounds is None else bounds.shape[0] - 1
    return target.new_empty((batch,), dtype=torch.int32)


_FAKES: dict[str, Callable[..., Any]] = {
    "verify": _fake_verify,
    "verify_plain": _fake_verify_plain,
    "sample": _fake_sample,
    "verify_into": _fake_verify_into,
}
_REFERENCES: dict[str, Callable[..., Any]] = {
    "verify": reference.verify,
    "verify_plain": reference.verify_plain,
    "sample": reference.sample,
    "verify_into": delivery.verify_into,
}
_LIBRARIES = {backend: torch.library.Library(name, "DEF") for backend, name in _NAMESPACES.items()}
for _library in _LIBRARIES.values():
    for _schema in _SCHEMAS.values():
        _library.define(_schema)
_EXTENSION = _load_extension()
for _name in _SCHEMAS:
    # Tokens have no derivative: autograd passes by, in eager PyTorch too, whose operations it would record.
    _eager = torch.no_grad()(_REFERENCES[_name])
    _LIBRARIES["reference"].impl(_name, _eager, "CompositeExplicitAutograd")
    _LIBRARIES["triton"].impl(_name, _triton(_name), "CompositeExplicitAutograd")
    # One key for NVIDIA and AMD: ROCm builds of torch answer to CUDA.
    _LIBRARIES["default"].impl(_name, _triton(_name), "CUDA")
    if not _EXTENSION:
        _LIBRARIES["default"].impl(_name, _eager, "CPU")
    for _backend, _namespace in _NAMESPACES.items():
        _LIBRARIES[_backend].impl(_name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{_namespace}::{_name}", _FAKES[_name])


def available_backends() -> dict[str, str]:
    """Return why each backend cannot serve here, by name; an empty string means that it can.

    Example:
        >>> available_backends()["reference"]
        ''
    """
    extension = "" if _EXTENSION else "the C++ extension specker._C is not installed"
    return {"reference": "", "cpp": extension, "triton": _why_no_triton()}


def _why_no_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return (
        "no GPU driver is present and Triton's interpreter is off (set TRITON_INTERPRET=1 before the kernels "
        "are imported)"
    )


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Force one implementation inside the block, in this thread only.

    Args:
        name: "reference" (eager PyTorch, any device), "cpp" (CPU tensors) or "triton" (CUDA or ROCm tensors; CPU
            tensors by Triton's interpreter).

    Raises:
        ValueError: the name is none of the three.
        BackendUnavailableError: it cannot serve here.

    Example:
        >>> with backend("reference"):
        ...     pass
    """
    reasons = available_backends()
    if name not in reasons:
        raise ValueError(f"backend: expected one of {sorted(reasons)}, got {name!r}")
    if reasons[name]:
        raise BackendUnavailableError(f"backend {name!r} cannot serve: {reasons[name]}")
    before = _choice.name
    _choice.name = name
    try:
        yield
    finally:
        _choice.name = before


def operator(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the operator that serves tensors on `device`, honouring `backend(...)`.

    Raises:
        BackendUnavailableError: the forced backend cannot serve that device.
    """
    forced = _choice.name
    if forced == "cpp" and device.type != "cpu":
        raise BackendUnavailableError(f"backend 'cpp' serves CPU tensors, got tensors on {device}")
    if forced == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailableError(
            "backend 'triton' serves CPU tensors by the interpreter only: set TRITON_INTERPRET=1 before the "
            "kernels are imported"
        )
    return _OPERATORS["default" if forced == "cpp" else forced][name]


_OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    backend: {name: getattr(getattr(torch.ops, namespace), name).default for name in _SCHEMAS}
    for backend, namespace in _NAMESPACES.items()
}
