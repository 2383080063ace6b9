"""The adapters under torch.compile: one graph each, what they write included."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

bench_adapters = pytest.importorskip("bench.bench_adapters", exc_type=ImportError)
ADAPTERS = bench_adapters.adapters(batch=2, gamma=3, vocab=50)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_a_call_is_one_graph_with_the_same_results(adapter: bench_adapters.Adapter) -> None:
    torch.compiler.reset()
    compiled = torch.compile(adapter.call, fullgraph=True, backend="aot_eager")
    results = []
    # The compiled call first: what it failed to write, the other one would have written.
    for call in (compiled, adapter.call):
        torch.manual_seed(0)
        # Tensors of the caller's that are written stand in the closure.
        held = [cell.cell_contents for cell in adapter.call.__closure__]
        results.append([leaf.tolist() for leaf in tree_leaves((call(), held)) if isinstance(leaf, torch.Tensor)])
    assert results[0] == results[1]
