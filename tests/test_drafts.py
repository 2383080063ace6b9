"""What drafts propose: layers left out of the target, and copies from the prompt."""

from __future__ import annotations

import pytest
import torch

from specker.drafts import PromptLookup
from specker.layers import skip_layers
from specker.lookup import LookupDrafter

from . import tiny_models

PROMPT = torch.tensor([[3, 7, 7, 1, 3, 7]])


def test_skipped_layers_share_the_weights_and_leave_the_target_alone() -> None:
    target = tiny_models.tiny_llama(seed=6, layers=4)
    before = target(PROMPT).logits
    shallow = skip_layers(target, [1, 2])
    kept = tiny_models.tiny_llama(seed=7, layers=2)
    kept.model.layers[0].load_state_dict(target.model.layers[0].state_dict())
    kept.model.layers[1].load_state_dict(target.model.layers[3].state_dict())
    for part in ("model.embed_tokens", "model.norm", "lm_head"):
        kept.get_submodule(part).load_state_dict(target.get_submodule(part).state_dict())
    torch.testing.assert_close(shallow(PROMPT).logits, kept(PROMPT).logits)
    pointers = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in shallow.parameters()} <= pointers
    assert torch.equal(target(PROMPT).logits, before)
    assert target.config.num_hidden_layers == len(target.model.layers) == 4


@pytest.mark.parametrize(
    ("sequence", "num_wanted", "expected"),
    [
        ([5, 6, 7, 8, 5, 6], 3, [7, 8, 5]),
        ([1, 2, 9, 4, 2, 8, 1, 2], 1, [9]),  # the bigram decides before the later unigram
        ([4, 1, 4, 2, 4], 1, [2]),  # the latest occurrence decides
        ([3, 3], 4, [3, 3, 3, 3]),  # the copy runs into itself
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([5, 6, 5], 0, []),
    ],
)
def test_lookup_copies_what_followed(sequence: list[int], num_wanted: int, expected: list[int]) -> None:
    drafter = LookupDrafter(PromptLookup(), batch=1, device=torch.device("cpu"))
    proposal = drafter.propose([sequence], [num_wanted])
    assert proposal.token_ids.tolist() == [expected]
    assert list(proposal.num_tokens) == [len(expected)]


def test_lookup_in_steps_equals_lookup_at_once() -> None:
    tokens = torch.randint(4, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    growing = LookupDrafter(PromptLookup(), batch=1, device=torch.device("cpu"))
    for length in [1, 2, 5, 6, 9, 20, 33, 60]:
        fresh = LookupDrafter(PromptLookup(), batch=1, device=torch.device("cpu"))
        proposals = [drafter.propose([tokens[:length]], [4]).token_ids for drafter in (growing, fresh)]
        assert torch.equal(*proposals)
