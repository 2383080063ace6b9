"""Packages and the C++ extension; what is the same on every machine stands in pyproject.toml."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

OLDEST_TORCH = (2, 10)
# Results must not depend on what the compiler contracts: fused multiply-adds are written where they are meant. Errno
# and floating-point traps, which nobody reads, would keep loops from being vectorised; NaN and inf keep their meaning.
MATH_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMPILE_FLAGS = ["-O3", "-std=c++17", "-fopenmp-simd", *MATH_FLAGS, "-Wall", "-g0"]
# Holds torch's headers to what 2.10 promises: one build serves every later release.
ABI_MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000")]


def find_compiler() -> str | None:
    """Return the C++ compiler to use: what CXX names and nothing else, or the first usual one on the path."""
    chosen = os.environ.get("CXX")
    if chosen:
        candidates = [chosen]
    else:
        built_python = shlex.split(sysconfig.get_config_var("CXX") or "")
        candidates = [*built_python[:1], "c++", "g++", "clang++"]
    for candidate in candidates:
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return candidate
    return None


def obstacle() -> str:
    """Say why the extension cannot be built here; an empty string means that it can."""
    if os.name != "posix":
        return "its sources are written for GCC and Clang"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return "torch is not importable in the build environment (install it, then use --no-build-isolation)"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return f"torch {torch.__version__} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    if find_compiler() is None:
        return f"no C++ compiler was found (CXX={os.environ.get('CXX', '')!r})"
    return ""


def wants_extension() -> bool:
    """Decide before anything is declared, so that a wheel without the extension is tagged as pure Python."""
    choice = os.environ.get("SPECKER_BUILD_EXT", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"SPECKER_BUILD_EXT: expected 0, 1 or nothing, got {choice!r}")
    reason = "SPECKER_BUILD_EXT=0" if choice == "0" else obstacle()
    if reason and choice == "1":
        raise SystemExit(f"SPECKER_BUILD_EXT=1 asks for the C++ extension, but {reason}")
    if reason:
        print(f"specker: building without the C++ extension: {reason}", file=sys.stderr)
    return not reason


def extension_options() -> dict[str, Any]:
    """Return the arguments of setup() that declare specker._C."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    # torch and setuptools each have their own idea of a default compiler: both obey CXX.
    os.environ["CXX"] = str(find_compiler())
    # No source includes Python.h, so they compile where Python's own headers are missing.
    extension = CppExtension(
        "specker._C",
        sorted(str(source) for source in Path("csrc").glob("*.cpp")),
        depends=sorted(str(header) for header in Path("csrc").glob("*.h")),
        define_macros=ABI_MACROS,
        extra_compile_args={"cxx": COMPILE_FLAGS},
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        # A few small source files: ninja would save seconds and be one more thing to install.
        "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=False)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    # kernels/ and bench/ have no __init__.py, so find_packages cannot see them through their links in specker/.
    packages=[*find_packages(include=["specker", "specker.*"]), "specker.bench", "specker.kernels"],
    package_dir={"specker.bench": "bench", "specker.kernels": "kernels"},
    package_data={"specker": ["py.typed"], "specker.bench": ["*.c"]},
    **(extension_options() if wants_extension() else {}),
)
