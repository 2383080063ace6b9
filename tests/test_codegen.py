"""The generated code of every kernel, for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import inspect
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
codegen = pytest.importorskip("bench.codegen", exc_type=ImportError)
gpu_code = pytest.importorskip("bench.gpu_code", exc_type=ImportError)
ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Every kernel for every GPU takes ten minutes of one processor; the few that are compiled otherwise tell most of it.
EVERYTHING = os.environ.get("SPECKER_CODEGEN") == "all"


def names_for(target: str) -> list[str]:
    """Return the names of the kernels that are compiled for one GPU."""
    entries = [*codegen.KERNELS, *(codegen.ADJUSTED if EVERYTHING else [])]
    if EVERYTHING:
        return [entry.name for entry in entries]
    few = [f"{name}_{dtype}_128256" for name in ("row_statistics", "residual_mass") for dtype in ("bf16", "fp32")]
    if target == "gfx942":
        few += [f"{name}_bf16_128257" for name in codegen.STREAMING]
    if target == "sm_90":
        few += [entry.name for entry in entries if "bf16" in entry.name and "_padded" not in entry.name]
    return [entry.name for entry in entries if entry.name in few]


@pytest.mark.parametrize("target", TARGETS)
def test_the_generated_code_is_within_its_limits(target: str, tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in [*codegen.KERNELS, *codegen.ADJUSTED]}
    codes = {code["name"]: code for code in compile_kernels(target, names_for(target), tmp_path)}
    assert codes.pop("narrow_offset")["narrow_products"], "the check does not see the fault it is there for"
    assert list(codes) == names_for(target)
    failures = [f"{name}: {failure}" for name, code in codes.items() for failure in beyond_limits(entries[name], code)]
    assert not failures, "\n".join(failures)


def beyond_limits(entry: Any, code: dict[str, Any]) -> list[str]:
    """Return in words which limits a kernel does not keep."""
    failures = [f"a 32-bit product reaches an address: {product}" for product in code["narrow_products"]]
    if code["spill_bytes"]:
        failures.append(f"{code['spill_bytes']} bytes are spilled by {code['spill_instructions']} instructions")
    if not entry.elements:
        return failures
    return failures + [failure for loop in code["loops"] for failure in beyond_loop_limits(entry, code, loop)]


def beyond_loop_limits(entry: Any, code: dict[str, Any], loop: dict[str, Any]) -> list[str]:
    """Return in words which limits a loop over whole tiles of the vocabulary does not keep."""
    failures = []
    share = code["threads"] / entry.elements
    size = 32 if "fp32" in entry.name else 16
    # What is gathered, single values of candidates, comes by the width of a logit.
    widths = {int(width): count for width, count in loop["load_widths"].items() if int(width) != size}
    # Of the words behind an unaligned tile half may do, which are loaded beside the tile itself.
    if not set(widths) <= {64, 128} or widths.get(128, 0) * 128 < size / share:
        failures.append(f"rows are not read by 128 bits: {loop['load_widths']}")
    most = codegen.MAX_INSTRUCTIONS * size / 16
    if loop["instructions"] * share > most:
        failures.append(f"{loop['instructions'] * share:.1f} instructions a logit, more than {most}")
    if loop["special"] * share > codegen.MAX_SPECIAL:
        failures.append(f"{loop['special'] * share:.2f} special-function operations a logit")
    if loop["barriers"] > codegen.MAX_BARRIERS:
        failures.append(f"{loop['barriers']} barriers a trip")
    return failures


def compile_kernels(target: str, names: list[str], cache: Path) -> list[dict[str, Any]]:
    """Return what a process without the interpreter says about the kernels it compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = os.environ.get("SPECKER_CODEGEN_CACHE", str(cache))
    command = [sys.executable, "-m", "tests._compile_kernels", target, *names]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_every_launched_kernel_is_listed_as_it_is_launched() -> None:
    from specker.kernels import contract, rounds

    names = [entry.name for entry in codegen.KERNELS]
    assert len(set(names)) == len(names)
    assert codegen.Kernel._fields == (
        "name", "function", "signature", "constexprs", "divisible", "elements", "options"
    )  # fmt: skip
    for kernel in rounds.KERNELS:
        entries = [entry for entry in codegen.KERNELS if entry.function is kernel]
        for kind in ("*fp32", "*bf16"):
            vocabs = {
                entry.name.split("_12")[1][:4] for entry in entries if entry.signature["target_logits_ptr"] == kind
            }
            streams = any(entry.elements for entry in entries)
            assert vocabs == ({"8256", "8257"} if streams else {"8256"})
        for entry in entries:
            assert list(entry.signature) == list(inspect.signature(kernel.fn).parameters)
            assert entry.options == rounds.OPTIONS[kernel.__name__]
            assert {name for name, kind in entry.signature.items() if kind == "constexpr"} == set(entry.constexprs)
            assert entry.constexprs.get("SHARD", 1024) == contract.shard_size(128_256)


@pytest.mark.parametrize(
    ("line", "width"),
    [("LDG.E.128 R4, desc[UR4][R2.64]", 128), ("LDG.E.U16.CONSTANT R4, [R2.64]", 16), ("LDG.E R4, [R2]", 32)],
)
def test_widths_are_those_of_the_loads_not_of_the_addresses(line: str, width: int) -> None:
    assert gpu_code._nvidia_loop([line]).load_widths == {width: 1}


def test_innermost_loops_over_rows_are_found_in_nested_ones() -> None:
    lines = [(0, "MOV"), (16, "LDG.E.128 R4, [R2]"), (32, "LDG.E R4, [R2]"), (48, "BRA 0x20"), (64, "BRA 0x10"),
             (80, "LDG.E R4, [R2]"), (96, "BRA 0x0")]  # fmt: skip
    loops = gpu_code._loops(lines, [(48, 32), (64, 16), (96, 0)], gpu_code._nvidia_loop)
    assert [(loop.instructions, loop.load_widths) for loop in loops] == [(4, {128: 1, 32: 1})]


AMD_CODE = """
    .private_segment_fixed_size: 36
    .vgpr_count: 104
    .vgpr_spill_count: 0
    v_mov_b32_e32 v0, 0
    s_endpgm
"""


def test_memory_set_aside_is_no_spill_until_it_is_used() -> None:
    assert gpu_code._amd(AMD_CODE)["spill_bytes"] == 0
    assert gpu_code._amd(AMD_CODE + "    scratch_store_dword off, v0, off\n")["spill_bytes"] == 36
