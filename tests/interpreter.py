"""Make Triton's interpreter quick enough for a test run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any


def replace_language_once() -> None:
    """Let the interpreter put its functions in place of the language's once and leave them there.

    By default it looks through the whole language at every call of every device function, and takes back only what the
    kernel itself replaced, not what the functions it calls did. This halves the time of a kernel and changes no result.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    replace: Callable[..., Any] = interpreter._patch_lang
    done: set[frozenset[int]] = set()

    def replace_once(function: Any) -> Any:
        modules = (language, language.core)
        seen = frozenset(id(value) for value in function.__globals__.values() if any(value is each for each in modules))
        if seen not in done:
            replace(function)
            done.add(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once
