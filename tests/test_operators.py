"""Operators: registration, tracing, and the choice of a backend."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import specker
from specker import operators

from .differential import NAMESPACES

BATCH, GAMMA, VOCAB = 3, 2, 16


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = _generator()
    return (
        torch.randint(0, VOCAB, (BATCH, GAMMA), generator=generator),
        torch.randn(BATCH, GAMMA + 1, VOCAB, generator=generator),
        torch.randn(BATCH, GAMMA, VOCAB, generator=generator),
    )


def _verify_arguments(**changes: Any) -> tuple[Any, ...]:
    """Return the positional arguments of the operator, some of them changed."""
    token_ids, target, draft = _inputs()
    one = torch.ones(1, dtype=torch.float64)
    values: dict[str, Any] = {
        "draft_token_ids": token_ids, "target": target, "draft": draft, "draft_receipt": None,
        "num_draft_tokens": None, "cu_num_draft_tokens": None, "draft_index": None, "temperature": one,
        "top_k": None, "top_p": None, "min_p": None, "draft_temperature": one, "draft_top_k": None,
        "draft_top_p": None, "draft_min_p": None, "bias_offsets": None, "bias_token_ids": None, "bias_values": None,
        "allowed_tokens": None, "draft_bias_offsets": None, "draft_bias_token_ids": None, "draft_bias_values": None,
        "draft_allowed_tokens": None, "draft_columns": None, "draft_column_target_ids": None,
        "seed": torch.arange(BATCH),
        "position": torch.zeros(1, dtype=torch.int64), "uniforms": None, "max_num_draft_tokens": GAMMA,
        "target_is_probs": False, "draft_is_probs": False, "return_logprobs": False, "return_accept_probs": False,
    }  # fmt: skip
    schema = torch.ops.specker.verify.default._schema
    assert [argument.name for argument in schema.arguments] == list(values)
    return tuple({**values, **changes}.values())


_FLAT = {
    "draft_token_ids": torch.tensor([1, 2, 3]),
    "target": torch.randn(6, VOCAB, generator=_generator()),
    "draft": torch.randn(3, VOCAB, generator=_generator()),
    "cu_num_draft_tokens": torch.tensor([0, 2, 2, 3]),
}
_FILTERS = {
    "temperature": torch.tensor([0.0, 0.7, 1.0]),
    "top_k": torch.tensor([0, 3, 5]),
    "top_p": torch.tensor([0.9, 1.0, 0.5], dtype=torch.float64),
    "min_p": torch.tensor([0.0, 0.1, 0.2]),
}
_ADJUSTMENT = {
    "bias_offsets": torch.tensor([0, 2, 2, 3]),
    "bias_token_ids": torch.tensor([1, 5, 0]),
    "bias_values": torch.tensor([2.0, -float("inf"), 0.5]),
    "allowed_tokens": torch.full((BATCH, GAMMA + 1, 1), 0x7FFF, dtype=torch.int32),
}
VERIFY_CASES = {
    "plain": {},
    "point mass": {"draft": None},
    "ragged": {"num_draft_tokens": torch.tensor([0, 1, 2], dtype=torch.int32)},
    "optional outputs": {"return_logprobs": True, "return_accept_probs": True},
    "injected uniforms": {
        "seed": None,
        "position": None,
        "uniforms": torch.rand(BATCH, GAMMA + 1, 2, dtype=torch.float64, generator=_generator()),
    },
    "flat": _FLAT,
    "filters": _FILTERS,
    "bias and masks": {
        **_ADJUSTMENT,
        **{f"draft_{name}": value[:, :GAMMA] if value.dim() == 3 else value for name, value in _ADJUSTMENT.items()},
    },
    "reduced draft vocabulary": {
        "draft": torch.randn(BATCH, GAMMA, 3, generator=_generator()),
        "draft_columns": torch.tensor([2, 0, 1]),
        "draft_column_target_ids": torch.tensor([4, 9, 9]),
    },
    "probabilities": {
        "target": torch.rand(BATCH, GAMMA + 1, VOCAB, generator=_generator()),
        "draft": torch.rand(BATCH, GAMMA, VOCAB, generator=_generator()),
        "target_is_probs": True,
        "draft_is_probs": True,
    },
}


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("case", VERIFY_CASES)
def test_verify_passes_opcheck(case: str, backend: str) -> None:
    operator = getattr(torch.ops, NAMESPACES[backend]).verify.default
    torch.library.opcheck(operator, _verify_arguments(**VERIFY_CASES[case]))


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filters, bias and masks"])
def test_sample_passes_opcheck(filtered: bool, backend: str) -> None:
    parameters = tuple(_FILTERS.values()) if filtered else (torch.ones(1, dtype=torch.float64), None, None, None)
    operator = getattr(torch.ops, NAMESPACES[backend]).sample.default
    logits = torch.randn(BATCH, VOCAB, generator=_generator())
    adjustment = tuple(_ADJUSTMENT.values()) if filtered else (None,) * 4
    torch.library.opcheck(
        operator, (logits, *parameters, *adjustment, torch.arange(BATCH), torch.zeros(1, dtype=torch.int64))
    )


@pytest.mark.usefixtures("on_backend")
def test_compiles_as_one_graph_with_the_eager_result() -> None:
    token_ids, target, draft = _inputs()
    temperature = torch.tensor([0.0, 0.7, 1.3])

    def round_trip(target: torch.Tensor, draft: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = specker.sample(draft[:, 0], temperature=temperature, seed=5)
        result = specker.verify(token_ids, target, draft, temperature=temperature, seed=9, return_logprobs=True)
        return drawn.token_ids, drawn.receipt.values, *result[:6]

    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(target, draft), round_trip(target, draft), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_numbers_that_change_from_call_to_call_compile() -> None:
    token_ids, target, draft = _inputs()

    def round_trip(seed: int, position: int, temperature: float) -> tuple[torch.Tensor, ...]:
        drawn = specker.sample(draft[:, 0], temperature=temperature, seed=seed, position=position)
        result = specker.verify(token_ids, target, draft, temperature=temperature, seed=seed, position=position)
        return drawn.token_ids, result.token_ids, result.seed

    # From the second call on a seed is a symbol, which only the last step of a compiler has to put into words.
    compiled = torch.compile(round_trip, fullgraph=True)
    for numbers in ((1, 0, 0.5), (2, 3, 0.7), (-5, 2**62, 0.9), (2**63 - 9, 1, 0.9)):
        for got, wanted in zip(compiled(*numbers), round_trip(*numbers), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.usefixtures("on_backend")
def test_results_have_no_gradient_and_none_is_made_up(device: torch.device) -> None:
    token_ids, target, draft = (tensor.to(device) for tensor in _inputs())
    target.requires_grad_()
    draft.requires_grad_()
    receipt = specker.sample(draft[:, 0], seed=1).receipt
    result = specker.verify(token_ids, target, draft, seed=1, return_logprobs=True, return_accept_probs=True)
    assert not any(tensor.requires_grad for tensor in (receipt.values, *result))
    assert result.logprobs is not None
    with pytest.raises(RuntimeError, match="does not require grad"):
        result.logprobs.sum().backward()


def test_a_compiled_call_follows_the_backend_forced_around_it() -> None:
    token_ids, target, draft = _inputs()
    seen = []

    def spy(*arguments: Any) -> Any:
        seen.append("reference")
        return operators.reference.verify_plain(*arguments)

    library = torch.library.Library("specker_reference", "IMPL")
    library.impl("verify_plain", spy, "CPU")
    try:
        compiled = torch.compile(
            lambda: specker.verify(token_ids, target, draft, seed=1), fullgraph=True, backend="eager"
        )
        compiled()
        before = len(seen)
        with specker.backend("reference"):
            compiled()
        assert len(seen) > before
    finally:
        library._destroy()


def test_fake_tensors_leave_nothing_behind() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        specker.sample(torch.zeros(2, 4), temperature=0.37, seed=1)
    assert specker.sample(torch.zeros(2, 4), temperature=0.37, seed=1).token_ids.shape == (2,)


def test_backend_is_forced_in_this_thread_only() -> None:
    seen: dict[str, str] = {}

    def look() -> None:
        seen["other"] = str(operators.operator("verify", torch.device("cpu")))

    with specker.backend("reference"):
        seen["this"] = str(operators.operator("verify", torch.device("cpu")))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == {"this": "specker_reference.verify.default", "other": "specker.verify.default"}


def test_backends_nest_and_are_restored_after_an_error() -> None:
    def name() -> str:
        return str(operators.operator("sample", torch.device("cpu")))

    with specker.backend("reference"):
        with pytest.raises(ValueError, match="got 'nothing'"), specker.backend("triton"):
            specker.backend("nothing").__enter__()
        with specker.backend("triton"):
            assert name() == "specker_triton.sample.default"
        assert name() == "specker_reference.sample.default"
    assert name() == "specker.sample.default"


def test_an_unknown_backend_raises() -> None:
    with pytest.raises(ValueError, match=r"backend: expected one of \['cpp', 'reference', 'triton'\], got 'cuda'"):
        specker.backend("cuda").__enter__()


def test_cpp_without_its_extension_raises_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_EXTENSION", False)
    message = "backend 'cpp' cannot serve: the C\\+\\+ extension specker._C is not installed"
    with pytest.raises(specker.BackendUnavailableError, match=message), specker.backend("cpp"):
        pass


def test_triton_on_cpu_tensors_without_the_interpreter_raises_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if torch.cuda.is_available():
        with (
            specker.backend("triton"),
            pytest.raises(specker.BackendUnavailableError, match="by the interpreter only"),
        ):
            specker.verify(*_inputs(), seed=0)
    else:
        with pytest.raises(specker.BackendUnavailableError, match="no GPU driver"), specker.backend("triton"):
            pass


def test_cpp_on_tensors_elsewhere_raises_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_EXTENSION", True)
    with (
        specker.backend("cpp"),
        pytest.raises(specker.BackendUnavailableError, match=r"serves CPU tensors, got .* meta"),
    ):
        specker.verify(*(tensor.to("meta") for tensor in _inputs()), seed=torch.zeros(BATCH, device="meta").long())


def test_status_numbers_agree_in_all_three_languages() -> None:
    for path in ("csrc/contract.h", "kernels/contract.py"):
        text = _source(path)
        for bit in specker.Status:
            assert _constant(text, bit.name or "") == int(bit), f"{path}: {bit.name}"


def _source(path: str) -> str:
    from pathlib import Path

    return (Path(__file__).parent.parent / path).read_text()


def _constant(text: str, name: str) -> int | None:
    """Return the number that `name` is set to in C++ or Python, `1 << n` included."""
    import re

    camel = "k" + "".join(part.capitalize() for part in name.split("_"))
    found = re.search(rf"\b(?:{name}|{camel})\b[^=\n]*=\s*(?:tl\.constexpr\()?\s*(?:1u?\s*<<\s*(\d+)|(\d+))", text)
    if found is None:
        return None
    return 1 << int(found[1]) if found[1] else int(found[2])
