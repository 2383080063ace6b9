"""What the adapters of other engines add to verify: `python -m bench.bench_adapters` from the repository root.

Each adapter is timed beside the call of specker that takes the same rows, on a round small enough that the call itself
is what it costs. The difference of the medians is what an engine pays for its own signature. FlashInfer's counts the
tokens that would be accepted behind a rejection too, for which every position is scored: a third line has it beside a
call that scores them as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

import specker
from specker.integrations import flashinfer, sglang, vllm

from .timing import measure


class Adapter(NamedTuple):
    """An adapter's call and specker's own on the same rows."""

    name: str
    call: Callable[[], object]
    base: Callable[[], object]


def main(
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    gamma: Annotated[int, typer.Option(min=1, help="Draft tokens a sequence.")] = 4,
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of measuring an adapter.")] = 3.0,
) -> None:
    """Print the microseconds of every adapter and of specker's own call."""
    torch.set_num_threads(1)
    title = f"{batch} x {gamma} x {vocab:,} float32, microseconds of processor time, medians"
    table = Table(title=title, title_justify="left")
    for heading in ("adapter", "specker's call", "adapter's call", "added"):
        table.add_column(heading, justify="left" if heading == "adapter" else "right")
    for adapter in adapters(batch, gamma, vocab):
        timings = measure(
            {"base": adapter.base, "adapter": adapter.call},
            seconds=seconds,
            evict=lambda: None,
            device=torch.device("cpu"),
            clock=time.process_time,
        )
        base, call = (timings[name].warm.median * 1e6 for name in ("base", "adapter"))
        table.add_row(adapter.name, f"{base:.1f}", f"{call:.1f}", f"{call - base:+.1f}")
    Console().print(table)


def adapters(batch: int, gamma: int, vocab: int) -> list[Adapter]:
    """Return every adapter with inputs of one shape; every other draft token is likely to be kept."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, gamma + 1, vocab, generator=generator)
    draft_logits = logits[:, :-1] + 0.5 * torch.randn(batch, gamma, vocab, generator=generator)
    probs, draft_probs = logits.softmax(-1), draft_logits.softmax(-1)
    ids = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).reshape(batch, gamma)
    seed, position = torch.arange(batch), torch.full((batch,), 100)
    return [
        Adapter(
            "FlashInfer",
            lambda: flashinfer.chain_speculative_sampling(draft_probs, ids, probs),
            lambda: specker.verify_from_probs(ids, probs, draft_probs),
        ),
        Adapter(
            "FlashInfer, seed and offset",
            lambda: flashinfer.chain_speculative_sampling(draft_probs, ids, probs, seed=seed, offset=position),
            lambda: specker.verify_from_probs(ids, probs, draft_probs, seed=seed, position=position),
        ),
        Adapter(
            "FlashInfer, both counting",
            lambda: flashinfer.chain_speculative_sampling(draft_probs, ids, probs),
            lambda: specker.verify_from_probs(ids, probs, draft_probs, return_accept_probs=True),
        ),
        *_vllm_adapters(ids, logits, draft_logits, draft_probs),
        *_sglang_adapters(ids, probs, draft_probs),
    ]


def _vllm_adapters(
    ids: torch.Tensor, logits: torch.Tensor, draft_logits: torch.Tensor, draft_probs: torch.Tensor
) -> list[Adapter]:
    batch, gamma = ids.shape
    lengths, bounds = [gamma] * batch, torch.arange(gamma, gamma * batch + 1, gamma, dtype=torch.int32)
    flat_ids, rows = ids.flatten(), logits[:, :-1].reshape(batch * gamma, -1)
    flat_probs, bonus = draft_probs.flatten(0, 1), torch.zeros(batch, 1, dtype=torch.int64)
    sampling: Any = SimpleNamespace(
        temperature=torch.ones(batch), all_greedy=False, all_random=True, generators={}, top_k=None, top_p=None
    )
    return [
        Adapter(
            "vLLM, first runner",
            lambda: vllm.rejection_sample(flat_ids, lengths, gamma, bounds, flat_probs, rows, bonus, sampling),
            lambda: specker.verify(ids, logits, draft_probs=draft_probs),
        ),
        _slots_adapter("vLLM, second runner", ids, logits, draft_logits, [gamma] * batch),
        _slots_adapter(
            "vLLM, second runner, ragged",
            ids,
            logits,
            draft_logits,
            [gamma - index % 2 for index in range(1, batch + 1)],
        ),
    ]


def _slots_adapter(
    name: str, ids: torch.Tensor, logits: torch.Tensor, draft_logits: torch.Tensor, lengths: list[int]
) -> Adapter:
    """Return the second runner's adapter on the first draft tokens of every sequence, and the round it stands for."""
    batch, gamma = ids.shape
    slots, temperature, seed = torch.arange(batch), torch.ones(batch), torch.arange(batch)
    owners = slots.repeat_interleave(torch.tensor(lengths) + 1)
    steps = torch.cat([torch.arange(length + 1) for length in lengths])
    target, position = logits[owners, steps], torch.full((batch,), 100)
    drafted = torch.where(steps > 0, ids[owners, (steps - 1).clamp(min=0)], 0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    by_slot = (
        target, draft_logits, drafted.int(), bounds + torch.arange(batch + 1), 100 + steps, slots, owners, steps,
        temperature, seed, gamma,
    )  # fmt: skip
    options: Any = {
        "temperature": temperature, "draft_sampling": specker.Sampling(temperature), "draft_index": slots,
        "seed": seed, "position": position,
    }  # fmt: skip
    if lengths == [gamma] * batch:
        return Adapter(
            name,
            lambda: vllm.rejection_sample_by_slot(*by_slot),
            lambda: specker.verify(ids, logits, draft_logits, **options),
        )
    options |= {"cu_num_draft_tokens": bounds, "max_num_draft_tokens": gamma}
    flat_ids = drafted[steps > 0]
    return Adapter(
        name,
        lambda: vllm.rejection_sample_by_slot(*by_slot),
        lambda: specker.verify_flat(flat_ids, target, draft_logits, **options),
    )


def _sglang_adapters(ids: torch.Tensor, probs: torch.Tensor, draft_probs: torch.Tensor) -> list[Adapter]:
    batch, gamma = ids.shape
    slots = gamma + 1
    predicts, accept_index = torch.zeros(batch * slots, dtype=torch.int32), torch.zeros(batch, slots, dtype=torch.int32)
    kept = torch.zeros(batch, dtype=torch.int32)
    candidates = torch.cat([ids[:, :1], ids], dim=1)
    indices = torch.arange(batch * slots).reshape(batch, slots)
    children = torch.arange(1, slots + 1).repeat(batch, 1)
    children[:, -1] = -1
    siblings = torch.full_like(children, -1)
    # The same random numbers in both: where a round ends decides what it costs.
    uniforms = torch.rand(batch, slots, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[..., 1] = uniforms[:, :1, 1]
    coins, final = uniforms[..., 0].contiguous(), uniforms[:, 0, 1].contiguous()
    arg_max = probs.argmax(-1)
    return [
        Adapter(
            "SGLang",
            lambda: sglang.chain_speculative_sampling_triton(
                predicts, accept_index, kept, candidates, indices, children, siblings, coins, final, probs, draft_probs
            ),
            lambda: specker.verify_from_probs(ids, probs, draft_probs, uniforms=uniforms),
        ),
        Adapter(
            "SGLang, greedy from arg-maxes",
            lambda: sglang.verify_tree_greedy(
                predicts, accept_index, kept, candidates, indices, children, siblings, arg_max
            ),
            lambda: specker.verify_from_probs(ids, probs, temperature=0.0),
        ),
    ]


if __name__ == "__main__":
    typer.run(main)
