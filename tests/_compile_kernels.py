"""Compiles kernels for GPUs that are not there and prints, as JSON, what the generated code looks like.

Run as a process of its own: the interpreter is chosen when the kernels are imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specker.kernels import variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ADJUSTED_ON = {("sm_90", "bf16"), ("gfx942", "bf16")}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_RESULT = re.compile(r"^\s*(%[\w.-]+)(?::\d+)? = ([\w.]+)")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_VALUE = re.compile(r"%[\w.-]+")


@triton.jit
def narrow_offset(rows_ptr, stride, out_ptr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Address a row by a 32-bit product, the fault that `narrow_products` has to find, through a loop and a branch."""
    offset = tl.program_id(0) * stride
    for _ in range(stride):
        if offset > 5:
            offset += 1
    tl.store(out_ptr, tl.load(rows_ptr + offset.to(tl.int64)))


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


def nvidia_code(cubin: bytes) -> dict[str, Any]:
    """Return what cuobjdump says about a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True)
        code = subprocess.run([tool, "-sass", binary], capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage.stdout + usage.stderr)
    if stack is None:
        raise ValueError(f"cuobjdump told no resource usage: {usage.stdout} {usage.stderr}")
    return {
        "spill_bytes": int(stack[1]) + int(stack[2]),
        "spill_instructions": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "wide_loads": len(re.findall(r"\bLDG\.E\.128\b", code)),
    }


def amd_code(assembly: str) -> dict[str, Any]:
    """Return the same from AMD's assembly."""
    return {
        "spill_bytes": sum(int(size) for size in re.findall(r"\.private_segment_fixed_size:\s*(\d+)", assembly)),
        "spill_instructions": sum(int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)),
        "wide_loads": len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", assembly)),
    }


def encoded(code: dict[str, Any]) -> str:
    """Return one line of the output."""
    return json.dumps(code) + "\n"


def compiled(variant: variants.Variant, target: GPUTarget) -> Any:
    """Return a compiled kernel."""
    positions = {name: index for index, name in enumerate(variant.signature)}
    constants = {(positions[name],): value for name, value in variant.constexprs.items()}
    source = ASTSource(variant.function, variant.signature, constants, {})
    return triton.compile(source, target=target, options=variant.options)


def main(target_name: str, dtype_name: str, vocab: int) -> None:
    """Compile every shipped variant for one target and print one JSON object a line, the faulty kernel first."""
    target = TARGETS[target_name]
    signature = {"rows_ptr": "*fp32", "stride": "i32", "out_ptr": "*fp32"}
    faulty = compiled(variants.Variant("narrow_offset", narrow_offset, signature, {}, {}), target)
    sys.stdout.write(encoded({"name": "narrow_offset", "narrow_products": narrow_products(faulty.asm["ttir"])}))
    for variant in variants.shipped_variants(vocab, DTYPES[dtype_name]):
        # The loads that biases and masks add are the same for every dtype and NVIDIA generation.
        if variant.name.endswith("_adjusted") and (target_name, dtype_name) not in ADJUSTED_ON:
            continue
        kernel = compiled(variant, target)
        code = nvidia_code(kernel.asm["cubin"]) if target.backend == "cuda" else amd_code(kernel.asm["amdgcn"])
        sys.stdout.write(
            encoded({"name": variant.name, "narrow_products": narrow_products(kernel.asm["ttir"]), **code})
        )


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("TRITON_INTERPRET: expected it unset, the interpreter compiles nothing")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
