"""Tests written for a GPU, on a CPU: the device names in their calls are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Calls every function of torch with "cpu" where the caller names a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace device names among the arguments."""
        named = {name: _device(value) for name, value in (kwargs or {}).items()}
        return func(*map(_device, args), **named)


def _device(value: Any) -> Any:
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def run(item: pytest.Item) -> Iterator[None]:
    """Run the rest of a hook around a test with the device names replaced."""
    with _OnCpu():
        yield


def skip_what_cannot_run(items: list[pytest.Item], reasons: dict[str, str]) -> None:
    """Mark tests whose name fits a pattern as skipped, with the reason."""
    for item in items:
        reason = next((reason for pattern, reason in reasons.items() if fnmatch(item.name, pattern)), None)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
