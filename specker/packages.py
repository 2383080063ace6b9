"""Packages that only language models need, imported when they are first asked for."""

from __future__ import annotations

import importlib
from types import ModuleType


class ModelUnavailableError(RuntimeError):
    """A model, or a package it needs, cannot be loaded; the message says which and what helps."""


def require(module: str, requirement: str = "specker[transformers]") -> ModuleType:
    """Import a package that only models need, saying in words how to get it where it is absent.

    Raises:
        ModelUnavailableError: the package is not installed.

    Example:
        >>> require("json").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only an absent package is excused; one that is present and fails shows its own error.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ModelUnavailableError(
            f"models need the package {module.split('.')[0]}: pip install '{requirement}'"
        ) from error
