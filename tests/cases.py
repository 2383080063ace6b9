"""Small rounds written down as probabilities, and how to look at what a backend made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import specker
from specker import Status

Row = Sequence[float]
ALMOST_ONE = 1 - 2.0**-53
"""The largest uniform there is."""


class Round(NamedTuple):
    """One sequence and its right result; rows are probabilities, uniforms one pair a position."""

    tokens: Sequence[int]
    target: Sequence[Row]
    draft: Sequence[Row] | None
    uniforms: Sequence[tuple[float, float]]
    emitted: Sequence[int]
    status: Status = Status(0)
    sampling: Mapping[str, Any] = MappingProxyType({})
    num_accepted: int | None = None
    """By default all but the last of `emitted`."""


def interpreted(backend: str) -> bool:
    """Return whether kernels run in Triton's interpreter, milliseconds a program."""
    return backend == "triton" and not torch.cuda.is_available()


def log(rows: Sequence[Any], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return nested lists of probabilities as logits."""
    return torch.tensor(rows, dtype=torch.float64).log().to(dtype).to(device)


def uniforms(pairs: Sequence[Any], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return nested lists of (accept, emission) as the tensor that verify takes."""
    return torch.tensor(pairs, dtype=torch.float64, device=device)


def run(case: Round, device: torch.device) -> specker.VerifyResult:
    """Verify one round."""
    return specker.verify(
        torch.tensor([case.tokens], dtype=torch.int64, device=device).reshape(1, -1),
        log([case.target], device),
        None if case.draft is None else log([case.draft], device),
        uniforms=uniforms([case.uniforms], device),
        **case.sampling,
    )


def check(case: Round, device: torch.device) -> None:
    """Verify one round and compare the whole result with the right one."""
    result = run(case, device)
    emitted = list(case.emitted)
    padding = [-1] * (len(case.target) - len(emitted))
    accepted = len(emitted) - 1 if case.num_accepted is None else case.num_accepted
    assert result.token_ids.tolist() == [emitted + padding]
    assert result.num_accepted.tolist() == [accepted]
    assert result.num_emitted.tolist() == [len(emitted)]
    assert [Status(value) for value in result.status.tolist()] == [case.status]


def first_tokens(
    target: torch.Tensor, draft: torch.Tensor | None, token: int, emissions: Sequence[float], **arguments: Any
) -> list[int]:
    """Return the token that follows the rejection of `token`, for each emission uniform.

    `target` and `draft` are one row of logits each. The acceptance uniform is the largest there is, so the token has
    to be less likely under the target than under the draft.
    """
    count, vocab = len(emissions), target.shape[-1]
    pairs = [[(ALMOST_ONE, emission), (0.5, 0.5)] for emission in emissions]
    result = specker.verify(
        torch.full((count, 1), token, device=target.device),
        target.expand(count, 2, vocab),
        None if draft is None else draft.expand(count, 1, vocab),
        uniforms=uniforms(pairs, target.device),
        **arguments,
    )
    assert result.num_accepted.tolist() == [0] * count
    assert result.num_emitted.tolist() == [1] * count
    tokens: list[int] = result.token_ids[:, 0].tolist()
    return tokens


def bonus_tokens(target: torch.Tensor, emissions: Sequence[float], **arguments: Any) -> list[int]:
    """Return the token drawn from one row of target logits, for each emission uniform."""
    count = len(emissions)
    result = specker.verify(
        torch.empty((count, 0), dtype=torch.int64, device=target.device),
        target.expand(count, 1, target.shape[-1]),
        uniforms=uniforms([[(0.5, emission)] for emission in emissions], target.device),
        **arguments,
    )
    assert result.status.tolist() == [0] * count
    tokens: list[int] = result.token_ids[:, 0].tolist()
    return tokens


def token_probs(target: torch.Tensor, ids: Sequence[int] | None = None, **sampling: Any) -> torch.Tensor:
    """Return the probability of ids, all by default, under the filtered, tempered distribution of one row.

    A certain draft is accepted with the target's probability, which is read off `accept_probs`.
    """
    vocab = target.shape[-1]
    ids = range(vocab) if ids is None else ids
    tokens = torch.tensor([ids], device=target.device)
    result = specker.verify(
        tokens, target.expand(1, tokens.shape[1] + 1, vocab), seed=0, return_accept_probs=True, **sampling
    )
    assert result.accept_probs is not None
    return result.accept_probs[0].cpu()


def kept_ids(target: torch.Tensor, **sampling: Any) -> list[int]:
    """Return the ids that the filters keep."""
    ids: list[int] = token_probs(target, **sampling).nonzero().flatten().tolist()
    return ids


def sequence_of(result: specker.VerifyResult, row: int) -> list[object]:
    """Return all that a result says about one sequence, as exact bits."""
    assert result.logprobs is not None
    assert result.accept_probs is not None
    assert result.expected_accepted is not None
    length = int(result.num_emitted[row])
    return [
        result.token_ids[row, :length].tolist(),
        int(result.num_accepted[row]),
        int(result.status[row]),
        int(result.seed[row]),
        result.logprobs[row, :length].view(torch.int32).tolist(),
        result.accept_probs[row].view(torch.int32).tolist(),
        result.expected_accepted[row].view(torch.int32).tolist(),
    ]


GOOD: dict[str, dict[str, Any]] = {
    "verify": {
        "draft_token_ids": torch.ones(2, 2, dtype=torch.int64),
        "target_logits": torch.zeros(2, 3, 5),
        "draft_logits": torch.zeros(2, 2, 5),
    },
    "verify_from_probs": {
        "draft_token_ids": torch.ones(2, 2, dtype=torch.int64),
        "target_probs": torch.full((2, 3, 5), 0.2),
        "draft_probs": torch.full((2, 2, 5), 0.2),
    },
    "verify_flat": {
        "draft_token_ids": torch.ones(4, dtype=torch.int64),
        "target_logits": torch.zeros(6, 5),
        "draft_logits": torch.zeros(4, 5),
        "cu_num_draft_tokens": torch.tensor([0, 2, 4]),
        "max_num_draft_tokens": 2,
    },
    "sample": {"logits": torch.zeros(2, 5)},
}
"""Arguments of each public function that it accepts: two sequences, gamma 2, a flat vocabulary of 5."""


def good_call(name: str, device: torch.device, **changed: Any) -> Any:
    """Call a public function on a device, with good arguments but for those changed; meta tensors stay as they are."""

    def there(value: Any) -> Any:
        if isinstance(value, specker.Sampling):
            return specker.Sampling(*map(there, value))
        return value.to(device) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value

    return getattr(specker, name)(**{key: there(value) for key, value in (GOOD[name] | changed).items()})


def random_rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random logits on the CPU, the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return (2 * torch.randn(*shape, generator=generator)).to(dtype)
