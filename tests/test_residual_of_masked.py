"""Tokens at -inf have no residual, whatever the scales of target and draft in their shard."""

from __future__ import annotations

import pytest
import torch

import specker

pytestmark = pytest.mark.usefixtures("on_backend")
MASKED = 100
UNIFORMS = torch.tensor([[[1 - 2.0**-53, 0.0], [0.5, 0.0]]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [8192, 9000], ids=["whole shards", "a short shard"])
def test_a_masked_token_is_not_recovered_by_a_uniform_of_0(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    target, draft = torch.randn(1, 2, vocab, generator=generator), torch.randn(1, 1, vocab, generator=generator)
    # Both mask the first tokens, and the draft has next to no mass in their shard.
    target[..., :MASKED] = draft[..., : MASKED // 2] = float("-inf")
    draft[..., 5000] = 30.0
    arguments = torch.tensor([[5000]]), target.to(dtype), draft.to(dtype)
    result = specker.verify(*(argument.to(device) for argument in arguments), uniforms=UNIFORMS.to(device))
    assert result.num_accepted.tolist() == [0]
    assert result.token_ids.tolist() == [[MASKED, -1]]
