"""Which operators of a call make tensors as large as a row of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    """Notes the name of every operator whose result holds new memory of `numel` elements or more."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and look at the memory of what it returns."""
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        for leaf in filter(_is_tensor, tree_leaves(result)):
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes() >= self.numel * leaf.element_size():
                self.names.append(str(func))
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def large_results(call: Callable[[], object], numel: int) -> list[str]:
    """Return the operators of a call whose results hold `numel` elements or more in memory of their own."""
    with _Recorder(numel) as recorder:
        call()
    return recorder.names
