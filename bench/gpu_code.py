"""What generated GPU code looks like, read off the code itself: registers, spills, loops, loads, barriers, offsets.

NVIDIA's machine code comes from the cuobjdump that Triton carries, AMD's from its assembly. A loop is what lies between
the target of a backward branch and that branch; those that load from global memory and hold no other such loop are
the loops over the vocabulary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
_NVIDIA_LOAD = re.compile(r"\bLDG\.E\S*")
_AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(\w+)")
_AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_AMD_SPECIAL = re.compile(r"\bv_(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
_RESULT = re.compile(r"^\s*(%[\w.-]+)(?::\d+)? = ([\w.]+)")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_VALUE = re.compile(r"%[\w.-]+")


class Loop(NamedTuple):
    """One trip of one loop, in instructions of one thread."""

    instructions: int
    special: int
    """Special-function operations."""
    barriers: int
    load_widths: dict[int, int]
    """Loads from global memory by their width in bits."""

    @property
    def bits(self) -> int:
        """Bits that a thread loads in a trip."""
        return sum(width * count for width, count in self.load_widths.items())


class Code(NamedTuple):
    """What one compiled kernel looks like."""

    registers: int
    shared: int
    """Bytes of shared memory of one program."""
    spill_bytes: int
    spill_instructions: int
    wide_loads: int
    """128-bit loads from global memory anywhere in the kernel."""
    loops: list[Loop]
    narrow_products: list[str]
    """32-bit products that reach the offset of an address."""
    threads: int
    """Threads of one program."""

    def tile_loops(self) -> list[Loop]:
        """Return the loops over whole tiles, not those over the rest of a row, which read half as much in a trip."""
        most = max((loop.bits for loop in self.loops), default=0)
        return [loop for loop in self.loops if loop.bits * 3 >= most * 2]

    def main_loop(self) -> Loop | None:
        """Return the loop that loads most by 128 bits, of several the one with exponentials: that over whole tiles."""
        return max(self.loops, key=lambda loop: (loop.load_widths.get(128, 0), loop.special), default=None)


def inspect_kernel(
    function: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    divisible: tuple[str, ...],
    options: dict[str, Any],
    target_name: str,
) -> Code:
    """Compile one kernel for a GPU that need not be there and read its code."""
    target = TARGETS[target_name]
    positions = {name: index for index, name in enumerate(signature)}
    source = ASTSource(
        function,
        signature,
        {(positions[name],): value for name, value in constexprs.items()},
        {(positions[name],): [["tt.divisibility", 16]] for name in divisible},
    )
    kernel = triton.compile(source, target=target, options=options)
    facts = _nvidia(kernel.asm["cubin"]) if target.backend == "cuda" else _amd(kernel.asm["amdgcn"])
    return Code(
        shared=kernel.metadata.shared,
        narrow_products=narrow_products(kernel.asm["ttir"]),
        threads=kernel.metadata.num_warps * target.warp_size,
        **facts,
    )


def _nvidia(cubin: bytes) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        run = subprocess.run([tool, "-res-usage", "-sass", binary], capture_output=True, text=True, check=True)
    text = run.stdout + run.stderr
    usage = re.search(r"REG:(\d+).*?STACK:(\d+).*?LOCAL:(\d+)", text)
    if usage is None:
        raise ValueError(f"cuobjdump told no resource usage: {text[:500]}")
    lines = [(int(address, 16), body) for address, body in _INSTRUCTION.findall(text)]
    lines = [(address, body) for address, body in lines if not body.startswith("NOP")]
    branches = [(address, re.search(_BRANCH, body)) for address, body in lines]
    jumps = [(address, int(found[1], 16)) for address, found in branches if found]
    return {
        "registers": int(usage[1]),
        "spill_bytes": int(usage[2]) + int(usage[3]),
        "spill_instructions": sum(bool(re.search(r"\b(?:STL|LDL)\b", body)) for _, body in lines),
        "wide_loads": sum("LDG.E" in body and ".128" in body for _, body in lines),
        # The last branch of a kernel jumps to itself.
        "loops": _loops(lines, [jump for jump in jumps if jump[0] != jump[1]], _nvidia_loop),
    }


def _nvidia_loop(body: list[str]) -> Loop:
    widths: dict[int, int] = {}
    for load in (found[0] for found in map(_NVIDIA_LOAD.search, body) if found):
        suffixes = load.split(".")
        width = next((int(part) for part in suffixes if part in ("64", "128")), 32)
        width = next((int(part[1:]) for part in suffixes if part in ("U8", "S8", "U16", "S16")), width)
        widths[width] = widths.get(width, 0) + 1
    special, barriers = (sum(name in line for line in body) for name in ("MUFU", "BAR.SYNC"))
    return Loop(len(body), special, barriers, widths)


def _amd(assembly: str) -> dict[str, Any]:
    lines: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    for text in assembly.splitlines():
        line = text.split(";")[0].strip()
        if re.fullmatch(r"\.\w+:", line):
            labels[line[:-1]] = len(lines)
        elif re.match(r"[a-z]+_", line):
            lines.append((len(lines), line))
    branches = [(number, re.search(r"\bs_c?branch\w*\s+(\.\w+)", line)) for number, line in lines]
    jumps = [(number, labels[found[1]]) for number, found in branches if found and found[1] in labels]

    def fact(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s*(\d+)", assembly))

    return {
        "registers": fact("vgpr_count"),
        # Scalar registers are spilled into lanes of vector registers: memory may be set aside for that, and never used.
        "spill_bytes": fact("private_segment_fixed_size") if re.search(r"\bscratch_(?:load|store)", assembly) else 0,
        "spill_instructions": fact("vgpr_spill_count"),
        "wide_loads": sum(bool(re.search(r"\b(?:global|buffer|flat)_load_dwordx4\b", line)) for _, line in lines),
        "loops": _loops(lines, jumps, _amd_loop),
    }


def _amd_loop(body: list[str]) -> Loop:
    widths: dict[int, int] = {}
    for kind in (found[1] for found in map(_AMD_LOAD.search, body) if found):
        width = _AMD_WIDTHS.get(kind, 16 if "short" in kind else 8)
        widths[width] = widths.get(width, 0) + 1
    special = sum(bool(_AMD_SPECIAL.search(line)) for line in body)
    return Loop(len(body), special, sum("s_barrier" in line for line in body), widths)


def _loops(lines: list[tuple[int, str]], jumps: list[tuple[int, int]], read: Any) -> list[Loop]:
    """Return the innermost loops that load 128 bits from global memory; all innermost ones where none does."""
    # Several branches back to one place are one loop: it ends at the last of them.
    ends: dict[int, int] = {}
    for end, start in jumps:
        if start <= end:
            ends[start] = max(ends.get(start, end), end)
    bodies = {(start, end): [body for address, body in lines if start <= address <= end] for start, end in ends.items()}
    loading = {span: loop for span, body in bodies.items() if (loop := read(body)).load_widths}
    if any(128 in loop.load_widths for loop in loading.values()):
        loading = {span: loop for span, loop in loading.items() if 128 in loop.load_widths}
    return [
        loop
        for (start, end), loop in loading.items()
        if not any(other != (start, end) and start <= other[0] and other[1] <= end for other in loading)
    ]


def narrow_products(ttir: str) -> list[str]:
    """Return the 32-bit products that reach the offset of an address."""
    reader = TtirReader()
    for line in ttir.splitlines():
        reader.read(_LOCATION.sub("", line).strip())
    pending = list(reader.offsets)
    seen: set[str] = set()
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            pending.extend(reader.sources.get(value, []))
    return [product for value, product in reader.products.items() if value in seen]


class TtirReader:
    """Follows which values each value is computed from; names count within their region only."""

    def __init__(self) -> None:
        self.sources: dict[str, list[str]] = {}
        self.products: dict[str, str] = {}
        self.offsets: list[str] = []
        self.scopes: list[dict[str, str]] = [{}]
        self.owners: list[str] = [""]
        self.lines = 0

    def read(self, text: str) -> None:
        """Take in one line without its location."""
        self.lines += 1
        owner, arguments = "", list[tuple[str, str]]()
        found = _RESULT.match(text)
        if found:
            owner, arguments = self.define(found[1], found[2], text.split(" = ", 1)[1])
        elif text.startswith("scf.yield"):
            self.sources.setdefault(self.owners[-1], []).extend(self.values(text))
        if text.startswith("}"):
            self.scopes.pop()
            closed = self.owners.pop()
            owner = closed if text.endswith("{") else owner
        if text.endswith("{"):
            self.owners.append(owner)
            self.scopes.append({})
            for name, start in arguments:
                self.scopes[-1][name] = f"{name}@{self.lines}"
                self.sources[f"{name}@{self.lines}"] = [start, owner]

    def define(self, name: str, operation: str, body: str) -> tuple[str, list[tuple[str, str]]]:
        """Record a result; return its unique name and the arguments of the region it opens with their first values."""
        unique = f"{name}@{self.lines}"
        pairs = re.findall(r"(%[\w.-]+) = (%[\w.-]+)", body)
        arguments = [(argument, self.resolve(start)) for argument, start in pairs]
        values = self.values(re.sub(r"%[\w.-]+ = ", "", body))
        if operation == "tt.addptr":
            self.offsets.append(values[1])
        # What was loaded, compared or reduced is a new number; sums, casts, branches and loops carry a product on.
        if re.match(r"arith\.(?!cmp)|tt\.(splat|broadcast|expand_dims|reshape|unsplat)|scf", operation):
            self.sources[unique] = values
        if operation == "arith.muli" and re.search(r": (tensor<.*x)?i32>?$", body):
            self.products[unique] = body
        self.scopes[-1][name] = unique
        return unique, arguments

    def values(self, text: str) -> list[str]:
        """Return the values named in a line."""
        return [self.resolve(name) for name in _VALUE.findall(text)]

    def resolve(self, name: str) -> str:
        """Return the unique name of a value that is visible here."""
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)
