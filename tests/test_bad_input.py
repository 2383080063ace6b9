"""Arguments that are refused before anything runs, each in its own words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from specker import DraftReceipt, Sampling

from . import cases

pytestmark = pytest.mark.usefixtures("on_backend")
NAN, INF = float("nan"), float("inf")
DOUBLE, INT = torch.float64, torch.int64


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=dtype)


def receipt(**fields: Any) -> DraftReceipt:
    """Return a receipt for two sequences, gamma 2 and vocabulary 5, with some fields replaced."""
    values: dict[str, Any] = {"values": zeros(2, 2, 4, dtype=DOUBLE), "vocab": 5, "dtype": torch.float32}
    return DraftReceipt(**({"sampling": Sampling()} | values | fields))


# By the class of an argument, the dtypes it may have.
WANTED = {
    **dict.fromkeys(("target_logits", "draft_logits", "draft_probs", "logits"), "float32 or bfloat16 or float16"),
    **dict.fromkeys(("draft_token_ids", "num_draft_tokens", "draft_index", "cu_num_draft_tokens"), "int64 or int32"),
    **dict.fromkeys(("top_k",), "int64 or int32"),
    **dict.fromkeys(("temperature", "top_p", "min_p"), "float32 or float64"),
    **dict.fromkeys(("uniforms",), "float64"),
    **dict.fromkeys(("seed", "position"), "int64"),
}
NO_TENSOR: list[tuple[str, str, Any, str]] = [
    ("verify", "target_logits", [[[0.0]]], "list"),
    ("verify", "target_logits", None, "NoneType"),
    ("verify", "draft_token_ids", [[1, 1]] * 2, "list"),
    ("verify", "draft_logits", 3, "int"),
    ("verify", "num_draft_tokens", 2, "int"),
    ("verify", "draft_index", [0, 1], "list"),
    ("verify", "uniforms", 0.5, "float"),
    ("verify_from_probs", "target_probs", 1, "int"),
    ("verify_flat", "cu_num_draft_tokens", [0, 2, 4], "list"),
    ("sample", "logits", [0.0], "list"),
]
WRONG_DTYPE = [
    ("verify", "target_logits", zeros(2, 3, 5, dtype=DOUBLE)),
    ("verify", "draft_logits", zeros(2, 2, 5, dtype=torch.int32)),
    ("verify_from_probs", "draft_probs", zeros(2, 2, 5, dtype=DOUBLE)),
    ("sample", "logits", zeros(2, 5, dtype=INT)),
    ("verify", "draft_token_ids", zeros(2, 2, dtype=torch.int16)),
    ("verify", "num_draft_tokens", zeros(2)),
    ("verify", "draft_index", zeros(2)),
    ("verify_flat", "cu_num_draft_tokens", zeros(3)),
    ("verify", "uniforms", zeros(2, 3, 2)),
    ("verify", "temperature", zeros(2, dtype=torch.float16)),
    ("verify", "top_k", zeros(2)),
    ("verify", "top_p", zeros(2, dtype=INT)),
    ("sample", "min_p", zeros(2, dtype=INT)),
    ("verify", "seed", zeros(2, dtype=torch.int32)),
    ("verify", "position", zeros(2, dtype=torch.int32)),
]
WRONG_SHAPE: list[tuple[str, str, torch.Tensor, str]] = [
    ("verify", "target_logits", zeros(3, 5), "batch, gamma + 1, vocab"),
    ("verify", "draft_token_ids", zeros(2, 1, dtype=INT), "2, 2"),
    ("verify", "draft_token_ids", zeros(4, dtype=INT), "2, 2"),
    ("verify", "draft_logits", zeros(2, 3, 5), "2, 2, 5"),
    ("verify", "draft_logits", zeros(2, 2, 4), "2, 2, 5"),
    ("verify", "draft_logits", zeros(2, 2, 6), "2, 2, 5"),
    ("verify", "draft_index", zeros(3, dtype=INT), "2,"),
    ("verify", "num_draft_tokens", zeros(1, dtype=INT), "2,"),
    ("verify", "temperature", zeros(2, 2), "2,"),
    ("verify", "top_k", zeros(1, dtype=INT), "2,"),
    ("verify", "top_p", zeros(3), "2,"),
    ("verify", "min_p", zeros(), "2,"),
    ("verify", "seed", zeros(4, dtype=INT), "2,"),
    ("verify", "position", zeros(2, 2, dtype=INT), "2,"),
    ("verify", "uniforms", zeros(2, 2, 2, dtype=DOUBLE), "2, 3, 2"),
    ("verify_from_probs", "target_probs", zeros(3, 5), "batch, gamma + 1, vocab"),
    ("verify_from_probs", "draft_probs", zeros(2, 2, 6), "2, 2, 5"),
    ("verify_flat", "target_logits", zeros(2, 3, 5), "rows, vocab"),
    ("verify_flat", "draft_token_ids", zeros(5, dtype=INT), "4,"),
    ("verify_flat", "draft_logits", zeros(5, 5), "4, 5"),
    ("verify_flat", "uniforms", zeros(4, 2, dtype=DOUBLE), "6, 2"),
    ("verify_flat", "cu_num_draft_tokens", zeros(3, 1, dtype=INT), "batch + 1,"),
    ("sample", "logits", zeros(5), "batch, vocab"),
    ("sample", "temperature", zeros(1), "2,"),
]
ELSEWHERE = [
    ("verify", "draft_token_ids", zeros(2, 2, dtype=INT)),
    ("verify", "draft_logits", zeros(2, 2, 5)),
    ("verify", "num_draft_tokens", zeros(2, dtype=INT)),
    ("verify", "temperature", zeros(2)),
    ("verify", "seed", zeros(2, dtype=INT)),
    ("verify", "uniforms", zeros(2, 3, 2, dtype=DOUBLE)),
    ("verify_flat", "cu_num_draft_tokens", zeros(3, dtype=INT)),
    ("sample", "top_k", zeros(2, dtype=INT)),
]
NUMBER, COUNT = "expected a number or a (batch,) tensor", "expected an int or a (batch,) tensor"
SEED = "expected an int, a (batch,) int64 tensor or None"
WRONG_KIND: list[tuple[str, str, Any, str, str]] = [
    ("verify", "temperature", "hot", NUMBER, "str"),
    ("verify", "temperature", True, NUMBER, "bool"),
    ("verify", "top_p", None, NUMBER, "NoneType"),
    ("sample", "min_p", [0.1, 0.1], NUMBER, "list"),
    ("verify", "top_k", 2.0, COUNT, "float"),
    ("verify", "top_k", True, COUNT, "bool"),
    ("verify", "seed", 1.5, SEED, "float"),
    ("sample", "seed", True, SEED, "bool"),
    ("verify", "position", "0", SEED, "str"),
    ("verify", "position", False, SEED, "bool"),
    ("verify", "draft_receipt", zeros(2, 2, 4), "expected a DraftReceipt", "Tensor"),
]
FINITE, SHARE, WIDE = "expected a value finite and >= 0", "expected a value in [0, 1]", "expected a 64-bit integer"
OUT_OF_RANGE: list[tuple[str, str, Any, str]] = [
    *(
        (call, name, value, FINITE)
        for call in ("verify", "sample", "verify_from_probs", "verify_flat")
        for name, values in (("temperature", (-0.5, NAN, INF)), ("top_p", (-0.1, NAN, -INF)))
        for value in values
    ),
    *((call, "min_p", value, SHARE) for call in ("verify", "sample") for value in (-0.1, 1.1, NAN)),
    ("verify", "position", 2**63, WIDE),
    ("sample", "position", -(2**63) - 1, WIDE),
    *(("verify_flat", "max_num_draft_tokens", value, "expected an int >= 0") for value in (-1, 2.0, True, None)),
]
STRIDES = "expected a contiguous last axis (stride 1), got strides"
SOME = "expected a vocabulary of at least 1, got shape"
BONUS = "expected gamma + 1 = 3 rows a sequence, the last behind all 2 draft tokens, got shape"
SUMS = "expected batch + 1 prefix sums for 6 target rows, got shape"
FINAL = "expected None with draft_probs, which are final, got"
MADE = "draft_receipt: expected one made"
# The function, the arguments that differ from good ones, the whole message of a ValueError.
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "verify", {"target_logits": zeros(2, 0, 5)},
        "target_logits: expected gamma + 1 >= 1 rows a sequence, got shape (2, 0, 5)",
    ),
    *(
        (call, {name: zeros(2, 2, 5)}, f"{name}: {BONUS} (2, 2, 5)")
        for call, name in (("verify", "target_logits"), ("verify_from_probs", "target_probs"))
    ),
    ("verify", {"target_logits": zeros(2, 3, 0)}, f"target_logits: {SOME} (2, 3, 0)"),
    ("sample", {"logits": zeros(2, 0)}, f"logits: {SOME} (2, 0)"),
    ("verify", {"target_logits": zeros(2, 5, 3).transpose(1, 2)}, f"target_logits: {STRIDES} (15, 1, 3)"),
    ("verify", {"draft_logits": zeros(2, 2, 10)[..., ::2]}, f"draft_logits: {STRIDES} (20, 10, 2)"),
    ("sample", {"logits": zeros(2, 1).expand(2, 5)}, f"logits: {STRIDES} (1, 0)"),
    ("verify_flat", {"cu_num_draft_tokens": zeros(0, dtype=INT)}, f"cu_num_draft_tokens: {SUMS} (0,)"),
    ("verify_flat", {"cu_num_draft_tokens": zeros(9, dtype=INT)}, f"cu_num_draft_tokens: {SUMS} (9,)"),
    (
        "verify", {"draft_logits": None, "draft_probs": zeros(2, 2, 4)},
        "draft_probs: expected shape (2, 2, 5), got (2, 2, 4)",
    ),
    (
        "verify", {"draft_index": zeros(2, dtype=INT), "draft_logits": zeros(7, 3, 5)},
        "draft_logits: expected shape (rows, 2, 5), got (7, 3, 5)",
    ),
    (
        "verify", {"draft_sampling": Sampling(temperature=zeros(3))},
        "draft_sampling.temperature: expected shape (2,), got (3,)",
    ),
    ("verify", {"draft_sampling": Sampling(top_p=-0.1)}, f"draft_sampling.top_p: {FINITE}, got -0.1"),
    *(
        ("verify", {"draft_logits": None, name: value}, f"{name}: expected draft_logits with it, got None")
        for name, value in (
            ("draft_sampling", Sampling()), ("draft_receipt", receipt()), ("draft_index", zeros(2, dtype=INT))
        )
    ),
    (
        "verify_from_probs", {"draft_probs": None, "draft_index": zeros(2, dtype=INT)},
        "draft_index: expected draft_probs with it, got None",
    ),
    ("verify", {"draft_probs": zeros(2, 2, 5)}, f"draft_logits: {FINAL} Tensor"),
    *(
        ("verify", {"draft_logits": None, "draft_probs": zeros(2, 2, 5), name: value}, f"{name}: {FINAL} {kind}")
        for name, value, kind in (
            ("draft_sampling", Sampling(), "Sampling"), ("draft_receipt", receipt(), "DraftReceipt")
        )
    ),
    *(
        (
            call, {"uniforms": torch.full(shape, 0.5, dtype=DOUBLE), name: 0},
            "uniforms: expected neither seed nor position with it, got one",
        )
        for call, shape in (("verify", (2, 3, 2)), ("verify_flat", (6, 2)))
        for name in ("seed", "position")
    ),
    ("verify", {"draft_receipt": receipt(vocab=7)}, "draft_receipt: expected one of vocabulary 5, got 7"),
    ("verify", {"draft_receipt": receipt(dtype=torch.float16)}, f"{MADE} from torch.float32 rows, got torch.float16"),
    ("verify", {"draft_receipt": receipt(), "temperature": 0.5}, f"{MADE} with temperature 0.5, got 1.0"),
    ("verify", {"draft_receipt": receipt(sampling=Sampling(top_k=3))}, f"{MADE} with top_k 0, got 3"),
    ("verify", {"draft_receipt": receipt(), "draft_sampling": Sampling(top_p=0.9)}, f"{MADE} with top_p 0.9, got 1.0"),
    ("verify", {"draft_receipt": receipt(sampling=Sampling(min_p=0.1))}, f"{MADE} with min_p 0.0, got 0.1"),
    (
        "verify", {"draft_receipt": receipt(values=zeros(2, 4, dtype=DOUBLE))},
        "draft_receipt: expected shape (2, 2, 4), got (2, 4)",
    ),
]  # fmt: skip


def names(table: list[Any]) -> list[str]:
    """Return ids of a table: the function, the argument, its place."""
    return [
        f"{row[0]}-{row[1] if isinstance(row[1], str) else next(iter(row[1]))}-{at}" for at, row in enumerate(table)
    ]


def refused(exception: type[Exception], message: str, call: str, device: torch.device, **changed: Any) -> None:
    """Check that a call is refused with a message and no other."""
    with pytest.raises(exception, match=f"^{re.escape(message)}$"):
        cases.good_call(call, device, **changed)


@pytest.mark.parametrize("call", cases.GOOD)
def test_good_arguments_are_accepted(call: str, device: torch.device) -> None:
    assert cases.good_call(call, device).status.tolist() == [0, 0]


@pytest.mark.parametrize("case", NO_TENSOR, ids=names(NO_TENSOR))
def test_what_is_no_tensor_is_refused(case: tuple[str, str, Any, str], device: torch.device) -> None:
    call, name, value, got = case
    refused(TypeError, f"{name}: expected a tensor, got {got}", call, device, **{name: value})


@pytest.mark.parametrize("case", WRONG_DTYPE, ids=names(WRONG_DTYPE))
def test_another_dtype_is_refused(case: tuple[str, str, torch.Tensor], device: torch.device) -> None:
    call, name, value = case
    got = str(value.dtype).removeprefix("torch.")
    refused(TypeError, f"{name}: expected dtype {WANTED[name]}, got {got}", call, device, **{name: value})


@pytest.mark.parametrize("case", WRONG_SHAPE, ids=names(WRONG_SHAPE))
def test_another_shape_is_refused(case: tuple[str, str, torch.Tensor, str], device: torch.device) -> None:
    call, name, value, wanted = case
    message = f"{name}: expected shape ({wanted}), got {tuple(value.shape)}"
    refused(ValueError, message, call, device, **{name: value})


@pytest.mark.parametrize("case", ELSEWHERE, ids=names(ELSEWHERE))
def test_another_device_is_refused(case: tuple[str, str, torch.Tensor], device: torch.device) -> None:
    call, name, value = case
    at = torch.zeros(0, device=device).device
    message = f"{name}: expected device {at}, that of the target, got meta"
    refused(ValueError, message, call, device, **{name: value.to("meta")})


@pytest.mark.parametrize("case", WRONG_KIND, ids=names(WRONG_KIND))
def test_another_kind_is_refused(case: tuple[str, str, Any, str, str], device: torch.device) -> None:
    call, name, value, wanted, got = case
    refused(TypeError, f"{name}: {wanted}, got {got}", call, device, **{name: value})


@pytest.mark.parametrize("case", OUT_OF_RANGE, ids=names(OUT_OF_RANGE))
def test_a_number_out_of_range_is_refused(case: tuple[str, str, Any, str], device: torch.device) -> None:
    call, name, value, wanted = case
    refused(ValueError, f"{name}: {wanted}, got {value}", call, device, **{name: value})


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=names(CONTRADICTIONS))
def test_arguments_that_do_not_belong_together_are_refused(
    case: tuple[str, dict[str, Any], str], device: torch.device
) -> None:
    call, changed, message = case
    refused(ValueError, message, call, device, **changed)


def test_draft_sampling_is_checked_as_the_parameters_are(device: torch.device) -> None:
    wrong: Any = 1.5
    message = f"draft_sampling.top_k: {COUNT}, got float"
    refused(TypeError, message, "verify", device, draft_sampling=Sampling(top_k=wrong))


def test_a_receipt_of_other_numbers_is_refused(device: torch.device) -> None:
    message = "draft_receipt: expected dtype float64, got float32"
    refused(TypeError, message, "verify", device, draft_receipt=receipt(values=zeros(2, 2, 4)))
