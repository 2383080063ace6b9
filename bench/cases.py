"""Named shapes of real models, the sweeps of the scaling pictures, and inputs whose acceptance is about 0.7."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

import specker

_ACCEPTANCE = 0.7
_DRAWS = 8
_TRIES = 50
# Two wide rows whose logits differ by normal noise of this width overlap by 2 * Phi(-0.77 / 2) = 0.70.
_NOISE = 0.77
_SPREAD = 2.5


class Case(NamedTuple):
    """One shape of a verify round."""

    name: str
    batch: int
    gamma: int
    vocab: int
    dtype: torch.dtype

    @property
    def shape(self) -> str:
        """The sizes in words."""
        return f"{self.batch} x {self.gamma} x {self.vocab:,} {str(self.dtype).removeprefix('torch.')}"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.vocab * self.dtype.itemsize

    @property
    def typical_accepted(self) -> float:
        """Accepted tokens of an average round, all sequences together."""
        return self.batch * sum(_ACCEPTANCE**count for count in range(1, self.gamma + 1))

    @property
    def bytes_at_least(self) -> int:
        """Bytes of all target and draft rows once, the floor of a round without a receipt and without laziness."""
        return self.batch * (2 * self.gamma + 1) * self.row_bytes


CASES = (
    Case("tiny overhead", 1, 4, 1_000, torch.float32),
    Case("Llama 2, one sequence", 1, 4, 32_000, torch.float32),
    Case("Llama 3, one sequence", 1, 4, 128_256, torch.bfloat16),
    Case("Llama 3, batch 8, float32", 8, 4, 128_256, torch.float32),
    Case("Llama 3, batch 8", 8, 4, 128_256, torch.bfloat16),
    Case("Qwen 2.5, batch 32", 32, 4, 151_936, torch.bfloat16),
    Case("Llama 2, batch 64, gamma 8", 64, 8, 32_000, torch.bfloat16),
)
QUICK = ("tiny overhead", "Llama 3, one sequence", "Llama 3, batch 8")
"""The cases of a quick run."""

_BASE = {"batch": 8, "gamma": 4, "vocab": 128_256}
_SIZES = {
    "vocab": (1_000, 4_000, 16_000, 64_000, 128_256, 256_000, 1_024_000),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "gamma": (1, 2, 4, 8, 16, 32),
}
_QUICK_SIZES = {"vocab": (1_000, 16_000, 128_256), "batch": (1, 4, 8), "gamma": (1, 4, 8)}


def sweeps(*, quick: bool = False) -> dict[str, tuple[Case, ...]]:
    """Return the shapes of the scaling pictures: one size varied, the others those of Llama 3 at batch 8."""
    sizes = _QUICK_SIZES if quick else _SIZES
    return {
        size: tuple(Case(f"{size} {value:,}", **{**_BASE, size: value}, dtype=torch.bfloat16) for value in values)
        for size, values in sizes.items()
    }


class Inputs(NamedTuple):
    """Tensors of one round."""

    draft_token_ids: torch.Tensor
    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    receipt: specker.DraftReceipt
    uniforms: torch.Tensor
    seed: torch.Tensor
    """The seeds that are timed, `(batch,)`."""

    def first(self, count: int) -> Inputs:
        """Return the round of the first sequences alone."""
        receipt = replace(self.receipt, values=self.receipt.values[:count])
        tokens, target, draft = (tensor[:count] for tensor in self[:3])
        return Inputs(tokens, target, draft, receipt, self.uniforms[:count], self.seed[:count])


def make_inputs(case: Case, sampling: specker.Sampling, device: torch.device, seed: int = 0) -> Inputs:
    """Return rows of a case, with draft tokens really drawn from the draft rows under `sampling`.

    Rows have their luck, and time goes with those that decide: they are drawn until they accept on average as many
    tokens as an acceptance of 0.7 does, to 20 %, or are the nearest of some draws (filters leave less overlap). One
    round has its luck too: seeds are drawn until it accepts that average, to 5 %, or of a single sequence the count
    nearest to that of an acceptance of 0.7.
    """
    nearest, inputs = math.inf, None
    for draw in range(_DRAWS):
        candidate = _draw_inputs(case, sampling, device, seed + draw)
        expected = _expected_accepted(candidate, sampling)
        distance = abs(expected - case.typical_accepted)
        if distance < nearest:
            seeded = _with_seeds(candidate, sampling, expected if case.batch > 1 else case.typical_accepted)
            if seeded is not None:
                nearest, inputs = distance, seeded
        if nearest <= 0.2 * case.typical_accepted:
            break
    if inputs is None:
        raise RuntimeError(f"{case.name}: expected a round of average luck in {_DRAWS} draws, got none")
    return inputs


def _with_seeds(inputs: Inputs, sampling: specker.Sampling, wanted: float) -> Inputs | None:
    """Return the rows with the first seeds under which the round accepts as many tokens as wanted."""
    for _ in range(_TRIES):
        if abs(int(accepted(inputs, sampling).sum()) - wanted) <= max(0.5, 0.05 * wanted):
            return inputs
        inputs = inputs._replace(seed=inputs.seed + len(inputs.seed))
    return None


def _expected_accepted(inputs: Inputs, sampling: specker.Sampling) -> float:
    """Return how many tokens these rows accept on average, all sequences together."""
    result = specker.verify(*inputs[:3], return_accept_probs=True, **sampling._asdict())
    return float(torch.as_tensor(result.expected_accepted).sum())


def accepted(inputs: Inputs, sampling: specker.Sampling, *, draft_rows: bool = True) -> torch.Tensor:
    """Return how many tokens specker accepts, `(batch,)`, under the seeds that are timed."""
    rows = inputs[:3] if draft_rows else inputs[:2]
    return specker.verify(*rows, seed=inputs.seed, **sampling._asdict()).num_accepted


def _draw_inputs(case: Case, sampling: specker.Sampling, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (case.batch, case.gamma + 1, case.vocab)
    target = torch.randn(shape, generator=generator, device=device) * _SPREAD
    noise = torch.randn((case.batch, case.gamma, case.vocab), generator=generator, device=device)
    draft = (target[:, :-1] + _NOISE * noise).to(case.dtype)
    steps = [
        specker.sample(draft[:, step], seed=seed, position=step, **sampling._asdict()) for step in range(case.gamma)
    ]
    uniforms = torch.rand((case.batch, case.gamma + 1, 2), generator=generator, device=device, dtype=torch.float64)
    return Inputs(
        torch.stack([step.token_ids for step in steps], dim=1),
        target.to(case.dtype),
        draft,
        specker.DraftReceipt.stack([step.receipt for step in steps]),
        uniforms,
        torch.arange(case.batch, device=device),
    )
