"""The cost model put to a real pair of models: predicted speed-up beside the measured one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from specker.accounting import GenerationStats
from specker.cached_model import CachedModel, vocab_size
from specker.checks import check_parameters
from specker.decode import FAULTS
from specker.distribution import distribution
from specker.drafts import Conditions, Proposal
from specker.generation import Draft, GenerationResult, generate
from specker.model_drafter import open_drafter
from specker.rounds import VerifyResult
from specker.sampling import Sampling
from specker.status import raise_for_bits
from specker.theory import BestGamma, best_gamma, break_even, expected_tokens, speedup
from specker.verify import verify

_REPEATS = 15
_PREFILL_REPEATS = 2

Report = Callable[[str], None]
"""Called with a word for what is being measured."""


class Costs(NamedTuple):
    """Median seconds of the parts of a round.

    `target_seconds[gamma]` is a target pass over gamma + 1 tokens and its verification, so entry 0 is a step of
    plain decoding; `draft_seconds` is one draft token.
    """

    target_seconds: list[float]
    draft_seconds: float

    @property
    def draft_cost(self) -> float:
        """The c of the cost model: a draft token over a step of plain decoding."""
        return self.draft_seconds / self.target_seconds[0]

    @property
    def target_cost(self) -> list[float]:
        """The cost of a round's target pass over a step of plain decoding, by gamma."""
        return [seconds / self.target_seconds[0] for seconds in self.target_seconds]


class Speed(NamedTuple):
    """What a decode loop did at one gamma, over all prompts and without reading the prompts."""

    tokens_per_second: float
    tokens_per_pass: float


class Point(NamedTuple):
    """Prediction and measurement at one gamma."""

    gamma: int
    predicted_tokens: float
    measured_tokens: float
    predicted_speedup: float
    measured_speedup: float


class Measurement(NamedTuple):
    """Everything `measure` found: `alphas[i]` is the acceptance of the draft token at index i of a round."""

    alphas: list[float]
    costs: Costs
    best: BestGamma
    break_even: float
    plain: Speed
    points: list[Point]


def measure(
    target: Any,
    draft: Draft,
    prompts: Sequence[torch.Tensor],
    *,
    gammas: Sequence[int] = (1, 2, 4, 6, 8),
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    report: Report = lambda _: None,
) -> Measurement:
    """Measure a pair of models and compare what the cost model predicts with what the decode loop reaches.

    Args:
        target: a `PreTrainedModel` in evaluation mode.
        draft: what drafts, as in `specker.generation.generate`.
        prompts: `(1, length)` int64 each, at least one.
        gammas: draft tokens a round to measure, each at least 1.
        max_new_tokens: tokens a prompt is continued by, at least 2.
        sampling: temperature and filters of both models; None for temperature 1.
        seed: of the random numbers.
        report: told what is being measured.

    Raises:
        ValueError: for an empty or invalid argument.

    Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", section 3.

    Example:
        >>> measure(target, draft, [input_ids]).best  # doctest: +SKIP
        BestGamma(gamma=3, speedup=1.42)
    """
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one, got none")
    if len(gammas) == 0 or min(gammas) < 1:
        raise ValueError(f"gammas: expected numbers of at least 1, got {list(gammas)}")
    if max_new_tokens < 2:
        raise ValueError(f"max_new_tokens: expected at least 2, got {max_new_tokens}")
    parameters = sampling or Sampling()
    check_parameters(parameters, 1, vocab_size(target), prompts[0].device)
    limit = max(gammas)
    report("overlap of the two models")
    alphas = measure_overlap(target, draft, prompts, limit, max_new_tokens, parameters, seed)
    report("cost of the passes")
    costs = measure_costs(target, draft, prompts[0], limit, parameters, seed)
    speeds = measure_speeds(target, draft, prompts, [0, *gammas], max_new_tokens, parameters, seed, report)
    points = [
        Point(
            gamma,
            float(expected_tokens(alphas, gamma)),
            speeds[gamma].tokens_per_pass,
            speedup(alphas, costs.draft_cost, gamma, target_cost=costs.target_cost),
            speeds[gamma].tokens_per_second / speeds[0].tokens_per_second,
        )
        for gamma in gammas
    ]
    best = best_gamma(alphas, costs.draft_cost, target_cost=costs.target_cost)
    least = break_even(costs.draft_cost, target_cost=costs.target_cost)
    return Measurement(alphas, costs, best, least, speeds[0], points)


@torch.no_grad()
def measure_overlap(
    target: Any,
    draft: Draft,
    prompts: Sequence[torch.Tensor],
    gamma: int,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> list[float]:
    """Return the acceptance of each of gamma positions of a round, given that all before it were accepted.

    Rounds are run along texts with the target's distribution. A position counts with the probability that the round
    gets there, and with the overlap of its two rows: the exact acceptance, whatever token was drawn. A position
    without a draft token (prompt lookup may find none) counts as rejected.

    Returns: gamma numbers in [0, 1].

    Example:
        >>> measure_overlap(target, draft, [input_ids], 4, 64, Sampling(), 0)  # doctest: +SKIP
        [0.72, 0.7, 0.71, 0.69]
    """
    ends = _end_tokens(target)
    reached, survived = torch.zeros(gamma, dtype=torch.float64), torch.zeros(gamma, dtype=torch.float64)
    for row, prompt in enumerate(prompts):
        seeds = torch.tensor([seed + row], device=prompt.device)
        cached, drafter = CachedModel(target, "target"), open_drafter(draft, target, 1)
        sequence = prompt[0].tolist()
        conditions = Conditions(sampling, seeds)
        while len(sequence) < prompt.shape[1] + max_new_tokens:
            proposal = drafter.propose([sequence], [gamma], conditions)
            drafted = proposal.token_ids.shape[1]
            # No embedding takes the -1 of a draft token that could not be drawn; its status ends the round in words.
            block = proposal.token_ids.clamp(min=0)
            rows = cached.advance([sequence[cached.lengths[0] :]], block, num_logits=drafted + 1)
            result = verify(
                proposal.token_ids, rows, proposal.logits, draft_receipt=proposal.receipt, seed=seeds,
                position=len(sequence), draft_to_target_ids=proposal.draft_to_target_ids, return_accept_probs=True,
                **sampling._asdict(),
            )  # fmt: skip
            raise_for_bits(result.status | proposal.status, FAULTS)
            arrives, overlaps = _round_acceptance(rows, proposal, result, sampling)
            reached += torch.nn.functional.pad(arrives, (0, gamma - len(arrives)))
            survived[:drafted] += arrives[:drafted] * overlaps
            emitted = result.token_ids[0, : result.num_emitted[0]].tolist()
            sequence += emitted
            cached.keep([len(sequence) - 1])
            drafter.keep([len(sequence) - 1])
            if ends.intersection(emitted):
                break
    return (survived / reached.clamp(min=1e-300)).clamp(max=1.0).tolist()


def _round_acceptance(
    rows: torch.Tensor, proposal: Proposal, result: VerifyResult, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return with which probability a round arrives at each position, and the overlap of the rows there."""
    chances = torch.as_tensor(result.accept_probs)[0].double().cpu()
    arrives = torch.cat([torch.ones(1, dtype=torch.float64), chances.cumprod(0)])
    # A token's own chance stands for the overlap, which is its mean, where the columns are not the target's.
    if proposal.logits is None or proposal.draft_to_target_ids is not None:
        return arrives, chances
    parameters = check_parameters(sampling, 1, rows.shape[-1], rows.device)
    target_law, draft_law = (
        distribution(part, *parameters, is_probs=False).probs for part in (rows[:, :-1], proposal.logits)
    )
    return arrives, torch.minimum(target_law, draft_law).sum(-1)[0].cpu()


@torch.no_grad()
def measure_costs(target: Any, draft: Draft, prompt: torch.Tensor, gamma: int, sampling: Sampling, seed: int) -> Costs:
    """Time the parts of a round behind a prompt, the sizes interleaved, and return their medians.

    Example:
        >>> measure_costs(target, draft, input_ids, 4, Sampling(), 0).draft_cost  # doctest: +SKIP
        0.12
    """
    seeds = torch.tensor([seed], device=prompt.device)
    conditions, sequence = Conditions(sampling, seeds), prompt[0].tolist()
    cached, drafter = CachedModel(target, "target"), open_drafter(draft, target, 1)
    cached.advance([sequence])
    tokens = torch.full((1, gamma), sequence[-1], device=prompt.device)

    def read_and_verify(num_drafted: int) -> None:
        rows = cached.advance([sequence[-1:]], tokens[:, :num_drafted], num_logits=num_drafted + 1)
        verify(tokens[:, :num_drafted], rows, rows[:, :num_drafted], seed=seeds, **sampling._asdict())

    target_times: list[list[float]] = [[] for _ in range(gamma + 1)]
    draft_times: list[float] = []
    # The first repetition warms up and does not count.
    for repeat in range(_REPEATS + 1):
        for num_drafted, times in enumerate(target_times):
            seconds = _seconds(lambda: read_and_verify(num_drafted), prompt.device)  # noqa: B023
            cached.keep([len(sequence)])
            times += [seconds] if repeat else []
        seconds = _seconds(lambda: drafter.propose([sequence], [gamma], conditions), prompt.device)
        drafter.keep([len(sequence) - 1])
        draft_times += [seconds / gamma] if repeat else []
    return Costs([statistics.median(times) for times in target_times], statistics.median(draft_times))


def measure_speeds(
    target: Any,
    draft: Draft,
    prompts: Sequence[torch.Tensor],
    gammas: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    report: Report = lambda _: None,
) -> dict[int, Speed]:
    """Return what `specker.generation.generate` reaches at each gamma; the gammas take turns at every prompt.

    The time of reading the prompt, taken from a run that stops at its first token, does not count.

    Example:
        >>> measure_speeds(target, draft, [input_ids], [0, 4], 64, Sampling(), 0)[4]  # doctest: +SKIP
        Speed(tokens_per_second=31.0, tokens_per_pass=2.4)
    """
    tokens, passes, seconds = (dict.fromkeys(gammas, 0.0) for _ in range(3))
    for row, prompt in enumerate(prompts):
        options = {"seed": seed + row, **sampling._asdict()}
        first = [_decode(target, draft, prompt, 0, 1, options)[1] for _ in range(_PREFILL_REPEATS)]
        for gamma in gammas:
            report(f"prompt {row + 1} of {len(prompts)}, gamma {gamma}")
            stats, took = _decode(target, draft, prompt, gamma, max_new_tokens, options)
            tokens[gamma] += stats.emitted - 1
            passes[gamma] += stats.target_passes
            seconds[gamma] += max(took - min(first), 1e-9)
    return {
        gamma: Speed(tokens[gamma] / seconds[gamma], (tokens[gamma] + len(prompts)) / passes[gamma]) for gamma in gammas
    }


def _decode(
    target: Any, draft: Draft, prompt: torch.Tensor, gamma: int, max_new_tokens: int, options: dict[str, Any]
) -> tuple[GenerationStats, float]:
    results: list[GenerationResult] = []
    took = _seconds(
        lambda: results.append(generate(target, draft, prompt, gamma=gamma, max_new_tokens=max_new_tokens, **options)),
        prompt.device,
    )
    return results[0].stats, took


def _end_tokens(target: Any) -> set[int]:
    ends = target.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
