"""The acceptance step of transformers' assisted generation, replaced in place while a block runs.

`_assisted_decoding` looks its acceptance function up in its module at every step, so one global is swapped. The
function put there serves the threads that are inside a block and hands every other call to transformers' own.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from specker.integrations.transformers.versions import installed_version
from specker.status import Status, raise_for_bits
from specker.verify import verify

_COMMON = ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits")
_SIGNATURES = (
    (*_COMMON, "is_done_candidate"),
    (*_COMMON, "is_done_candidate", "assistant_ensemble_weight"),
    (*_COMMON, "assistant_ensemble_weight"),
)
# A residual without mass is drawn from the target by the verifier: rounding, no fault of the caller's.
_FAULTS = ~int(Status.DRAFT_TOKEN_PLACEHOLDER | Status.RESIDUAL_EMPTY)
# Before 5.16 this generator gave raw logits for tokens that it drew after the processors.
_FIRST_EXACT_MTP = (5, 16)


@dataclasses.dataclass
class AcceptanceCounts:
    """What the acceptance step did inside a block of `accelerate`.

    `rounds` is the number of calls; it stays 0 where transformers takes another path (greedy, prompt lookup).
    `drafted` and `accepted` count draft tokens as the step sees them; transformers may cut the last round shorter.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


_active: contextvars.ContextVar[tuple[AcceptanceCounts, ...]] = contextvars.ContextVar("specker_accelerate", default=())


@contextlib.contextmanager
def accelerate() -> Iterator[AcceptanceCounts]:
    """Replace the acceptance step of transformers' assisted generation while the block runs.

    Equivalent to transformers' own `_speculative_sampling`, with one wait for the device in place of four or
    more, no softmax written to memory and no `torch.multinomial` over the vocabulary. Serves
    `model.generate(..., do_sample=True, assistant_model=...)` and the other generators whose drafts come with logits.
    Greedy assisted generation and prompt lookup compare tokens and never reach the step: they stay transformers' own.

    Yields:
        AcceptanceCounts of the block, which tell whether the step was reached.

    Raises:
        ModelUnavailableError: transformers is not installed.
        ValueError: a version of transformers, or an acceptance function, that this was not made for; inside the
            block, from `generate`: `assistant_ensemble_weight` is set, which gives up the target's distribution, or
            the drafts are those of `use_mtp` before transformers 5.16, which gave other logits than it drew from.
        InvalidInputError: inside the block, from `generate`: logits are NaN, infinite or nowhere finite.

    Guarantees: exactly the target's distribution after the logits processors; transformers' own function is back when
        the last block ends, however it ends; blocks nest. Only the thread (or asynchronous task) that entered a block
        is served by it: a thread started inside calls transformers' own function until it enters a block itself.
        Drafts that are arg-max tokens (`SinglePositionMultiTokenCandidateGenerator`) are verified as point masses,
        which transformers does not. Random numbers come from torch's default generator of the logits' device:
        `torch.manual_seed` repeats a run, with other tokens than transformers alone would draw.

    Source: Leviathan et al. 2023, algorithm 1.

    Example:
        >>> with accelerate() as counts:  # doctest: +SKIP
        ...     model.generate(input_ids, assistant_model=draft_model, do_sample=True)
        >>> counts.accepted / counts.drafted  # doctest: +SKIP
        0.71
    """
    counts = AcceptanceCounts()
    with _installed():
        token = _active.set((*_active.get(), counts))
        try:
            yield counts
        finally:
            _active.reset(token)


def speculative_sampling(
    candidate_input_ids: torch.Tensor,
    candidate_logits: torch.Tensor,
    candidate_length: int,
    new_logits: torch.Tensor,
    is_done_candidate: torch.Tensor | bool | None = None,
    assistant_ensemble_weight: float | None = None,
) -> tuple[torch.Tensor, int]:
    """Verify one sequence under the signature of transformers' `_speculative_sampling`, whichever version calls.

    Equivalent to, without waiting for the device more than once:

        transformers.generation.utils._speculative_sampling(...)

    Args:
        candidate_input_ids: `(1, length + gamma)` int64, the text and the draft tokens behind it.
        candidate_logits: `(1, gamma, vocab)`, the rows that the draft tokens were drawn from, behind all processors.
        candidate_length: gamma.
        new_logits: `(1, gamma + 1, vocab)`, the target's rows behind all processors.
        is_done_candidate: `(1,)` bool or a bool, whether the last draft token ends the text; no bonus token then
            follows an accepted block. Versions since 5.18 do not ask for it.
        assistant_ensemble_weight: None; a weight gives up the target's distribution.

    Returns:
        The valid tokens `(1, n + 1)` int64 and n.

    Raises:
        ValueError: assistant_ensemble_weight is given.
        InvalidInputError: a row that decides is NaN, infinite or nowhere finite, or a draft token has no mass.

    Source: Leviathan et al. 2023, algorithm 1.

    Example:
        >>> logits = torch.tensor([[[0.0, 99.0], [99.0, 0.0]]])
        >>> speculative_sampling(torch.tensor([[0, 0, 1]]), logits[:, :1], 1, logits)
        (tensor([[1, 0]]), 1)
    """
    if assistant_ensemble_weight is not None:
        raise ValueError(
            f"assistant_ensemble_weight: expected None inside accelerate(), got {assistant_ensemble_weight}: it trades "
            "the target's distribution for acceptance; call generate outside the block for that"
        )
    # Counted from the front: a round without drafts has no last zero tokens to slice from the back.
    length = candidate_input_ids.shape[1] - candidate_length
    draft_token_ids = candidate_input_ids.narrow(1, length, candidate_length)
    result = verify(draft_token_ids, new_logits, candidate_logits)
    outcome = [result.num_accepted, result.status]
    if isinstance(is_done_candidate, torch.Tensor):
        outcome.append(is_done_candidate.reshape(1))
    num_accepted, status, *done = torch.cat(outcome).tolist()
    if status & _FAULTS:
        raise_for_bits(result.status, _FAULTS)
    # Up to 5.17 this function, and no caller, keeps a bonus token from following the end of the text.
    if num_accepted == candidate_length and (done[0] if done else is_done_candidate):
        return draft_token_ids, num_accepted - 1
    return result.token_ids.narrow(1, 0, num_accepted + 1), num_accepted


def _counted(
    candidate_input_ids: torch.Tensor,
    candidate_logits: torch.Tensor,
    candidate_length: int,
    new_logits: torch.Tensor,
    *more: Any,
    **options: Any,
) -> tuple[torch.Tensor, int]:
    """Verify, and count for the blocks that the caller is in."""
    arguments = (candidate_input_ids, candidate_logits, candidate_length, new_logits)
    token_ids, num_matches = speculative_sampling(*arguments, *more, **options)
    for counts in _active.get():
        counts.rounds += 1
        counts.drafted += candidate_length
        counts.accepted += num_matches
    return token_ids, num_matches


class _Replacement(NamedTuple):
    """One attribute of transformers, what it was and what stands there while a block runs."""

    owner: Any
    name: str
    original: Any
    dispatch: Any


_lock = threading.Lock()
_replaced: list[_Replacement] = []
_num_blocks = 0


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Keep the replacements in place while any thread is in a block."""
    global _num_blocks
    with _lock:
        if _num_blocks == 0:
            _replaced.extend(_replacements())
            for replacement in _replaced:
                setattr(replacement.owner, replacement.name, replacement.dispatch)
        _num_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            while _num_blocks == 0 and _replaced:
                owner, name, original, dispatch = _replaced.pop()
                # What somebody else put there meanwhile stays: it may call ours, which then calls the original.
                if vars(owner)[name] is dispatch:
                    setattr(owner, name, original)


def _replacements() -> list[_Replacement]:
    """Return what to replace in the transformers installed, or refuse it in words; nothing is changed yet."""
    version = installed_version()
    utils = importlib.import_module("transformers.generation.utils")
    original = vars(utils).get("_speculative_sampling")
    parameters = tuple(inspect.signature(original).parameters) if callable(original) else None
    if parameters not in _SIGNATURES:
        expected = " or ".join(f"({', '.join(signature)})" for signature in _SIGNATURES)
        raise ValueError(
            f"transformers.generation.utils._speculative_sampling: expected a function of {expected}, "
            f"got {'none' if parameters is None else '(' + ', '.join(parameters) + ')'}"
        )
    replacements = [_replacement(utils, "_speculative_sampling", lambda _original: _counted)]
    generators = importlib.import_module("transformers.generation.candidate_generator")
    wrappers: dict[str, Callable[[Any], Any]] = {"SinglePositionMultiTokenCandidateGenerator": _point_masses}
    if version < _FIRST_EXACT_MTP:
        wrappers["MTPCandidateGenerator"] = _refuse_raw_logits
    for class_name, wrap in wrappers.items():
        if class_name in vars(generators):
            replacements.append(_replacement(vars(generators)[class_name], "get_candidates", wrap))
    return replacements


def _replacement(owner: Any, name: str, wrap: Callable[[Any], Any]) -> _Replacement:
    original = vars(owner)[name]
    inside = wrap(original)

    @functools.wraps(original)
    def dispatch(*arguments: Any, **options: Any) -> Any:
        return (inside if _active.get() else original)(*arguments, **options)

    return _Replacement(owner, name, original, dispatch)


def _point_masses(get_candidates: Any) -> Any:
    """Return `get_candidates` of a generator of arg-max drafts, with the law they really have: all mass on each."""

    def one_hot(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        candidate_input_ids, logits = get_candidates(*arguments, **options)
        if logits is None:
            return candidate_input_ids, None
        drafted = candidate_input_ids[:, candidate_input_ids.shape[1] - logits.shape[1] :, None]
        return candidate_input_ids, torch.full_like(logits, -torch.inf).scatter(-1, drafted.to(logits.device), 0.0)

    return one_hot


def _refuse_raw_logits(_get_candidates: Any) -> Any:
    """Return a `get_candidates` that says why these drafts cannot be verified."""

    def refuse(*_arguments: Any, **_options: Any) -> Any:
        raise ValueError(
            "use_mtp: expected transformers 5.16 or later inside accelerate(): earlier versions draw drafts behind the "
            "logits processors but report the logits before them, so no acceptance step can be exact"
        )

    return refuse
