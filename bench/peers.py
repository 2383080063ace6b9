"""The verify functions of other packages, called as their own engines call them.

Each takes what its engine holds at that point: transformers float32 copies of the logits, vLLM and FlashInfer the draft
probabilities that drafting has computed anyway (prepared outside the time). What they need besides is in the time.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .cases import Inputs
from .eager import Outcome
from .provider import Call, Provider


def _module(name: str) -> ModuleType | str:
    """Return a module, or why there is none; a package that is present and fails shows its own error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        if error.name is None or error.name.split(".")[0] != package:
            raise
        return f"{package} is not installed" if error.name == package else f"this {package} has no {name}"


def _function(module: str, name: str) -> Any:
    """Return a function of another package, or why there is none."""
    found = _module(module)
    return found if isinstance(found, str) else getattr(found, name, f"{module} has no {name}")


@functools.cache
def _peer(module: str, name: str, needs_gpu: bool) -> Any:
    def obstacle(device: torch.device) -> str:
        found = _function(module, name)
        if isinstance(found, str):
            return found
        return f"{module} runs on a GPU only" if needs_gpu and device.type == "cpu" else ""

    return obstacle


_TRANSFORMERS = ("transformers.generation.utils", "_speculative_sampling")
_VLLM = ("vllm.v1.sample.rejection_sampler", "rejection_sample")
_FLASHINFER = ("flashinfer.sampling", "chain_speculative_sampling")


def _transformers(inputs: Inputs) -> Call:
    function = _function(*_TRANSFORMERS)
    tokens, target, draft = inputs[:3]
    # Releases before 5.14 also ask whether the candidate ended its text.
    options = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(function).parameters else {}
    return lambda: function(tokens, draft.float(), tokens.shape[1], target.float(), **options)


def _transformers_outcome(returned: tuple[torch.Tensor, torch.Tensor]) -> Outcome:
    valid_tokens, num_matches = returned
    return Outcome(num_matches.reshape(1), valid_tokens[:, -1])


def _flat_draft_probs(inputs: Inputs) -> torch.Tensor:
    return inputs.draft_logits.float().softmax(-1).flatten(0, 1)


def _vllm(inputs: Inputs) -> Call:
    function = _function(*_VLLM)
    tokens, target = inputs[:2]
    batch, gamma = tokens.shape
    flat_tokens = tokens.flatten().to(torch.int32)
    draft_probs = _flat_draft_probs(inputs)
    ends = torch.arange(gamma, batch * gamma + 1, gamma, dtype=torch.int32, device=tokens.device)
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(batch, device=tokens.device), generators={}
    )
    # Earlier releases name this argument target_probs and take it after the softmax.
    takes_probs = "target_probs" in inspect.signature(function).parameters

    def call() -> torch.Tensor:
        rows = target[:, :gamma].flatten(0, 1).float()
        rows = rows.softmax(-1) if takes_probs else rows
        bonus_probs = target[:, gamma].float().softmax(-1)
        bonus = (bonus_probs / torch.empty_like(bonus_probs).exponential_()).argmax(-1, keepdim=True)
        lengths = [gamma] * batch
        return torch.as_tensor(function(flat_tokens, lengths, gamma, ends, draft_probs, rows, bonus, metadata))

    return call


def _flashinfer(inputs: Inputs) -> Call:
    function = _function(*_FLASHINFER)
    tokens, target = inputs[:2]
    ids = tokens.to(torch.int32)
    draft_probs = _flat_draft_probs(inputs).unflatten(0, tokens.shape)
    return lambda: function(draft_probs, ids, target.float().softmax(-1))[0]


def _padded_outcome(token_ids: torch.Tensor) -> Outcome:
    num_accepted = (token_ids >= 0).sum(-1) - 1
    return Outcome(num_accepted, token_ids.gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1).long())


PEERS = (
    Provider(
        "transformers",
        _transformers,
        _transformers_outcome,
        max_batch=1,
        obstacle=_peer(*_TRANSFORMERS, needs_gpu=False),
    ),
    Provider("vLLM", _vllm, _padded_outcome, obstacle=_peer(*_VLLM, needs_gpu=True)),
    Provider("FlashInfer", _flashinfer, _padded_outcome, obstacle=_peer(*_FLASHINFER, needs_gpu=True)),
)
