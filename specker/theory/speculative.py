"""Discrete speculative sampling: the rule, its expected counts, and simulations by `specker.verify` itself.

Distributions are one-dimensional; lists of `fractions.Fraction` keep every closed form exact.

Source: Leviathan et al. 2023 and Chen et al. 2023, who found the rule independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import specker
from specker.theory.cost import Acceptance, Number, expected_accepted, num_accepted_law

Array = npt.NDArray[Any]
Distribution = Sequence[Number] | Array


class TokenCounts(NamedTuple):
    """What became of first draft tokens, by token id: `final` is `accepted + replacements`."""

    accepted: Array
    rejected: Array
    replacements: Array
    final: Array


class RoundCounts(NamedTuple):
    """Totals over rounds of gamma draft tokens each, every kind of token in a counter of its own.

    `rounds_by_accepted` has gamma + 1 entries. Every draft token is accepted, rejected (the first one that
    fails) or discarded (behind it, never judged); every round emits its accepted tokens and one recovered
    or bonus token.
    """

    rounds_by_accepted: Array
    drafted: Number
    accepted: Number
    rejected: Number
    discarded: Number
    recovered: Number
    bonus: Number
    emitted: Number


class Rounds(NamedTuple):
    """Independent rounds, int64: tokens `(rounds, gamma)` and `(rounds, gamma + 1)`, counts `(rounds,)`."""

    draft_token_ids: Array
    token_ids: Array
    num_accepted: Array
    num_emitted: Array


class ThreeDraws(NamedTuple):
    """The three random numbers of one position, one job each; float64 in [0, 1).

    `draft` chooses the draft token, `threshold` is what its acceptance probability must exceed, `correction`
    chooses the replacement from the residual.
    """

    draft: torch.Tensor
    threshold: torch.Tensor
    correction: torch.Tensor


def accept_probs(target: Distribution, draft: Distribution) -> Array:
    """Return the probability that each token is accepted when it is drafted: `min(1, target / draft)`.

    A token without target mass is never accepted; one that is never drafted counts as accepted otherwise.

    Example:
        >>> accept_probs([0.3, 0.4, 0.3], [0.6, 0.3, 0.1]).tolist()
        [0.5, 1.0, 1.0]
    """
    pairs = zip(np.asarray(target).tolist(), np.asarray(draft).tolist(), strict=True)
    return np.array([1 * (mass > 0) if mass >= drafted else mass / drafted for mass, drafted in pairs])


def residual(target: Distribution, draft: Distribution) -> Array:
    """Return `max(target - draft, 0)`, normalised: what a replacement is drawn from.

    Raises:
        ValueError: where nothing is left, that is where both distributions are the same.

    Example:
        >>> residual([0.25, 0.75], [0.5, 0.5]).tolist()
        [0.0, 1.0]
    """
    excess = np.maximum(np.asarray(target) - np.asarray(draft), 0)
    if not excess.sum() > 0:
        raise ValueError("target: expected mass above the draft somewhere, got none")
    normalised: Array = excess / excess.sum()
    return normalised


def expected_counts(target: Distribution, draft: Distribution, num_proposals: int) -> TokenCounts:
    """Return the expected counts of num_proposals draft tokens, by token id.

    Example:
        >>> expected_counts([0.25, 0.75], [0.5, 0.5], 1000).replacements.tolist()
        [0.0, 250.0]
    """
    target_row, draft_row = np.asarray(target), np.asarray(draft)
    accepted = np.minimum(target_row, draft_row) * num_proposals
    replacements = np.maximum(target_row - draft_row, 0) * num_proposals
    return TokenCounts(accepted, draft_row * num_proposals - accepted, replacements, accepted + replacements)


def expected_round_counts(alpha: Acceptance, gamma: int, num_rounds: int) -> RoundCounts:
    """Return the expected totals of num_rounds rounds.

    Args:
        alpha: acceptance probability of a draft token, one number or one a position.
        gamma: draft tokens a round.
        num_rounds: at least 0.

    Raises:
        ValueError: as `survival` does.

    Example:
        >>> expected_round_counts(0.5, 2, 100).discarded
        50.0
    """
    law = num_accepted_law(alpha, gamma)
    accepted, bonus = expected_accepted(alpha, gamma) * num_rounds, law[-1] * num_rounds
    rejected = num_rounds - bonus
    return RoundCounts(
        rounds_by_accepted=np.array(law) * num_rounds,
        drafted=gamma * num_rounds,
        accepted=accepted,
        rejected=rejected,
        discarded=gamma * num_rounds - accepted - rejected,
        recovered=rejected,
        bonus=bonus,
        emitted=accepted + num_rounds,
    )


def three_draws(seed: int, position: int, num_rounds: int) -> ThreeDraws:
    """Return the random numbers of `specker.sample` and `specker.verify` at a position, `(num_rounds,)` each.

    Round r has the seed `seed + r`: what a Python int means to both functions.

    Example:
        >>> draws = three_draws(seed=0, position=0, num_rounds=4)
        >>> len({float(draw[0]) for draw in draws})
        3
    """
    seeds = seed + torch.arange(num_rounds)
    _, draft = specker.random.uniforms(seeds, position, specker.random.DRAFT_PURPOSE)
    threshold, correction = specker.random.uniforms(seeds, position, specker.random.VERIFY_PURPOSE)
    return ThreeDraws(draft, threshold, correction)


def simulate_rounds(
    target: Distribution,
    draft: Distribution,
    gamma: int,
    num_rounds: int,
    *,
    seed: int,
    reuse_draft_draw: bool = False,
) -> Rounds:
    """Run independent rounds: draft tokens by `specker.sample`, judged by `specker.verify`.

    Args:
        target: `(vocab,)` probabilities of every target row.
        draft: `(vocab,)` probabilities of every draft row.
        gamma: draft tokens a round.
        num_rounds: the batch of the one call.
        seed: round r uses `seed + r`.
        reuse_draft_draw: commit the classical fault on purpose, to see it: the number that chose a draft
            token is its threshold and its correction too.

    Raises:
        specker.InvalidInputError: where verify finds the input invalid.

    Example:
        >>> rounds = simulate_rounds([0.25, 0.75], [0.5, 0.5], gamma=2, num_rounds=100, seed=0)
        >>> bool((rounds.num_emitted == rounds.num_accepted + 1).all())
        True
    """
    target_logits, draft_logits = _logits(target), _logits(draft)
    vocab = target_logits.numel()
    steps = [
        specker.sample(draft_logits.expand(num_rounds, vocab), seed=seed, position=position).token_ids
        for position in range(gamma)
    ]
    draft_token_ids = torch.stack(steps, dim=1) if steps else torch.empty(num_rounds, 0, dtype=torch.int64)
    randomness = {"uniforms": _reused_draws(seed, gamma, num_rounds)} if reuse_draft_draw else {"seed": seed}
    result = specker.verify(
        draft_token_ids,
        target_logits.expand(num_rounds, gamma + 1, vocab),
        draft_logits.expand(num_rounds, gamma, vocab),
        **randomness,
    )
    result.raise_for_status()
    outputs = (draft_token_ids, result.token_ids, result.num_accepted, result.num_emitted)
    return Rounds(*(output.numpy() for output in outputs))


def count_tokens(rounds: Rounds, vocab: int) -> TokenCounts:
    """Count what became of the first draft token of every round, by token id.

    Raises:
        ValueError: where the rounds have no draft token.

    Example:
        >>> rounds = simulate_rounds([0.25, 0.75], [0.5, 0.5], gamma=1, num_rounds=100, seed=0)
        >>> int(count_tokens(rounds, vocab=2).final.sum())
        100
    """
    if rounds.draft_token_ids.shape[1] == 0:
        raise ValueError("rounds: expected gamma >= 1, got 0")
    accepts = rounds.num_accepted >= 1
    first_draft, first_token = rounds.draft_token_ids[:, 0], rounds.token_ids[:, 0]
    counted = (first_token[accepts], first_draft[~accepts], first_token[~accepts], first_token)
    return TokenCounts(*(np.bincount(token_ids, minlength=vocab) for token_ids in counted))


def count_rounds(rounds: Rounds) -> RoundCounts:
    """Count the tokens of rounds by kind.

    Example:
        >>> rounds = simulate_rounds([0.25, 0.75], [0.5, 0.5], gamma=2, num_rounds=100, seed=0)
        >>> counts = count_rounds(rounds)
        >>> int(counts.accepted + counts.rejected + counts.discarded)
        200
    """
    num_rounds, gamma = rounds.draft_token_ids.shape
    rejects = rounds.num_accepted < gamma
    finals = rounds.num_emitted == rounds.num_accepted + 1
    return RoundCounts(
        rounds_by_accepted=np.bincount(rounds.num_accepted, minlength=gamma + 1),
        drafted=num_rounds * gamma,
        accepted=int(rounds.num_accepted.sum()),
        rejected=int(rejects.sum()),
        discarded=int((gamma - 1 - rounds.num_accepted[rejects]).sum()),
        recovered=int((rejects & finals).sum()),
        bonus=int((~rejects & finals).sum()),
        emitted=int((rounds.token_ids >= 0).sum()),
    )


def standard_errors(observed: Array, expected: Array, total: int) -> Array:
    """Return how many binomial standard deviations each observed count is off its expectation.

    Args:
        observed: counts, any shape.
        expected: expected counts, same shape; those of 0 or total must be met exactly and give inf otherwise.
        total: number of trials behind each count.

    Example:
        >>> standard_errors(np.array([60]), np.array([50.0]), 100).tolist()
        [2.0]
    """
    means = np.asarray(expected, dtype=np.float64)
    deviations = np.sqrt(np.maximum(means * (1.0 - means / total), 0.0))
    off = np.abs(np.asarray(observed) - means)
    impossible = np.where(off > 1e-9 * total, np.inf, 0.0)
    return np.divide(off, deviations, out=impossible, where=deviations > 1e-6)


def _logits(distribution: Distribution) -> torch.Tensor:
    return torch.tensor([float(mass) for mass in distribution], dtype=torch.float64).log().to(torch.float32)


def _reused_draws(seed: int, gamma: int, num_rounds: int) -> torch.Tensor:
    draws = [three_draws(seed, position, num_rounds).draft for position in range(gamma + 1)]
    return torch.stack(draws, dim=1).unsqueeze(-1).expand(num_rounds, gamma + 1, 2).contiguous()
