"""The generated code of every kernel, for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
]
ROOT = Path(__file__).resolve().parents[1]
KERNELS = {"row_statistics", "filter_thresholds", "residual_mass", "emit_tokens"}


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("sm_80", "bf16"), ("sm_90", "bf16"), ("sm_90", "fp32"), ("sm_100", "bf16"), ("gfx942", "bf16")],
)
def test_every_kernel_compiles_without_spills_or_32_bit_offsets(target: str, dtype: str, tmp_path: Path) -> None:
    # A vocabulary that no vector length divides: wide loads may not depend on it.
    codes = {code["name"]: code for code in compile_kernels(target, dtype, 128257, tmp_path)}
    assert codes.pop("narrow_offset")["narrow_products"], "the check does not see the fault it is there for"
    assert {name.split(f"_{dtype}")[0] for name in codes} == KERNELS
    for name, code in codes.items():
        assert code["narrow_products"] == [], name
        # Only rounds with biases, masks or a reduced vocabulary may keep some registers in memory.
        allowed = 512 if name.endswith("_adjusted") else 0
        assert code["spill_bytes"] <= allowed, (name, code)
        assert allowed or code["spill_instructions"] == 0, (name, code)
        assert code["wide_loads"] > 0, (name, code)


def compile_kernels(target: str, dtype: str, vocab: int, cache: Path) -> list[dict[str, Any]]:
    """Return what a process without the interpreter says about the kernels it compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "tests._compile_kernels", target, dtype, str(vocab)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
