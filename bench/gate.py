"""The correctness gate: no provider is timed before it has agreed with the reference.

A provider that draws by specker's generator must give the reference's tokens, on the rows that are then timed. One
that draws its own random numbers can only agree in law, and has to do so twice: on small rows, where the exact joint
law of (accepted tokens, last token) is known and a chi-square test compares thousands of rounds with it, and on the
rows that are then timed, where the mean number of accepted tokens must fit and each last token must be possible.
"""

from __future__ import annotations

import math

import torch

import specker
from specker.distribution import distribution

from .cases import Case, Inputs, make_inputs
from .eager import Outcome
from .provider import Provider

ERROR_RATE = 1e-6
_LAW = Case("law", 8, 2, 64, torch.float32)
_COPIES = 2_500
_LOOPED_COPIES = 250
_MIN_EXPECTED = 10.0
_FEW = 2
_ROUNDS = 64
_SLACK = 1e-3


class DisagreementError(RuntimeError):
    """A provider does not decide as the reference does; it is not timed."""


def check(provider: Provider, case: Case, inputs: Inputs, laws: dict[str, str]) -> str:
    """Require agreement with the reference, and return how it was seen; `laws` keeps what holds for every case.

    Raises:
        DisagreementError: the provider decides otherwise than the reference.
    """
    if not provider.decides:
        return "a yardstick, which decides nothing"
    if provider.seeded:
        return check_seeded(provider, case, inputs)
    if provider.name not in laws:
        laws[provider.name] = check_law(provider, inputs.target_logits.device)
    check_case(provider, case, inputs)
    return laws[provider.name]


def check_seeded(provider: Provider, case: Case, inputs: Inputs) -> str:
    """Require the reference's decisions on the first sequences of a case, and return how that was seen."""
    few = inputs.first(_FEW)
    got = provider.read(provider.make(few)())
    with specker.backend("reference"):
        wanted = provider.read(provider.make(few)())
    for name, mine, theirs in zip(Outcome._fields, got, wanted, strict=True):
        if not torch.equal(mine, theirs):
            raise DisagreementError(
                f"{case.name}, {provider.name}: expected the reference's {name} {theirs.tolist()}, got {mine.tolist()}"
            )
    return "the reference's tokens under the same seeds"


def exact_law(provider: Provider, inputs: Inputs, row: int) -> torch.Tensor:
    """Return the probability of n accepted tokens and then this last token, `(gamma + 1, vocab)` float64."""
    gamma = inputs.draft_token_ids.shape[1]
    picked = inputs.draft_token_ids[row].unsqueeze(-1)
    target, draft = _distributions(provider, inputs, row, slice(0, gamma))
    accept = (target.gather(-1, picked) / draft.gather(-1, picked)).clamp(max=1.0)
    reached = torch.cat([accept.new_ones(1, 1), accept.cumprod(0)])
    stops = torch.cat([reached[:-1] * (1 - accept), reached[-1:]])
    return stops * torch.stack([last_law(provider, inputs, row, count) for count in range(gamma + 1)])


def last_law(provider: Provider, inputs: Inputs, row: int, num_accepted: int) -> torch.Tensor:
    """Return the distribution of the token behind this many accepted ones, `(vocab,)` float64."""
    target, draft = _distributions(provider, inputs, row, slice(num_accepted, num_accepted + 1))
    mass = target[0] - draft[0] if len(draft) else target[0]
    mass = mass.clamp(min=0)
    return (mass / mass.sum()).nan_to_num()


def _distributions(provider: Provider, inputs: Inputs, row: int, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
    device = inputs.target_logits.device
    temperature, top_k, top_p, min_p = (
        torch.as_tensor(value, dtype=torch.float64, device=device) for value in provider.sampling
    )
    target, draft = (
        distribution(logits[row, positions], temperature, top_k.long(), top_p, min_p, False).probs
        for logits in (inputs.target_logits, inputs.draft_logits)
    )
    if not provider.draft_rows:
        draft = torch.nn.functional.one_hot(inputs.draft_token_ids[row, positions], target.shape[-1]).double()
    return target, draft


def check_law(provider: Provider, device: torch.device) -> str:
    """Require the exact law on small rows by a chi-square test, and return its p-value in words."""
    inputs = make_inputs(_LAW, provider.sampling, device)
    copies = _COPIES if provider.max_batch is None else _LOOPED_COPIES
    counts = _count(provider, inputs, copies)
    expected = torch.stack([exact_law(provider, inputs, row).flatten().cpu() for row in range(_LAW.batch)]) * copies
    if bool((counts[expected == 0] > 0).any()):
        raise DisagreementError(f"{provider.name}: gave a last token that the reference never gives")
    statistic, freedom = 0.0, 0
    for wanted, got in zip(expected, counts, strict=True):
        rare = wanted < _MIN_EXPECTED
        pooled, counted = (torch.cat([cells[~rare], cells[rare].sum()[None]]) for cells in (wanted, got))
        possible = pooled > 0
        statistic += float(((counted - pooled).square() / pooled)[possible].sum())
        freedom += int(possible.sum()) - 1
    p_value = float(torch.special.gammaincc(*torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)))
    if not p_value >= ERROR_RATE:
        raise DisagreementError(
            f"{provider.name}: expected the reference's law, got a chi-square of {statistic:.0f} for {freedom} expected"
        )
    return f"the exact law: chi-square p = {p_value:.2g} over {_LAW.batch * copies:,} rounds"


def _count(provider: Provider, inputs: Inputs, copies: int) -> torch.Tensor:
    """Return how often each (accepted tokens, last token) came, `(batch, (gamma + 1) * vocab)`."""
    counts = torch.zeros(_LAW.batch, (_LAW.gamma + 1) * _LAW.vocab, dtype=torch.float64)
    every = torch.arange(_LAW.batch)
    if provider.max_batch is None:
        parts, repeats = [every.repeat_interleave(copies)], 1
    else:
        parts, repeats = list(every.split(1)), copies
    for rows in parts:
        tokens, target, draft = (tensor[rows] for tensor in inputs[:3])
        call = provider.make(inputs._replace(draft_token_ids=tokens, target_logits=target, draft_logits=draft))
        for _ in range(repeats):
            outcome = provider.read(call())
            cells = outcome.num_accepted.cpu() * _LAW.vocab + outcome.token_ids.cpu()
            counts.index_put_((rows, cells), torch.ones(len(cells), dtype=torch.float64), accumulate=True)
    return counts


def check_case(provider: Provider, case: Case, inputs: Inputs) -> None:
    """Require a fitting number of accepted tokens and possible last tokens on the rows of a case."""
    parameters = provider.sampling._asdict()
    rows = inputs[:3] if provider.draft_rows else inputs[:2]
    chances = specker.verify(*rows, return_accept_probs=True, **parameters).accept_probs
    if chances is None:
        raise RuntimeError("verify returned no accept_probs")
    mean, variance = _moments(chances.double())
    call, total, rounds = provider.make(inputs), 0.0, math.ceil(_ROUNDS / case.batch)
    for number in range(rounds):
        outcome = provider.read(call())
        total += float(outcome.num_accepted.sum())
        if number == 0:
            _check_possible(provider, case, inputs, outcome)
    # Rows that leave no choice have no variance; what float32 adds to their mean is far below a token.
    if (
        not abs(total - rounds * mean)
        <= _sigmas(ERROR_RATE) * math.sqrt(rounds * variance) + _SLACK * rounds * case.batch
    ):
        raise DisagreementError(
            f"{case.name}, {provider.name}: expected {mean / case.batch:.3f} accepted tokens a sequence, "
            f"got {total / rounds / case.batch:.3f} in {rounds} rounds"
        )


def _moments(chances: torch.Tensor) -> tuple[float, float]:
    """Return mean and variance of the number accepted in the whole batch."""
    survive = chances.cumprod(-1)
    mean = survive.sum(-1)
    weights = torch.arange(1, 2 * chances.shape[-1], 2, device=chances.device)
    return float(mean.sum()), max(0.0, float(((survive * weights).sum(-1) - mean.square()).sum()))


def _sigmas(error_rate: float) -> float:
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - error_rate, dtype=torch.float64)))


def _check_possible(provider: Provider, case: Case, inputs: Inputs, outcome: Outcome) -> None:
    """Require mass under the last tokens of the first sequences."""
    for row in range(min(_FEW, case.batch)):
        count, token = int(outcome.num_accepted[row]), int(outcome.token_ids[row])
        if not float(last_law(provider, inputs, row, count)[token]) > 0:
            raise DisagreementError(
                f"{case.name}, {provider.name}: token {token} after {count} accepted ones has no probability"
            )
