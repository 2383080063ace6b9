"""Kinds of drafts: another model, the target with layers left out, copies of what was there before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from specker.cached_model import on_device
from specker.processors import Processor
from specker.sample import DraftReceipt
from specker.sampling import Sampling


class PromptLookup(NamedTuple):
    """Draft by copying: what followed the latest earlier occurrence of the last few tokens.

    The proposals are certain, point masses to the verifier, and cost no model pass. Good for text that repeats its
    prompt: edits, summaries with quotations, code.

    Source: Saxena 2023, "Prompt Lookup Decoding".

    Example:
        >>> PromptLookup(max_ngram=3)
        PromptLookup(max_ngram=3, min_ngram=1)
    """

    max_ngram: int = 3
    min_ngram: int = 1


class Continuations(NamedTuple):
    """Draft from given texts: an earlier answer, a template, the file before an edit.

    A sequence is drafted from the first text that starts with all its new tokens so far; once none does, nothing is
    drafted for it. The proposals are point masses to the verifier and cost no model pass.

    Example:
        >>> Continuations([[5, 9, 3], [5, 7]])
        Continuations(token_ids=[[5, 9, 3], [5, 7]])
    """

    token_ids: Sequence[Sequence[int]]
    """Texts that may follow the prompts, as token ids; every sequence looks in all of them."""


class SkipLayers(NamedTuple):
    """Draft with the target itself, some of its layers left out; its weights are shared.

    Source: Zhang et al. 2023, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
    Decoding".

    Example:
        >>> SkipLayers(layers=(3, 17))
        SkipLayers(layers=(3, 17))
    """

    layers: tuple[int, ...]


class EarlyExit(NamedTuple):
    """Draft with the first `num_layers` layers of the target and its head; its weights are shared.

    Source: Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding".

    Example:
        >>> EarlyExit(8)
        EarlyExit(num_layers=8)
    """

    num_layers: int


class ModelDraft(NamedTuple):
    """Draft with a model, and say how its vocabulary relates to the target's or how it proposes.

    A bare model as draft means `ModelDraft(model)`: the target's vocabulary, tokens drawn from its distribution.

    Example:
        >>> ModelDraft(model=None, greedy=True).greedy
        True
    """

    model: Any
    """A `PreTrainedModel`."""
    greedy: bool = False
    """Propose the arg-max, which the verifier takes as a point mass: its soft distribution was not drawn from."""
    padded_vocabulary: bool = False
    """The two number the same tokens alike, and columns that only one of them has are padding."""
    draft_to_target_ids: torch.Tensor | None = None
    """`(draft_vocab,)` int64: the target id of each column of a draft with a reduced vocabulary."""
    unknown_token_id: int = 0
    """The draft's own id that stands for target tokens which a draft with a reduced vocabulary cannot read."""


Draft: TypeAlias = "PromptLookup | Continuations | SkipLayers | EarlyExit | ModelDraft | torch.nn.Module"
"""What can draft: a bare model is a `PreTrainedModel` with the target's vocabulary."""


class Conditions(NamedTuple):
    """What the draws of a round depend on besides the models, one entry a sequence where it is not the same for all."""

    sampling: Sampling
    seeds: torch.Tensor
    """`(batch,)` int64."""
    draft_sampling: Sampling | None = None
    """The draft's own parameters; None is those of the target."""
    allowed_tokens: torch.Tensor | None = None
    """`(batch, words)` int32 bit masks."""
    processors: Sequence[Processor] | None = None

    def select(self, rows: Sequence[int]) -> Conditions:
        """Return the conditions of these sequences alone."""
        kept = torch.tensor(rows, dtype=torch.int64, device=self.seeds.device)

        def of(value: Any) -> Any:
            return value[kept] if isinstance(value, torch.Tensor) else value

        return Conditions(
            Sampling(*map(of, self.sampling)),
            self.seeds[kept],
            None if self.draft_sampling is None else Sampling(*map(of, self.draft_sampling)),
            of(self.allowed_tokens),
            None if self.processors is None else [self.processors[row] for row in rows],
        )


class Proposal(NamedTuple):
    """Draft tokens for one round.

    `token_ids (batch, gamma)` int64, of which the first `num_tokens` of each row count. `logits (batch, gamma, vocab)`
    and `receipt` are those the tokens were drawn with, None for point masses; `draft_to_target_ids (vocab,)` maps their
    columns where they are not the target's, and `masked` says whether the allowed tokens applied. `status (batch,)`
    int32 has a bit set where drafting met an invalid row.
    """

    token_ids: torch.Tensor
    num_tokens: Sequence[int]
    status: torch.Tensor
    logits: torch.Tensor | None = None
    receipt: DraftReceipt | None = None
    draft_to_target_ids: torch.Tensor | None = None
    masked: bool = False


class Drafter(Protocol):
    """What the decode loop asks of a draft."""

    def propose(
        self, sequences: Sequence[Sequence[int]], num_wanted: Sequence[int], conditions: Conditions
    ) -> Proposal:
        """Propose up to `num_wanted` tokens behind each sequence."""

    def keep(self, num_tokens: Sequence[int]) -> None:
        """Forget everything behind the first `num_tokens` of each sequence."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences."""


def point_masses(copies: Sequence[Sequence[int]], device: torch.device) -> Proposal:
    """Return a proposal of certain tokens, from none to any number a sequence.

    Example:
        >>> point_masses([[4, 5], []], torch.device("cpu")).token_ids
        tensor([[ 4,  5],
                [-1, -1]])
    """
    width = max(map(len, copies))
    padded = [list(copy) + [-1] * (width - len(copy)) for copy in copies]
    return Proposal(
        on_device(padded, device).reshape(len(copies), width),
        list(map(len, copies)),
        torch.zeros(len(copies), dtype=torch.int32, device=device),
    )
