"""The choice of gamma: fixed, scheduled, and by the cost model from synthetic acceptance and costs."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specker.accounting import SequenceStats, TokenKind
from specker.gamma import AutoGamma, CostModelPolicy, RoundRecord, open_policy
from specker.generation import PromptLookup, generate
from specker.theory.cost import best_gamma

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = tiny_models.tiny_llama(seed=1)
PROMPT = torch.tensor([[3, 7, 7, 1, 3, 7]])
NO_STATS = [SequenceStats()]


class World:
    """Rounds with a known acceptance and known costs, the seconds with noise as of a busy machine."""

    def __init__(
        self, policy: CostModelPolicy, draft_cost: float, slope: float, *, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.policy = policy
        self.draft_cost, self.slope, self.noise = draft_cost, slope, noise
        self.random = random.Random(seed)
        self.rounds = 0

    def target_cost(self, active: int = 1) -> list[float]:
        """Return the cost of a pass by gamma: flat but for a slope a token."""
        plain = 1.0 + self.slope * (active - 1)
        return [(1.0 + self.slope * (active * (gamma + 1) - 1)) / plain for gamma in range(9)]

    def run(self, alphas: list[float], rounds: int, finds: Callable[[int], bool] = lambda _: True) -> list[int]:
        """Run rounds and return the gammas that were chosen; `finds` says whether a round's draft proposes anything."""
        sequences, chosen = list(range(len(alphas))), []
        for _ in range(rounds):
            gamma = self.policy.choose(sequences, NO_STATS * len(alphas))[0]
            chosen.append(gamma)
            drafted = gamma if finds(self.rounds) else 0
            accept_probs = [[self._accept_prob(alpha) for _ in range(drafted)] for alpha in alphas]
            seconds = 0.05 * (1.0 + self.slope * (len(alphas) * (drafted + 1) - 1))
            self.policy.observe(
                RoundRecord(
                    sequences,
                    accept_probs,
                    self._noisy(0.05 * self.draft_cost * drafted),
                    self._noisy(seconds * (10.0 if self.rounds == 0 else 1.0)),
                    reads_prompt=self.rounds == 0,
                )
            )
            self.rounds += 1
        return chosen

    def _accept_prob(self, alpha: float) -> float:
        # min(1, ratio) is 1 about as often as not; its mean is what counts.
        return (
            min(1.0, max(0.0, self.random.triangular(0.0, 2 * alpha, alpha)))
            if alpha < 0.5
            else (1.0 if self.random.random() < 2 * alpha - 1 else self.random.random())
        )

    def _noisy(self, seconds: float) -> float:
        return seconds * (1.0 + self.noise * self.random.random() ** 4)


def policy_of(batch: int = 1, **settings: Any) -> CostModelPolicy:
    return CostModelPolicy(AutoGamma(**settings), batch)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("slope", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("draft_cost", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6, 0.75, 0.9])
def test_the_choices_come_near_the_best_in_the_mean(
    alpha: float, draft_cost: float, slope: float, noise: float
) -> None:
    worlds = [World(policy_of(), draft_cost, slope, noise=noise, seed=seed) for seed in range(4)]
    costs = worlds[0].target_cost()
    best = best_gamma(alpha, draft_cost, target_cost=costs)
    chosen = Counter(gamma for world in worlds for gamma in world.run([alpha], 260)[60:])

    def speed(gamma: int) -> float:
        tokens = sum(alpha**count for count in range(gamma + 1))
        return tokens / (costs[gamma] + draft_cost * gamma)

    mean = sum(speed(gamma) * count for gamma, count in chosen.items()) / chosen.total()
    assert mean > 0.92 * best.speedup, (chosen, best)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("alpha", "draft_cost", "slope"), [(0.05, 0.1, 0.02), (0.3, 0.5, 0.0), (0.0, 0.01, 0.03), (0.6, 0.9, 0.05)]
)
def test_speculation_that_does_not_pay_is_never_chosen(
    alpha: float, draft_cost: float, slope: float, seed: int
) -> None:
    world = World(policy_of(probe_every=0), draft_cost, slope, seed=seed)
    assert best_gamma(alpha, draft_cost, target_cost=world.target_cost()).gamma == 0
    world.run([alpha], 300)
    drafting = [choice for choice in world.policy.choices if choice.gamma > 0]
    assert {choice.reason for choice in drafting} == {"explore"}
    assert len(drafting) <= 4


def test_probes_are_rare_and_find_that_drafting_pays_again() -> None:
    world = World(policy_of(probe_every=20), 0.05, 0.02, seed=3)
    world.run([0.0], 200)
    assert Counter(choice.reason for choice in world.policy.choices)["probe"] == pytest.approx(200 / 21, abs=2)
    assert all(choice.gamma == 1 for choice in world.policy.choices if choice.reason == "probe")
    assert world.run([0.95], 400)[-1] >= 4


def test_the_estimate_follows_the_text() -> None:
    world = World(policy_of(), 0.1, 0.02, seed=4)
    good = world.run([0.9], 100)[-1]
    bad = world.run([0.2], 200)[-1]
    assert good >= 5
    assert bad <= 1
    (estimate,) = [world.policy.choices[-1].overlap]
    assert estimate == pytest.approx(0.2, abs=0.08)


def test_the_costs_told_are_those_of_the_world() -> None:
    world = World(policy_of(), 0.1, 0.05, seed=5)
    world.run([0.8], 120)
    choice = world.policy.choices[-1]
    assert choice.draft_cost == pytest.approx(0.1, rel=0.02)
    assert choice.target_cost == pytest.approx(world.target_cost()[choice.gamma], rel=0.02)
    assert choice.speedup == pytest.approx(best_gamma(0.8, 0.1, target_cost=world.target_cost()).speedup, rel=0.1)


def test_a_wider_batch_drafts_less_where_its_tokens_cost() -> None:
    one, many = World(policy_of(), 0.02, 0.05, seed=6), World(policy_of(batch=16), 0.02, 0.05, seed=6)
    assert many.run([0.6] * 16, 120)[-1] < one.run([0.6], 120)[-1]


def test_one_gamma_serves_sequences_that_differ() -> None:
    mixed, alike = ([0.9, 0.1], [0.9, 0.9])
    chosen = [World(policy_of(batch=2), 0.2, 0.0, seed=7).run(alphas, 200)[-1] for alphas in (mixed, alike)]
    assert 1 <= chosen[0] < chosen[1]


def test_a_lookup_that_finds_nothing_goes_on_looking() -> None:
    world = World(policy_of(), 0.0, 0.02, seed=8)
    assert set(world.run([0.9], 50, finds=lambda _: False)) == {4}
    assert world.run([0.9], 100, finds=lambda turn: turn % 2 == 0)[-1] >= 6


def test_given_costs_make_the_choice_independent_of_the_clock() -> None:
    settings = {"target_cost": [1.0 + 0.02 * gamma for gamma in range(9)], "draft_cost": 0.05}
    quiet, busy = (World(policy_of(**settings), 0.05, 0.02, noise=noise, seed=9) for noise in (0.0, 9.0))
    quiet.random, busy.random = random.Random(0), random.Random(0)
    alphas = [0.5, 0.9, 0.7]
    for _ in range(40):
        record = RoundRecord([0], [alphas], 0.0, 0.0, reads_prompt=False)
        assert quiet.policy.choose([0], NO_STATS) == busy.policy.choose([0], NO_STATS)
        quiet.policy.observe(record)
        busy.policy.observe(record._replace(pass_seconds=random.random()))
    assert {choice.reason for choice in quiet.policy.choices} == {"model"}


def test_choices_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="specker.gamma"):
        stats = generate(TARGET, PromptLookup(), PROMPT, gamma="auto", max_new_tokens=20, seed=1).stats
    assert len(stats.gamma_choices) == stats.target_passes == len(caplog.records)
    assert "reason='explore'" in caplog.records[0].getMessage()
    assert [choice.round for choice in stats.gamma_choices] == list(range(stats.target_passes))


def test_auto_gives_the_tokens_of_plain_greedy_decoding() -> None:
    batch = tiny_models.left_padded([[5], [3, 1, 4, 1, 5]])
    for gamma in ("auto", AutoGamma(max_gamma=3)):
        result = generate(
            TARGET, tiny_models.noisy(TARGET, 0.1), **batch, gamma=gamma, temperature=0.0, max_new_tokens=30
        )
        assert result.token_ids[0].tolist() == tiny_models.greedy(TARGET, torch.tensor([[5]]), 30)
        assert result.token_ids[1].tolist() == tiny_models.greedy(TARGET, torch.tensor([[3, 1, 4, 1, 5]]), 30)


def test_a_schedule_sees_the_counters_of_its_sequence() -> None:
    seen: list[tuple[int, int]] = []

    def schedule(stats: SequenceStats) -> int:
        seen.append((stats.rounds, stats.emitted))
        return 5 if stats.rounds % 2 else 1

    stats = generate(TARGET, TARGET, PROMPT, gamma=schedule, temperature=0.0, max_new_tokens=20).stats
    # The target agrees with itself: 2 tokens and 6 tokens in turn.
    assert seen == [(0, 0), (1, 2), (2, 8), (3, 10), (4, 16), (5, 18)]
    assert stats.rounds_by_drafted == [0, 4, 0, 0, 0, 2]


@pytest.mark.parametrize("gamma", [torch.tensor([0, 3]), [0, 3], (0, 3)], ids=str)
def test_each_sequence_has_its_own_gamma(gamma: Any) -> None:
    batch = tiny_models.left_padded([[5], [3, 1]])
    stats = generate(TARGET, TARGET, **batch, gamma=gamma, temperature=0.0, max_new_tokens=8).stats
    assert [counted.rounds for counted in stats.sequences] == [8, 2]
    assert [counted.drafted for counted in stats.sequences] == [0, 6]


@pytest.mark.parametrize(
    ("gamma", "error", "words"),
    [
        (-1, ValueError, "gamma: expected a number >= 0, got -1"),
        ([1, -2], ValueError, "gamma: expected a number >= 0, got -2"),
        ([1, 2, 3], ValueError, "gamma: expected one number or 2, one a sequence, got 3"),
        (2.5, TypeError, "gamma: expected a number, one a sequence, .*, got float"),
        (torch.tensor([1.0, 2.0]), TypeError, "gamma: expected a number, one a sequence, .*, got float"),
        ("automatic", TypeError, "gamma: expected a number, .* or 'auto', got 'automatic'"),
        (AutoGamma(max_gamma=0), ValueError, "max_gamma: expected a number >= 1, got 0"),
        (AutoGamma(memory=0.0), ValueError, r"memory: expected a number in \(0, 1\], got 0.0"),
        (AutoGamma(draft_cost=0.1), ValueError, "target_cost and draft_cost: expected both or none"),
        (AutoGamma(2, [1.0, 1.1], 0.1), ValueError, r"target_cost: expected 3 entries for gamma 0..2, got 2"),
    ],
    ids=str,
)
def test_a_bad_gamma_is_refused_in_words(gamma: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_policy(gamma, batch=2)


def test_a_schedule_that_gives_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma: expected a number >= 0, got -3"):
        generate(TARGET, TARGET, PROMPT, gamma=lambda _: -3)


def test_counters_hold_what_a_round_was() -> None:
    stats = SequenceStats()
    assert stats.overlap is None
    stats.record(3, [TokenKind.ACCEPTED, TokenKind.RECOVERED], [1.0, 0.25, 0.5])
    stats.record(0, [TokenKind.BONUS])
    assert stats.arrivals == pytest.approx(1 + 1 + 0.25)
    assert stats.expected_accepted == pytest.approx(1 + 0.25 + 0.125)
    assert stats.overlap == pytest.approx(1.375 / 2.25)
    assert stats.rounds_by_drafted == [1, 0, 0, 1]
    assert stats.rounds_by_emitted == [0, 1, 1]
