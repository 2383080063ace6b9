"""The kernels of `verify_into` beside the round's own, compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def test_the_small_kernels_compile_whatever_is_absent(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = os.environ.get("SPECKER_CODEGEN_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "tests._compile_engine_kernels", *TARGETS]
    root = Path(__file__).resolve().parents[1]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    # Few registers: many of these programs fit beside one another.
    registers = [int(line.split()[-1]) for line in ran.stdout.splitlines()]
    assert len(registers) == 2 * 2 * len(TARGETS)
    assert max(registers) <= 64
