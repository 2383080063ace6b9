"""The traffic model against launches and loads of interpreted kernels."""

from __future__ import annotations

import importlib
from typing import Any

import numpy
import pytest
import torch

import specker

traffic = pytest.importorskip("bench.traffic")
rounds = pytest.importorskip("specker.kernels.rounds")
pytestmark = pytest.mark.skipif(
    bool(specker.available_backends()["triton"]) or torch.cuda.is_available(),
    reason=specker.available_backends()["triton"] or "kernels are compiled here, not interpreted",
)
VOCAB = 9000


def counted_round(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, int], float]:
    """Return launches, bytes loaded from rows by kernel, and the share of sequences that rejected a token."""
    generator = torch.Generator().manual_seed(2)
    batch, gamma = 3, 2
    target = torch.randn(batch, gamma + 1, VOCAB, generator=generator)
    draft = target[:, :gamma] + torch.randn(batch, gamma, VOCAB, generator=generator) if flags["draft_rows"] else None
    filters = {"top_k": 5} if flags["filtered"] else {}
    spans = [(rows.data_ptr(), rows.data_ptr() + 4 * rows.numel()) for rows in (target, draft) if rows is not None]
    builder: Any = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    loads: dict[str, int] = {}
    current = [""]
    load, launch = type(builder).create_masked_load, rounds._launch

    def count(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        addresses = numpy.asarray(pointers.data).ravel()
        read = numpy.asarray(mask.data).ravel()
        inside = sum(((addresses >= begin) & (addresses < end) & read).sum() for begin, end in spans)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        loads[current[0]] = loads.get(current[0], 0) + int(inside) * size
        return load(self, pointers, mask, *rest)

    def name(kernel: Any, *rest: Any) -> None:
        current[0] = kernel.__name__
        loads.setdefault(current[0], 0)
        launch(kernel, *rest)

    tokens = torch.zeros(batch, gamma, dtype=torch.int64)
    with specker.backend("triton"):
        monkeypatch.setattr(type(builder), "create_masked_load", count)
        monkeypatch.setattr(rounds, "_launch", name)
        result = specker.verify(tokens, target, draft, seed=torch.arange(batch), **filters)
    rejected = float((result.num_accepted < gamma).double().mean())
    return len(loads), loads, rejected


@pytest.mark.parametrize("flags", [{"draft_rows": True, "filtered": False}, {"draft_rows": False, "filtered": False},
                                   {"draft_rows": True, "filtered": True}])  # fmt: skip
def test_the_model_tells_what_is_loaded(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launched, loads, rejected = counted_round(flags, monkeypatch)
    asked = traffic.Round(3, 2, VOCAB, 4, rejected=rejected, **flags)
    told = traffic.traffic(asked)
    assert launched == told.launches
    # Single values beside the rows: the logits of the tokens, candidates, and words at the ends of rows.
    assert loads["row_statistics"] == pytest.approx(told.statistics, rel=0.01)
    assert loads.get("filter_candidates", 0) <= told.filters * 1.01
    assert loads.get("filter_thresholds", 0) <= told.filters
    assert loads.get("residual_mass", 0) == pytest.approx(told.residual, rel=0.01)
    assert loads["emit_tokens"] <= told.draw * 1.05


def test_only_filters_are_far_from_the_floor() -> None:
    for name, flags in traffic.CASES.items():
        asked = traffic.Round(32, 4, 128_256, 2, **flags)
        ratio = traffic.traffic(asked).total / traffic.floor(asked)
        assert 1.0 <= ratio < (2.3 if flags.get("filtered") else 1.25), name
