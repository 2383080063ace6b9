"""Named shapes of real models, and inputs whose acceptance is about 0.7."""

from __future__ import annotations

from typing import NamedTuple

import torch

import specker


class Case(NamedTuple):
    """One shape of a verify round."""

    name: str
    batch: int
    gamma: int
    vocab: int
    dtype: torch.dtype

    @property
    def bytes_at_least(self) -> int:
        """Bytes of all target and draft rows once, the floor of a round without a receipt and without laziness."""
        return self.batch * (2 * self.gamma + 1) * self.vocab * self.dtype.itemsize


CASES = (
    Case("tiny overhead", 1, 4, 1_000, torch.float32),
    Case("Llama 2, one sequence", 1, 4, 32_000, torch.float32),
    Case("Llama 3, one sequence", 1, 4, 128_256, torch.bfloat16),
    Case("Llama 3, batch 8, float32", 8, 4, 128_256, torch.float32),
    Case("Llama 3, batch 8", 8, 4, 128_256, torch.bfloat16),
    Case("Qwen 2.5, batch 32", 32, 4, 151_936, torch.bfloat16),
    Case("Llama 2, batch 64, gamma 8", 64, 8, 32_000, torch.bfloat16),
)

# Two wide rows whose logits differ by normal noise of this width overlap by 2 * Phi(-0.77 / 2) = 0.70.
_NOISE = 0.77
_SPREAD = 2.5


class Inputs(NamedTuple):
    """Tensors of one round."""

    draft_token_ids: torch.Tensor
    target_logits: torch.Tensor
    draft_logits: torch.Tensor
    receipt: specker.DraftReceipt
    uniforms: torch.Tensor


def make_inputs(case: Case, sampling: specker.Sampling, device: torch.device, seed: int = 0) -> Inputs:
    """Return rows of a case, with draft tokens really drawn from the draft rows under `sampling`."""
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
    )
