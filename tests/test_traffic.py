"""The traffic model against launches and loads of interpreted kernels."""

from __future__ import annotations

import importlib
from typing import Any

import numpy
import pytest
import torch

import specker

traffic = pytest.importorskip("bench.traffic")
traffic_engines = pytest.importorskip("bench.traffic_engines")
eager = pytest.importorskip("bench.eager")
footprint = pytest.importorskip("bench.footprint")
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


def test_the_engines_steps_add_up() -> None:
    batch, gamma, vocab, rejected = 32, 4, 128_256, 0.76
    found = {
        engine.name: traffic_engines.counts(engine, batch, gamma, vocab, rejected)
        for engine in traffic_engines.ENGINES
    }  # fmt: skip
    assert len(found) == len(traffic_engines.ENGINES) == 6
    # Added up by hand: bytes an entry, a sequence.
    by_hand = {
        "eager PyTorch": (12, 9 * (6 + 8) + 8 + 8 + 12 + 8 + 12 + 4 + 12 + 4),
        "vLLM, first runner": (15, 4 + 6 + 8 + 8 + 4 + 12 + 4 + gamma * (4 + 6 + 8 + 8 + 8 + 12) + 4 + 8),
        "vLLM, second runner": (4, 5 * (6 + 8) + gamma * 6 + 4 + rejected * 2),
        "vLLM, second runner, temperature 1": (2, gamma * 4 + 2 + rejected * 2),
        "SGLang, chain kernel": (3, 5 * (6 + 8) + 6 + rejected * 6),
        "FlashInfer, chain kernel": (3, 5 * (6 + 8) + 6 + rejected * 6),
    }
    for name, (launches, entry) in by_hand.items():
        assert found[name].launches == launches, name
        assert found[name].bytes == pytest.approx(batch * vocab * entry), name
    least = traffic.floor(traffic.Round(batch, gamma, vocab, 2, rejected=rejected))
    assert all(counted.bytes >= least * 0.999 for counted in found.values())
    assert found["vLLM, second runner, temperature 1"].sweeps == pytest.approx(2 * gamma + 1 + rejected)


def test_eager_code_moves_what_its_steps_say() -> None:
    batch, gamma, vocab = 3, 4, 20_000
    target = torch.randn(batch, gamma + 1, vocab).bfloat16()
    draft = target[:, :gamma].clone()
    watched = footprint._Traffic()
    with watched:
        eager.eager_round(torch.zeros(batch, gamma, dtype=torch.int64), target, draft)
    engine = traffic_engines.ENGINES[0]
    steps = [step for step in engine.steps if step not in traffic_engines.MULTINOMIAL]
    told = traffic_engines.counts(engine._replace(steps=tuple(steps)), batch, gamma, vocab, 1.0)
    # The operator that draws is one of its own to whoever watches: it reads its row.
    assert watched.moved == pytest.approx(told.bytes + batch * vocab * 4, rel=0.01)


def test_every_engine_is_compared_with_the_floor() -> None:
    rows = traffic.compare(32, 4, 128_256)
    assert [name for name, _, _ in rows] == ["specker", "specker, receipt"] + [
        engine.name for engine in traffic_engines.ENGINES
    ]
    asked = traffic.Round(32, 4, 128_256, 2)
    _, counted, ratio = rows[0]
    assert counted.launches == 3
    assert counted.bytes == traffic.traffic(asked).total
    assert ratio == counted.bytes / traffic.floor(asked)
    assert counted.sweeps == pytest.approx(9 + 2 * 0.76)
