"""What `bench.gpu_check` asks of the kernels before it times them: right answers, the law, graphs, no waiting."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import torch

import specker

FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


class Scale(NamedTuple):
    """How much is asked: of a GPU, or of the interpreter in a dry run."""

    vocabs: tuple[int, ...]
    batch: int
    gamma: int
    law_rounds: int
    law_batch: int
    big_elements: int


GPU_SCALE = Scale((1, 63, 257, 32_000, 50_257, 128_257), 16, 4, 10_000_000, 500_000, 2**31 + 2**20)
DRY_SCALE = Scale((40,), 1, 2, 40, 20, 2**8)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rounds_of(
    device: torch.device, batch: int, gamma: int, vocab: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return draft tokens, target and draft rows, and uniforms, made on the CPU so that every machine has the same."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn((batch, gamma + 1, vocab), generator=generator) * 2.5
    draft = (target[:, :gamma] + torch.randn((batch, gamma, vocab), generator=generator) * 0.77).to(dtype)
    tokens = torch.multinomial(draft.float().softmax(-1).view(-1, vocab), 1, generator=generator).view(batch, gamma)
    uniforms = torch.rand((batch, gamma + 1, 2), generator=generator, dtype=torch.float64)
    return tokens.to(device), target.to(dtype).to(device), draft.to(device), uniforms.to(device)


def check_grid(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Compare tokens and status with the reference, which runs on the CPU, over dtypes, vocabularies and forms."""
    decisions, different = 0, []
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    forms: dict[str, dict[str, Any]] = {
        "plain": {}, "filters": FILTERS, "min-p": {"min_p": 0.05}, "greedy": {"temperature": 0.0},
    }  # fmt: skip
    for vocab, dtype, (form, options), point_mass in itertools.product(
        scale.vocabs, dtypes, forms.items(), (False, True)
    ):
        tokens, target, draft, uniforms = rounds_of(device, scale.batch, scale.gamma, vocab, dtype, seed=vocab)
        subtracted = None if point_mass else draft
        with specker.backend("triton"):
            got = specker.verify(tokens, target, subtracted, uniforms=uniforms, **options)
        subtracted = None if point_mass else draft.cpu()
        with specker.backend("reference"):
            wanted = specker.verify(tokens.cpu(), target.cpu(), subtracted, uniforms=uniforms.cpu(), **options)
        same = (got.token_ids.cpu() == wanted.token_ids).all(dim=-1) & (got.status.cpu() == wanted.status)
        decisions += same.numel()
        if not bool(same.all()):
            different.append(f"{vocab} {dtype} {form} point_mass={point_mass}: {int((~same).sum())}")
    # Two floats may straddle a threshold, more rarely than once in these few decisions.
    return {"passed": len(different) <= 1, "decisions": decisions, "different": different}


def check_law(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Draw rounds of draft and verify from one pair of rows; the first token has to follow the target's law."""
    generator = torch.Generator().manual_seed(7)
    target = (torch.randn((1, 3, 8), generator=generator) * 1.5).to(device)
    draft = (torch.randn((1, 2, 8), generator=generator) * 1.5).to(device)
    counts = torch.zeros(8, dtype=torch.int64)
    batch = scale.law_batch
    with specker.backend("triton"):
        for step in range(scale.law_rounds // batch):
            seed = torch.arange(step * batch, (step + 1) * batch, device=device)
            rows = draft.expand(batch, 2, 8)
            tokens = [specker.sample(rows[:, i], seed=seed, position=i).token_ids for i in range(2)]
            result = specker.verify(torch.stack(tokens, dim=1), target.expand(batch, 3, 8), rows, seed=seed)
            counts += torch.bincount(result.token_ids[:, 0], minlength=8).cpu()
    expected = target[0, 0].double().softmax(-1).cpu() * int(counts.sum())
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: the cube root of a chi-square over its degrees of freedom is almost normal.
    spread = 2 / (9 * 7)
    deviations = ((statistic / 7) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return {"passed": deviations < 4.75, "rounds": int(counts.sum()), "deviations": deviations}


def check_graph(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Capture a round, replay it with fresh seeds, and compare with rounds that are launched one by one."""
    tokens, target, draft, _ = rounds_of(device, scale.batch, scale.gamma, max(scale.vocabs), torch.bfloat16, seed=3)
    seed = torch.zeros(scale.batch, dtype=torch.int64, device=device)
    for options in ({}, FILTERS):
        with specker.backend("triton"):
            specker.verify(tokens, target, draft, seed=seed, **options)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = specker.verify(tokens, target, draft, seed=seed, **options)
            for start in (11, 1_000_003):
                seed.copy_(torch.arange(start, start + scale.batch, device=device))
                graph.replay()
                alone = specker.verify(tokens, target, draft, seed=seed.clone(), **options)
                if not torch.equal(captured.token_ids, alone.token_ids):
                    return {"passed": False, "options": str(options), "seed": start}
    return {"passed": True}


def check_no_synchronisation(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Run rounds in the mode in which torch refuses to wait for the device."""
    tokens, target, draft, _ = rounds_of(device, scale.batch, scale.gamma, max(scale.vocabs), torch.bfloat16, seed=4)
    seed = torch.arange(scale.batch, device=device)
    top_p = torch.full((scale.batch,), 0.9, device=device)
    with specker.backend("triton"):
        specker.verify(tokens, target, draft, seed=seed, top_p=top_p)
        _sync(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            specker.verify(tokens, target, draft, seed=seed, position=seed, top_p=top_p, return_accept_probs=True)
        except RuntimeError as error:
            return {"passed": False, "error": str(error)}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"passed": True}


def check_far_rows(device: torch.device, scale: Scale) -> dict[str, Any]:
    """Compare the last sequence of a tensor of more than 2**31 logits with the same sequence by itself."""
    vocab = max(scale.vocabs)
    batch = max(2, -(-scale.big_elements // (2 * vocab)))
    target = torch.zeros((batch, 2, vocab), dtype=torch.bfloat16, device=device)
    tokens, few, _, _ = rounds_of(device, 1, 1, vocab, torch.bfloat16, seed=5)
    target[-1:] = few
    seed = torch.full((batch,), 5, dtype=torch.int64, device=device)
    with specker.backend("triton"):
        far = specker.verify(tokens.expand(batch, 1), target, None, seed=seed)
        alone = specker.verify(tokens, few, None, seed=seed[:1])
    same = torch.equal(far.token_ids[-1:], alone.token_ids) and torch.equal(far.status[-1:], alone.status)
    return {"passed": same, "logits": target.numel()}


def check_sanitizer(device: torch.device, scale: Scale) -> dict[str, Any]:  # noqa: ARG001 (one form of all checks)
    """Run the grid under NVIDIA's memory checker where it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"passed": True, "skipped": "compute-sanitizer is not installed"}
    command = [tool, "--error-exitcode=9", sys.executable, "-m", "bench.gpu_check", "--only-small-grid"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return {"passed": True, "skipped": "not done within 90 seconds"}
    return {"passed": run.returncode == 0, "output": run.stdout[-2000:] if run.returncode else ""}


CHECKS = {
    "grid": check_grid,
    "law": check_law,
    "far rows": check_far_rows,
    "graph": check_graph,
    "no synchronisation": check_no_synchronisation,
    "sanitizer": check_sanitizer,
}
NEED_A_GPU = ("graph", "no synchronisation", "sanitizer")
