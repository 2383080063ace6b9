"""The gate of the benchmark: right providers pass, wrong ones are refused, whatever the fault."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import specker
from specker.bench import cases, eager, gate, peers, providers
from specker.bench.cases import Case
from specker.bench.eager import Outcome
from specker.bench.provider import Provider

CPU = torch.device("cpu")
CASE = Case("three", 3, 2, 50, torch.bfloat16)
EAGER = {entry.name: entry for entry in providers.EAGER}


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)


def agree(provider: Provider, case: Case = CASE) -> str:
    return gate.check(provider, case, cases.make_inputs(case, provider.sampling, CPU), {})


@pytest.mark.parametrize("name", ["eager", "smart eager, filters"])
def test_eager_pytorch_passes(name: str) -> None:
    assert agree(EAGER[name]).startswith("the exact law: chi-square p = ")


@pytest.mark.parametrize("provider", providers.OURS, ids=lambda provider: provider.name)
def test_every_form_of_specker_passes(provider: Provider) -> None:
    assert agree(provider) == "the reference's tokens under the same seeds"


def test_the_compiled_round_is_made_from_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    assert agree(EAGER["torch.compile of eager"]).startswith("the exact law")


def test_a_yardstick_has_nothing_to_agree_in() -> None:
    (yardstick,) = providers.YARDSTICKS
    assert yardstick.why_not(CASE, torch.device("cuda")) == "runs on the CPU"
    assert agree(yardstick) == "a yardstick, which decides nothing"
    assert not any(entry.decides is False for entry in providers.all_providers() if entry is not yardstick)


def test_transformers_passes() -> None:
    pytest.importorskip("transformers")
    (provider,) = [entry for entry in peers.PEERS if entry.name == "transformers"]
    assert agree(provider, CASE._replace(batch=1)).endswith("over 2,000 rounds")
    assert provider.why_not(CASE, CPU) == "takes a batch of 1"


def _faulty(change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Provider:
    """Return a provider whose decision is made from the distributions of both models by `change`."""

    def decide(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return change(tokens, target.float().softmax(-1), draft.float().softmax(-1))

    return Provider("faulty", lambda inputs: lambda: decide(*inputs[:3]))


def _accept_too_often(
    tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return eager._decide(tokens, target, 0.9 * draft)


def _draw_from_the_target(
    tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_accepted, _ = eager._decide(tokens, target, draft)
    return num_accepted, torch.multinomial(target[torch.arange(len(tokens)), num_accepted], 1).squeeze(-1)


def _take_the_next_row(
    tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_accepted, _ = eager._decide(tokens, target, draft)
    row = (num_accepted + 1).clamp(max=tokens.shape[1])
    return num_accepted, torch.multinomial(target[torch.arange(len(tokens)), row], 1).squeeze(-1)


@pytest.mark.parametrize("change", [_accept_too_often, _draw_from_the_target, _take_the_next_row])
def test_a_wrong_law_is_refused(change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    with pytest.raises(gate.DisagreementError, match=r"faulty: (gave a last token that|expected the reference's law)"):
        gate.check_law(_faulty(change), CPU)


def test_a_law_of_the_right_tokens_in_wrong_shares_is_refused() -> None:
    def change(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_accepted, last = eager._decide(tokens, target, draft)
        other_count, other = eager._decide(tokens, target, draft)
        # The larger of two possible tokens where both draws stopped at the same place.
        return num_accepted, torch.where(other_count == num_accepted, torch.maximum(last, other), last)

    with pytest.raises(gate.DisagreementError, match="faulty: expected the reference's law, got a chi-square of"):
        gate.check_law(_faulty(change), CPU)


def test_tokens_the_law_excludes_are_refused() -> None:
    filtered = EAGER["smart eager, filters"]
    unfiltered = filtered._replace(name="unfiltered", make=EAGER["eager"].make)
    with pytest.raises(gate.DisagreementError, match="unfiltered: gave a last token that the reference never gives"):
        gate.check_law(unfiltered, CPU)


def test_a_wrong_number_of_accepted_tokens_on_the_case_is_refused() -> None:
    case = CASE._replace(batch=64)
    inputs = cases.make_inputs(case, eager.PLAIN, CPU)
    none = Provider("timid", lambda rows: lambda: (rows.draft_token_ids[:, 0] * 0, rows.target_logits[:, 0].argmax(-1)))
    residual_only = none._replace(
        read=lambda returned: Outcome(
            returned[0],
            torch.stack(
                [gate.last_law(none, inputs, row, 0).argmax() for row in range(case.batch)],
            ),
        )
    )
    with pytest.raises(gate.DisagreementError, match=r"three, timid: expected 1\.\d+ accepted tokens a .*, got 0"):
        gate.check_case(residual_only, case, inputs)


def test_an_impossible_last_token_on_the_case_is_refused() -> None:
    inputs = cases.make_inputs(CASE, eager.PLAIN, CPU)
    inputs.target_logits[:, :, 7] = -torch.inf

    def make(rows: cases.Inputs) -> Any:
        return lambda: (eager.eager_round(*rows[:3])[0], torch.full((CASE.batch,), 7))

    with pytest.raises(gate.DisagreementError, match=r"three, wild: token 7 after \d accepted ones has no probability"):
        gate.check_case(Provider("wild", make), CASE, inputs)


@pytest.mark.parametrize("field", ["num_accepted", "token_ids"])
def test_a_seeded_provider_that_leaves_the_reference_is_refused(field: str) -> None:
    def read(result: specker.VerifyResult) -> Outcome:
        outcome = providers.OURS[0].read(result)
        # Only the reference's tensors stay as they are: the fault is in the fast backend alone.
        off = int(specker.operators._choice.name != "reference")
        return outcome._replace(**{field: getattr(outcome, field) + off})

    broken = providers.OURS[0]._replace(read=read)
    with pytest.raises(gate.DisagreementError, match=rf"three, specker: expected the reference's {field} \["):
        agree(broken)


def test_the_exact_law_is_that_of_the_reference_under_stratified_uniforms() -> None:
    case = Case("small", 1, 2, 5, torch.float32)
    inputs = cases.make_inputs(case, eager.PLAIN, CPU)
    law = gate.exact_law(EAGER["eager"], inputs, 0)
    assert float(law.sum()) == pytest.approx(1.0)
    strata = 24
    grid = (torch.arange(strata, dtype=torch.float64) + 0.5) / strata
    first, second, emission = (axis.flatten() for axis in torch.meshgrid(grid, grid, grid, indexing="ij"))
    uniforms = torch.zeros(len(first), 3, 2, dtype=torch.float64)
    uniforms[:, 0, 0], uniforms[:, 1, 0], uniforms[..., 1] = first, second, emission.unsqueeze(-1)
    rows = (tensor.expand(len(first), *tensor.shape[1:]) for tensor in inputs[:3])
    with specker.backend("reference"):
        outcome = providers.OURS[0].read(specker.verify(*rows, uniforms=uniforms))
    cells = outcome.num_accepted * case.vocab + outcome.token_ids
    found = torch.bincount(cells, minlength=law.numel()).double().reshape(law.shape) / len(cells)
    torch.testing.assert_close(found, law, atol=3 / strata, rtol=0)


# Other packages, as far as their signatures go; the decisions behind them are eager PyTorch's.
def _padded(tokens: torch.Tensor, target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    num_accepted, last = eager._decide(tokens, target, draft)
    columns = torch.arange(tokens.shape[1] + 1)
    kept = torch.where(columns < num_accepted.unsqueeze(-1), torch.nn.functional.pad(tokens, (0, 1)), -1)
    return torch.where(columns == num_accepted.unsqueeze(-1), last.unsqueeze(-1), kept)


def _rejection_sample(tokens: Any, lengths: Any, gamma: int, ends: Any, draft: Any, target: Any, bonus: Any) -> Any:
    assert ends.tolist() == [gamma * (row + 1) for row in range(len(lengths))]
    ids = tokens.reshape(-1, gamma).long()
    rows = torch.cat([target.unflatten(0, ids.shape), torch.full((len(ids), 1, target.shape[-1]), 1e-9)], dim=1)
    found = _padded(ids, rows, draft.unflatten(0, ids.shape))
    complete = found[:, -1] >= 0
    return torch.cat([found[:, :-1], torch.where(complete, bonus[:, 0], -1).unsqueeze(-1)], dim=1).int()


def _new_vllm(
    draft_token_ids: Any,
    num_draft_tokens: Any,
    max_spec_len: int,
    cu_num_draft_tokens: Any,
    draft_probs: Any,
    target_logits: Any,
    bonus_token_ids: Any,
    sampling_metadata: Any,
) -> Any:
    assert sampling_metadata.all_random
    return _rejection_sample(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
        target_logits.softmax(-1), bonus_token_ids,
    )  # fmt: skip


def _old_vllm(
    draft_token_ids: Any,
    num_draft_tokens: Any,
    max_spec_len: int,
    cu_num_draft_tokens: Any,
    draft_probs: Any,
    target_probs: Any,
    bonus_token_ids: Any,
    sampling_metadata: Any,
) -> Any:
    return _rejection_sample(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, bonus_token_ids
    )


def _chain(draft_probs: Any, draft_token_ids: Any, target_probs: Any) -> Any:
    assert draft_token_ids.dtype == torch.int32
    return _padded(draft_token_ids.long(), target_probs, draft_probs), None, None


@pytest.mark.parametrize(
    ("index", "module", "function", "peer"),
    [
        (1, "vllm.v1.sample.rejection_sampler", "rejection_sample", _new_vllm),
        (1, "vllm.v1.sample.rejection_sampler", "rejection_sample", _old_vllm),
        (2, "flashinfer.sampling", "chain_speculative_sampling", _chain),
    ],
)
def test_the_peers_are_called_by_their_signatures(
    index: int, module: str, function: str, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = module.split(".")
    for depth in range(1, len(parts)):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: peer}))
    provider = peers.PEERS[index]
    assert provider.why_not(CASE, CPU) == f"{module} runs on a GPU only"
    assert provider.why_not(CASE, torch.device("cuda")) == ""
    assert agree(provider).startswith("the exact law")
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    assert provider.why_not(CASE, CPU) == f"{module} has no {function}"


def test_absent_packages_are_told_and_broken_ones_show_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Callable[[str], Any]:
        def import_module(name: str) -> Any:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        return import_module

    monkeypatch.setattr(peers.importlib, "import_module", missing("vllm"))
    assert peers.PEERS[1].why_not(CASE, CPU) == "vllm is not installed"
    monkeypatch.setattr(peers.importlib, "import_module", missing("vllm.v1"))
    assert peers.PEERS[1].why_not(CASE, CPU) == "this vllm has no vllm.v1.sample.rejection_sampler"
    monkeypatch.setattr(peers.importlib, "import_module", missing("numpy"))
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        peers.PEERS[1].why_not(CASE, CPU)
