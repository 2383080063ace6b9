"""Comparing the operators of a backend with the reference's, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specker import random, reference
from specker.adjustments import Adjustment, adjusted
from specker.distribution import distribution
from specker.layout import Layout, make_layout
from specker.sampling import Sampling
from specker.status import Status

NAMESPACES = {"reference": "specker_reference", "cpp": "specker", "triton": "specker_triton"}
OUTPUTS = ("token_ids", "num_accepted", "num_emitted", "status", "logprobs", "accept_probs", "expected_accepted")
TOLERANCE = 1e-6
"""Distance of a uniform from the threshold that decides, within which backends may differ."""
Outputs = dict[str, torch.Tensor]


def run(backend: str, call: dict[str, Any], **changes: Any) -> Outputs:
    """Return the outputs of the operator `verify` of a backend by name."""
    operator = getattr(torch.ops, NAMESPACES[backend]).verify
    return dict(zip(OUTPUTS, operator(**{**call, **changes}), strict=True))


def injected(call: dict[str, Any], accept_shift: float, emission_shift: float) -> dict[str, Any]:
    """Return what replaces a call's random numbers by the same ones, shifted."""
    uniforms = call["uniforms"]
    if uniforms is None:
        batch, gamma = call["seed"].shape[0], call["max_num_draft_tokens"]
        positions = call["position"].unsqueeze(-1) + torch.arange(gamma + 1)
        pair = random.uniforms(call["seed"].unsqueeze(-1), positions, random.VERIFY_PURPOSE)
        uniforms = torch.stack(pair, dim=-1)
        if call["cu_num_draft_tokens"] is not None:
            uniforms = uniforms[torch.arange(gamma + 1) < layout_of(call).num_rows.unsqueeze(-1)]
        elif uniforms.shape[0] != batch:
            uniforms = uniforms.expand(batch, -1, -1)
    shifted = uniforms + torch.tensor([accept_shift, emission_shift], dtype=torch.float64)
    return {"seed": None, "position": None, "uniforms": shifted.clamp(0.0, 1 - 2.0**-53)}


def layout_of(call: dict[str, Any]) -> Layout:
    """Return where the rows of a call lie."""
    sizes = [call[name] for name in ("num_draft_tokens", "cu_num_draft_tokens", "draft_index", "max_num_draft_tokens")]
    return make_layout(call["draft_token_ids"], call["target"], call["draft"], *sizes)


def emission_mass(call: dict[str, Any], sequence: int, position: int) -> float:
    """Return the mass of what a sequence draws from at a position: of the residual, or 1 where it is the target row."""
    layout = layout_of(call)
    if call["draft"] is None or position >= int(layout.length[sequence]):
        return 1.0
    laws = []
    for name, prefix in (("target", ""), ("draft", "draft_")):
        rows, masks = getattr(layout, f"{name}_rows"), getattr(layout, f"{name}_mask_rows")
        adjustment = Adjustment(*(call[f"{prefix}{field}"] for field in Adjustment._fields))
        parameters = reference._per_position(*(call[f"{prefix}{field}"] for field in Sampling._fields))
        is_probs = call[f"{name}_is_probs"]
        laws.append(distribution(adjusted(call[name][rows], adjustment, masks, is_probs), *parameters, is_probs).probs)
    draft = laws[1][sequence, position]
    if call["draft_columns"] is not None:
        full = torch.zeros_like(laws[0][sequence, position])
        draft = full.index_add_(0, call["draft_column_target_ids"], draft[call["draft_columns"]])
    return float((laws[0][sequence, position] - draft).clamp(min=0).sum())


def explained(call: dict[str, Any], sequence: int, got: Outputs, wanted: Outputs) -> bool:
    """Return whether a uniform within the tolerance of the one used makes the reference decide likewise."""
    accepted = int(got["num_accepted"][sequence])
    if accepted != int(wanted["num_accepted"][sequence]):
        fewer = run("reference", call, **injected(call, TOLERANCE, 0.0))["num_accepted"][sequence]
        more = run("reference", call, **injected(call, -TOLERANCE, 0.0))["num_accepted"][sequence]
        return bool(fewer <= accepted <= more)
    # What is left of two rows that are almost equal is small, and the rounding of their float32 weights is not.
    shift = min(1.0, TOLERANCE / max(emission_mass(call, sequence, accepted), TOLERANCE))
    # The inverse CDF runs through ascending ids: a smaller uniform never gives a larger id.
    lower = run("reference", call, **injected(call, 0.0, -shift))["token_ids"][sequence, accepted]
    upper = run("reference", call, **injected(call, 0.0, shift))["token_ids"][sequence, accepted]
    # A uniform within the tolerance of 1 may give any id behind: no larger uniform is left to ask for.
    at_the_end = injected(call, 0.0, 0.0)["uniforms"][layout_of(call).uniform_rows][sequence, accepted, 1] + shift >= 1
    token = got["token_ids"][sequence, accepted]
    return bool(lower <= token and (token <= upper or at_the_end))


def differing_sequences(got: Outputs, reference: Outputs) -> Iterator[int]:
    """Yield the sequences whose tokens or counts differ."""
    for sequence in range(got["status"].shape[0]):
        same = torch.equal(got["token_ids"][sequence], reference["token_ids"][sequence])
        if not (same and got["num_accepted"][sequence] == reference["num_accepted"][sequence]):
            yield sequence


def assert_agrees(backend: str, call: dict[str, Any]) -> int:
    """Compare every output of one call; return how many sequences were decided differently at a threshold."""
    got, reference = run(backend, call), run("reference", call)
    for name in OUTPUTS:
        assert got[name].shape == reference[name].shape, name
        assert got[name].dtype == reference[name].dtype, name
    straddling = list(differing_sequences(got, reference))
    assert all(explained(call, sequence, got, reference) for sequence in straddling)
    agreeing = torch.ones(got["status"].shape[0], dtype=torch.bool)
    agreeing[straddling] = False
    for sequence in (got["status"] != reference["status"]).logical_and(agreeing).nonzero().flatten().tolist():
        # Whether a residual within rounding of nothing is nothing is for rounding to say; the token is the same.
        differs = int(got["status"][sequence]) ^ int(reference["status"][sequence])
        assert differs == Status.RESIDUAL_EMPTY, "status"
        assert emission_mass(call, sequence, int(got["num_accepted"][sequence])) <= TOLERANCE, "status"
    assert torch.equal(got["num_emitted"][agreeing], reference["num_emitted"][agreeing]), "num_emitted"
    for name in ("logprobs", "accept_probs", "expected_accepted"):
        if got[name].numel():
            torch.testing.assert_close(
                got[name][agreeing], reference[name][agreeing], rtol=1e-5, atol=2e-6, equal_nan=True
            )
    return len(straddling)
