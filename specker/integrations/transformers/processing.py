"""Which of transformers' prepared logits processors the verifier applies itself, and the others for each sequence."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specker.packages import require
from specker.processors import Processor
from specker.sampling import Sampling

# In the verifier's order. Each entry: class, attribute, argument of Sampling.
_FUSED = (
    ("TemperatureLogitsWarper", "temperature"),
    ("TopKLogitsWarper", "top_k"),
    ("TopPLogitsWarper", "top_p"),
    ("MinPLogitsWarper", "min_p"),
)
# Rows do not depend on one another, nor on what was asked before: they can be asked about any prefix.
_INDEPENDENT = frozenset(
    [name for name, _ in _FUSED]
    + [
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TopHLogitsWarper",
        "TypicalLogitsWarper",
        "WatermarkLogitsProcessor",
    ]
)


@dataclasses.dataclass(frozen=True)
class RowProcessor:
    """The processors of one sequence, which see its padding in front as they do in plain decoding.

    Example:
        >>> lengths = []
        >>> record = lambda token_ids, scores: lengths.append(token_ids.shape[1]) or scores
        >>> _ = RowProcessor([record], torch.tensor([[0, 0]]))(torch.tensor([[5]]), torch.zeros(1, 8))
        >>> lengths
        [3]
    """

    processors: Sequence[Processor]
    padding: torch.Tensor
    """`(1, count)` int64."""

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores `(1, vocab)` behind `token_ids (1, length)` as all processors change them."""
        if self.padding.shape[1]:
            token_ids = torch.cat([self.padding.to(token_ids.device), token_ids], dim=1)
        for process in self.processors:
            scores = process(token_ids, scores)
        return scores


def split_processors(
    prepared: Sequence[Any], padding: Sequence[torch.Tensor], do_sample: bool
) -> tuple[Sampling, list[RowProcessor] | None]:
    """Return what the verifier applies itself, and the other processors for each sequence.

    Args:
        prepared: transformers' list in the order of application.
        padding: of each sequence.
        do_sample: False is greedy.

    Raises:
        ValueError: a processor of transformers keeps a state, or is made for another kind of model.

    Example:
        >>> split_processors([], [torch.zeros(1, 0)], do_sample=False)[0].temperature
        0.0
    """
    processors, fused = list(prepared), {}
    # Greedy decoding may hang on a tie that a processor makes by rounding: there they all run.
    if do_sample:
        # Adding a constant to a row changes no probability.
        while processors and type(processors[-1]) is _class("LogitNormalization"):
            processors.pop()
        for class_name, parameter in reversed(_FUSED):
            if processors and _can_be_fused(processors[-1], class_name):
                fused[parameter] = getattr(processors.pop(), parameter)
    sampling = Sampling(**fused) if do_sample else Sampling(temperature=0.0)
    if not processors:
        return sampling, None
    rows = [
        RowProcessor([_for_sequence(process, row, len(padding)) for process in processors], tokens)
        for row, tokens in enumerate(padding)
    ]
    return sampling, rows


def _class(name: str) -> Any:
    """Return a class of transformers, or None where this version has none of that name."""
    return getattr(require("transformers.generation.logits_process"), name, None)


def _can_be_fused(process: Any, class_name: str) -> bool:
    if type(process) is not _class(class_name):
        return False
    return getattr(process, "min_tokens_to_keep", 1) == 1 and getattr(process, "filter_value", -torch.inf) == -torch.inf


def _for_sequence(process: Any, row: int, batch: int) -> Processor:
    """Return the processor as it acts on one sequence of the batch."""
    name = type(process).__name__
    if type(process) is not _class(name):
        # The user's: it may do anything that depends on its arguments alone.
        return process  # type: ignore[no-any-return]
    if name == "RepetitionPenaltyLogitsProcessor":
        return _repetition_penalty(process, row)
    if name == "PrefixConstrainedLogitsProcessor":
        return _prefix_constraint(process, row)
    if name in ("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor") and batch == 1:
        return process  # type: ignore[no-any-return]
    if name not in _INDEPENDENT:
        batched = f" and a batch of {batch}" if name.startswith("Encoder") else ""
        raise ValueError(
            f"logits_processor: expected none with a state of its own with speculative(), got {name}{batched}"
        )
    return process  # type: ignore[no-any-return]


def _repetition_penalty(process: Any, row: int) -> Processor:
    ignored = getattr(process, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return process  # type: ignore[no-any-return]
    # Newer versions leave out the padding, a count for each sequence of the batch.
    own: Any = copy.copy(process)
    own.prompt_ignore_length = ignored[row : row + 1]
    return own  # type: ignore[no-any-return]


def _prefix_constraint(process: Any, row: int) -> Processor:
    allowed: Callable[[int, torch.Tensor], Any] = process._prefix_allowed_tokens_fn
    prompt = row // process._num_beams
    constrain: Processor = type(process)(lambda _batch_id, token_ids: allowed(prompt, token_ids), 1)
    return constrain
