"""SGLang's chain verify functions, under their signatures; nothing of SGLang is imported.

Both write into the caller's tensors. Slot 0 of a request is the token that its drafts follow; `retrive_index` (SGLang's
spelling) says where in `predicts` a slot writes the token that follows it.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from specker import checks
from specker.delivery import chain_lengths, write_tokens
from specker.integrations.chains import chain_lengths_of, keep_chains
from specker.integrations.rounds import verify_into
from specker.status import InvalidInputError

_INDEX_DTYPES = (torch.int32, torch.int64)
_COIN_DTYPES = (torch.float32, torch.float64)


def chain_speculative_sampling_triton(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor | None,
    retrive_next_sibling: torch.Tensor | None,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,  # noqa: ARG001 (every result is)
    *,
    block_verification: bool = False,
    output_status: torch.Tensor | None = None,
) -> None:
    """Verify chains of draft tokens as SGLang's function of this name does.

    Equivalent to `specker.verify_from_probs(candidates[:, 1:], target_probs, draft_probs, uniforms=...)` with the
    acceptance uniforms from `uniform_samples` and the emission uniform from `uniform_samples_for_final_sampling`.

    Args:
        predicts: int32 or int64, written: at `retrive_index` of each kept slot the token that follows it, at the other
            slots that accept_index has room for 0, with which SGLang fills it beforehand.
        accept_index: `(batch, >= slots)` int32 or int64, written: `retrive_index` of the kept slots, then -1.
        accept_token_num: `(batch,)` int32 or int64, written: draft tokens kept.
        candidates: `(batch, slots)` int32 or int64, slot 0 the root, then the draft tokens; -1 is always rejected.
        retrive_index: `(batch, slots)` int32 or int64, distinct indices into `predicts`.
        retrive_next_token: `(batch, slots)` the child of a slot in its request, -1 for none; None: a full chain.
        retrive_next_sibling: `(batch, slots)` the next child of the same parent, -1 for none; None: no siblings.
        uniform_samples: `(batch, >= slots - 1)` float32 or float64 in [0, 1), one an acceptance; SGLang has `slots`
            columns.
        uniform_samples_for_final_sampling: `(batch,)` likewise, for the recovered or bonus token.
        target_probs: `(batch, slots, vocab)` float32, bfloat16 or float16, read where it lies.
        draft_probs: `(batch, >= slots - 1, vocab)` likewise.
        threshold_single, threshold_acc: 1.0, SGLang's way to leave out lossy acceptance.
        deterministic: of no effect, every result is.
        block_verification: another acceptance rule, refused.
        output_status: `(batch,)` int32, into which the bits of `specker.Status` are or-ed. SGLang has no such
            argument.

    Raises:
        TypeError, ValueError: an argument has the wrong rank, shape, dtype or device; a uniform outside [0, 1).
        NotImplementedError: a slot has two children, or another acceptance rule was asked for. On a GPU, where links
            are not looked at from the host, such a request keeps nothing and emits -1, with a status bit. Links and
            uniforms are judged while outputs are written.

    Guarantees: those of `specker.verify_from_probs`; the whole of `accept_index` is written. A request without a valid
        target row has -1 where its token would stand.

    Source: Chen et al. 2023, algorithm 2; `sglang/kernels/ops/speculative/reject_sampling.py` of SGLang 0.5.23.

    Example:
        >>> predicts, accept_index = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        >>> kept = torch.zeros(1, dtype=torch.int32)
        >>> target_probs = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        >>> chain_speculative_sampling_triton(
        ...     predicts, accept_index, kept, torch.tensor([[7, 1]]), torch.tensor([[0, 1]]), None, None,
        ...     torch.tensor([[0.3]]), torch.tensor([0.6]), target_probs, target_probs[:, :1],
        ... )
        >>> predicts.tolist(), accept_index.tolist(), kept.tolist()
        ([1, 0], [[0, 1]], [1])
    """  # fmt: skip
    if threshold_single != 1.0 or threshold_acc != 1.0 or block_verification:
        _refuse(threshold_single, threshold_acc)
    target = checks.check_rows("target_probs", target_probs, (None, None, None), None)
    batch, slots, vocab = target.shape
    device, gamma = target.device, slots - 1
    _check_outputs(predicts, accept_index, accept_token_num, retrive_index, (batch, slots), device)
    if accept_index.shape[1] < slots:
        raise ValueError(f"accept_index: expected at least {slots} columns, got {accept_index.shape[1]}")
    if output_status is not None:
        checks.check_tensor("output_status", output_status, (batch,), (torch.int32,), device)
    checks.check_index("candidates", candidates, (batch, slots), device)
    draft = checks.check_rows("draft_probs", draft_probs, (batch, None, vocab), device)
    if draft.shape[1] < gamma:
        raise ValueError(f"draft_probs: expected at least {gamma} rows a request, got {draft.shape[1]}")
    checks.check_tensor("uniform_samples", uniform_samples, (batch, None), _COIN_DTYPES, device)
    if uniform_samples.shape[1] < gamma:
        raise ValueError(f"uniform_samples: expected at least {gamma} columns, got {uniform_samples.shape[1]}")
    final = uniform_samples_for_final_sampling
    checks.check_tensor("uniform_samples_for_final_sampling", final, (batch,), _COIN_DTYPES, device)
    _check_links(retrive_next_token, retrive_next_sibling, (batch, slots), device)
    try:
        verify_into(
            predicts, candidates.narrow(1, 1, gamma), target, draft if draft.shape[1] == gamma else draft[:, :gamma],
            gamma, next_tokens=retrive_next_token, next_siblings=retrive_next_sibling, accept_uniforms=uniform_samples,
            emission_uniforms=final, target_is_probs=True, draft_is_probs=True, places=retrive_index, padding=0,
            output_places=accept_index, accepted_total=accept_token_num.zero_(), status_total=output_status,
        )  # fmt: skip
    except InvalidInputError:
        _host_lengths(retrive_next_token, retrive_next_sibling, (batch, slots))
        raise


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor | None,
    retrive_next_sibling: torch.Tensor | None,
    target_predict: torch.Tensor,
) -> None:
    """Keep the draft tokens that the target's arg-max agrees with, as SGLang's function of this name, for chains.

    Args:
        predicts, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling: as in
            `chain_speculative_sampling_triton`.
        accept_index: `(batch, width)` int32 or int64, written; at most width - 1 draft tokens are kept.
        target_predict: `(batch, slots)` int32 or int64, the target's arg-max behind each slot. It is read at
            `retrive_index`, across requests, as SGLang does.

    Raises:
        TypeError, ValueError: an argument has the wrong rank, shape, dtype or device.
        NotImplementedError: a slot has two children; on a GPU such a request keeps nothing and emits -1.

    Guarantees: integers only, no host synchronisation on a GPU; the whole of `accept_index` is written.

    Source: Leviathan et al. 2023, algorithm 1 at temperature 0; `spec_tree.py` of SGLang 0.5.23.

    Example:
        >>> predicts, accept_index = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
        >>> kept = torch.zeros(1, dtype=torch.int32)
        >>> slots = torch.tensor([[0, 1]])
        >>> verify_tree_greedy(
        ...     predicts, accept_index, kept, torch.tensor([[7, 4]]), slots, None, None, torch.tensor([[5, 6]])
        ... )
        >>> predicts.tolist(), accept_index.tolist(), kept.tolist()
        ([5, 0], [[0, -1]], [0])
    """
    checks.check_tensor("candidates", candidates, (None, None), _INDEX_DTYPES, None)
    shape, device = (candidates.shape[0], candidates.shape[1]), candidates.device
    _check_outputs(predicts, accept_index, accept_token_num, retrive_index, shape, device)
    checks.check_index("target_predict", target_predict, shape, device)
    _check_links(retrive_next_token, retrive_next_sibling, shape, device)
    outputs = (predicts, accept_index, accept_token_num)
    if checks.host_readable(device):
        lengths = _host_lengths(retrive_next_token, retrive_next_sibling, shape)
        keep_chains(*outputs, candidates, retrive_index, target_predict, lengths)
        return
    length = None
    if retrive_next_token is not None or retrive_next_sibling is not None:
        length = chain_lengths(retrive_next_token, retrive_next_sibling)
    _keep_on_device(*outputs, candidates, retrive_index, target_predict, length)


def _keep_on_device(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    target_predict: torch.Tensor,
    length: torch.Tensor | None,
) -> None:
    """The same as `keep_chains`, without looking at a value; `length` is -1 for a tree."""
    steps = min(accept_index.shape[1], candidates.shape[1]) - 1
    tokens = target_predict.flatten()[retrive_index].long()[:, : steps + 1]
    kept = candidates[:, 1 : steps + 1] == tokens[:, :steps]
    if length is not None:
        kept &= torch.arange(steps, device=length.device) < length.unsqueeze(1)
        tokens = torch.where(length.unsqueeze(1) < 0, -1, tokens)
    num_accepted = kept.long().cumprod(1).sum(1)
    write_tokens(tokens, num_accepted, retrive_index, 0, predicts, accept_index)
    accept_token_num.copy_(num_accepted)


def _refuse(threshold_single: float, threshold_acc: float) -> NoReturn:
    """Raise for an acceptance rule that is not the exact one, token by token."""
    for name, threshold in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if threshold != 1.0:
            raise NotImplementedError(
                f"{name}: expected 1.0, got {threshold}: other values give up the target's distribution"
            )
    raise NotImplementedError("block_verification: expected False, got True: specker verifies token by token")


def _check_outputs(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    retrive_index: torch.Tensor,
    shape: tuple[int, int],
    device: torch.device,
) -> None:
    """Raise unless the tensors that are written, and the indices into them, are right."""
    batch, slots = shape
    if slots == 0:
        raise ValueError(f"candidates: expected a root slot a request, got shape {shape}")
    checks.check_tensor("predicts", predicts, (None,), _INDEX_DTYPES, device)
    checks.check_tensor("accept_index", accept_index, (batch, None), _INDEX_DTYPES, device)
    if accept_index.shape[1] == 0:
        raise ValueError(f"accept_index: expected at least one column, got shape {tuple(accept_index.shape)}")
    checks.check_tensor("accept_token_num", accept_token_num, (batch,), _INDEX_DTYPES, device)
    checks.check_index("retrive_index", retrive_index, shape, device)
    if batch and checks.host_readable(device):
        lowest, highest = torch.aminmax(retrive_index)
        if int(lowest) < 0 or int(highest) >= predicts.shape[0]:
            raise ValueError(
                f"retrive_index: expected indices into predicts, 0..{predicts.shape[0] - 1}, got {int(lowest)} to "
                f"{int(highest)}"
            )


def _check_links(
    next_token: torch.Tensor | None, next_sibling: torch.Tensor | None, shape: tuple[int, int], device: torch.device
) -> None:
    if next_token is not None:
        checks.check_index("retrive_next_token", next_token, shape, device)
    if next_sibling is not None:
        checks.check_index("retrive_next_sibling", next_sibling, shape, device)


def _host_lengths(
    next_token: torch.Tensor | None, next_sibling: torch.Tensor | None, shape: tuple[int, int]
) -> list[int]:
    """Return the draft tokens of each chain; raise NotImplementedError for a tree."""
    children = None if next_token is None else next_token.tolist()
    siblings = None if next_sibling is None else next_sibling.tolist()
    lengths = chain_lengths_of(children, siblings, *shape)
    if trees := [request for request, length in enumerate(lengths) if length < 0]:
        raise NotImplementedError(
            "retrive_next_token, retrive_next_sibling: expected chains, each slot followed by the next, "
            f"got a tree in requests {trees[:8]}"
        )
    return lengths
