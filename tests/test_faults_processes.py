"""Faults seen in other systems: more than one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import specker

from .faults import fault

# What each process does: draw and verify a round on one backend, and give all results as exact bits.
SCRIPT = """
import json, torch, specker

def bits(tensor):
    return tensor.view({4: torch.int32, 8: torch.int64}[tensor.element_size()]).flatten().tolist()

def run(vocab):
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(2, 3, vocab, generator=generator)
    draft = 2 * torch.randn(2, 2, vocab, generator=generator)
    sampling = dict(temperature=torch.tensor([0.8, 1.3]), top_k=20, top_p=0.95)
    steps = [specker.sample(draft[:, step], seed=7, position=step, **sampling) for step in range(2)]
    receipt = specker.DraftReceipt.stack([step.receipt for step in steps])
    result = specker.verify(
        torch.stack([step.token_ids for step in steps], 1), target, draft, seed=7, draft_receipt=receipt,
        return_logprobs=True, return_accept_probs=True, **sampling,
    )
    return [bits(value) for value in result] + [bits(step.receipt.values) for step in steps]

with specker.backend(name):
    outcome = [run(53)] + ([run(9001)] if name != "triton" else [])
"""


@fault("B109")
@pytest.mark.usefixtures("on_backend")
def test_equal_inputs_give_equal_bits_in_every_process(backend: str) -> None:
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("the interpreter is off where there is a GPU")
    script = f"name = {backend!r}\n{SCRIPT}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script + "print(json.dumps(outcome))"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": threads},
        )
        for threads in ("1", "3")
    ]
    printed = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1]
    assert json.loads(printed[0])[0][0]


@fault("B108")
@pytest.mark.usefixtures("on_backend")
def test_seeds_drawn_by_a_call_repeat_it_elsewhere(device: torch.device) -> None:
    target, tokens = torch.zeros((3, 3, 11), device=device), torch.tensor([[1, 2]] * 3, device=device)
    first = specker.verify(tokens, target)
    again = specker.verify(tokens, target, seed=first.seed)
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert again.seed.tolist() == first.seed.tolist()
    drawn = specker.sample(target[:, 0])
    assert specker.sample(target[:, 0], seed=drawn.seed).token_ids.tolist() == drawn.token_ids.tolist()


@fault("B112")
@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("accepts", [False, True])
def test_shapes_depend_on_batch_and_gamma_alone(temperature: float, accepts: bool, device: torch.device) -> None:
    target = torch.zeros((2, 4, 5), device=device)
    target[..., 1] = 50.0
    tokens = torch.full((2, 3), 1 if accepts else 2, device=device)
    for lengths in (None, torch.tensor([0, 0], device=device), torch.tensor([3, 1], device=device)):
        result = specker.verify(
            tokens, target, num_draft_tokens=lengths, temperature=temperature, seed=0, return_logprobs=True,
            return_accept_probs=True,
        )  # fmt: skip
        shapes = [tuple(value.shape) for value in result if value is not None]
        assert shapes == [(2, 4), (2,), (2,), (2,), (2,), (2, 4), (2, 3), (2,)]
        dtypes = [value.dtype for value in result if value is not None]
        assert dtypes == [torch.int64] * 3 + [torch.int32, torch.int64] + [torch.float32] * 3
